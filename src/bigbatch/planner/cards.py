"""The memory of common cards, as much of it as a driver leaves to programs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from bigbatch.errors import OptionError

GIB = 2**30
KEPT_SHARE, KEPT_LEAST = 1 / 32, 3 * GIB // 8  # what drivers keep for themselves: 1 to 5 %, by card and version
CHECK_SHARE = 1 / 16  # of cards without memory of its own for error correction, which is on as they are delivered
WORDS_LEFT_OUT = re.compile(r"\b(nvidia|geforce|tesla|amd|instinct|sxm\d?|pcie|hbm\d?e?|gpu)\b|rtx|[^a-z0-9]+")


@dataclass(frozen=True)
class Card:
    """A card.

    Attributes:
        model: what it is called.
        gib: its memory on the maker's data sheet; makers write GB and mean 2^30 bytes.
        checked: whether error correction takes its share of that.
    """

    model: str
    gib: int
    checked: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.gib}GB"

    @property
    def memory_bytes(self) -> int:
        """What `torch.cuda.get_device_properties(0).total_memory` says at least.

        That differs by a few per cent between versions of the driver. This is meant to be on the safe side; the call
        itself is exact.

        >>> card("RTX 4060").memory_bytes / GIB, card("T4").memory_bytes / GIB
        (7.625, 14.53125)
        """
        there = round(self.gib * GIB * (1 - CHECK_SHARE * self.checked))
        return there - max(round(KEPT_SHARE * there), KEPT_LEAST)


CARDS = (
    # https://www.nvidia.com/en-us/geforce/graphics-cards/30-series/
    Card("RTX 3050", 8),
    Card("RTX 3060", 12),
    Card("RTX 3060 Ti", 8),
    Card("RTX 3070", 8),
    Card("RTX 3080", 10),
    Card("RTX 3080", 12),
    Card("RTX 3090", 24),
    # https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/
    Card("RTX 4060", 8),
    Card("RTX 4060 Ti", 8),
    Card("RTX 4060 Ti", 16),
    Card("RTX 4070", 12),
    Card("RTX 4080", 16),
    Card("RTX 4090", 24),
    # https://www.nvidia.com/en-us/geforce/graphics-cards/50-series/
    Card("RTX 5060", 8),
    Card("RTX 5070", 12),
    Card("RTX 5080", 16),
    Card("RTX 5090", 32),
    # https://www.nvidia.com/en-us/data-center/tesla-t4/, /v100/, /l4/, /products/a10-gpu/ and /l40s/ beside it
    Card("T4", 16, checked=True),
    Card("V100", 16),
    Card("V100", 32),
    Card("L4", 24, checked=True),
    Card("A10", 24, checked=True),
    Card("L40S", 48, checked=True),
    # https://www.nvidia.com/en-us/data-center/a100/, /h100/ and /h200/ beside it
    Card("A100", 40),
    Card("A100", 80),
    Card("H100", 80),
    Card("H200", 141),
    # https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
    Card("MI300X", 192),
)


def card(name: str) -> Card:
    """The card of that name; case, spaces, makers' words and, where one size alone was made, the size do not matter.

    Raises:
        OptionError: no card of that name is known, or several sizes are; the nearest names are said.

    >>> card("4060") == card("rtx4060") == card("NVIDIA GeForce RTX 4060"), card("A100-SXM4-80GB").name
    (True, 'A100 80GB')
    >>> card("A100")
    Traceback (most recent call last):
    bigbatch.errors.OptionError: gpu='A100' was asked for. Found: there are A100 40GB, A100 80GB. Do: name one of them.
    """
    sized = re.search(r"(?<![0-9])(\d+)\s*gi?b\b", name.lower())
    gib = int(sized[1]) if sized else None
    asked = key_of(name.lower().replace(sized[0], " ") if sized else name)
    found = [each for each in CARDS if key_of(each.model) == asked and gib in (None, each.gib)]
    if len(found) == 1:
        return found[0]
    if found:
        several = ", ".join(each.name for each in found)
        raise OptionError(f"gpu={name!r} was asked for", f"there are {several}", "name one of them")
    near = get_close_matches(asked, [key_of(each.model) for each in CARDS], n=5, cutoff=0.3)
    names = ", ".join(dict.fromkeys(each.name for key in near for each in CARDS if key_of(each.model) == key))
    do = f"name one of {names}" if names else "leave gpu out"
    raise OptionError(f"gpu={name!r} was asked for", "no such card in the table", f'{do}, or pass memory="8GiB"')


def key_of(name: str) -> str:
    """What is compared of a name.

    >>> key_of("NVIDIA GeForce RTX 4060 Ti"), key_of("A100-SXM4")
    ('4060ti', 'a100')
    """
    return WORDS_LEFT_OUT.sub("", name.lower())
