"""Bytes as people write them."""

from __future__ import annotations

import re

from bigbatch.errors import OptionError

FACTORS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
FACTORS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: int | str, name: str = "bytes") -> int:
    """A number of bytes from a number or from text with a unit.

    Raises:
        OptionError: the text is no number of bytes.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 MB"), parse_bytes(4096)
    (2147483648, 1500000, 4096)
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    if found is None or found[2].upper() not in FACTORS:
        raise OptionError(
            f"{name}={text!r} was asked for", "it is no number of bytes", 'pass a number, or text such as "2GiB"'
        )
    return int(float(found[1]) * FACTORS[found[2].upper()])


def format_bytes(count: float) -> str:
    """A number of bytes in the largest binary unit that leaves a number of at least one.

    >>> format_bytes(2**31), format_bytes(1500), format_bytes(12)
    ('2.00 GiB', '1.46 KiB', '12 B')
    """
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
