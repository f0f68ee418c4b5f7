"""Micro-batches that a loader delivers one by one, gathered into the windows that make one update each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.core.split import Piece
from bigbatch.errors import OptionError


@dataclass(frozen=True)
class Window:
    """The micro-batches of one update, as the loader delivered them.

    Attributes:
        micro_batches: what the loader yielded, `accum_steps` items or, at the end, as many as were left.
        last: whether the loader had nothing more.
    """

    micro_batches: tuple[Any, ...]
    last: bool

    def __len__(self) -> int:
        return len(self.micro_batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.micro_batches)


class Windows:
    """See `windows`."""

    def __init__(self, loader: Iterable[Any], accum_steps: int) -> None:
        if isinstance(accum_steps, bool) or not isinstance(accum_steps, int) or accum_steps < 1:
            raise OptionError(
                f"accum_steps={accum_steps!r} was asked for", "it counts micro-batches", "pass a whole number from 1"
            )
        self.loader, self.accum_steps = loader, accum_steps

    def __iter__(self) -> Iterator[Window]:
        gathered: list[Any] = []
        for micro_batch in self.loader:
            if len(gathered) == self.accum_steps:
                yield Window(tuple(gathered), last=False)
                gathered = []
            gathered.append(micro_batch)
        if gathered:
            yield Window(tuple(gathered), last=True)

    def __len__(self) -> int:
        """The number of updates in one pass; a TypeError where the loader has no length."""
        return -(-len(self.loader) // self.accum_steps)  # type: ignore[arg-type]


def windows(loader: Iterable[Any], accum_steps: int) -> Windows:
    """The batches of a loader that yields micro-batches: `accum_steps` at a time, and what is left at the end.

    One item is looked at ahead, so a stream without a length closes its last window too, and that window's loss is
    divided by its own size. The result can be iterated once for every epoch.

    Args:
        loader: yields micro-batches, `(inputs, targets)` for a model with a separate loss.
        accum_steps: micro-batches in one batch.

    Raises:
        OptionError: `accum_steps` is no positive whole number.

    >>> [(len(window), window.last) for window in windows(range(10), accum_steps=4)]
    [(4, False), (4, False), (2, True)]
    >>> len(windows(range(10), accum_steps=4))
    3
    """
    return Windows(loader, accum_steps)


def in_a_row(items: Sequence[list[Piece]]) -> list[Piece]:
    """The pieces of all items of a window, their samples numbered through the whole batch.

    >>> one, two = [Piece(2, None, None, 0), Piece(2, None, None, 2)], [Piece(1, None, None, 0)]
    >>> [piece.first for piece in in_a_row([one, two])]
    [0, 2, 4]
    """
    if len(items) == 1:
        return items[0]
    numbered: list[Piece] = []
    for piece in (piece for item in items for piece in item):
        first = numbered[-1].first + numbered[-1].samples if numbered else 0
        numbered.append(piece._replace(first=first))
    return numbered


def items_of(inputs: Any, targets: Any, paired: bool) -> list[tuple[Any, Any]]:
    """A batch as it came: one pair of inputs and targets, or a window's, whose items hold both where `paired`.

    >>> items_of(Window(("rows", "more rows"), last=True), None, paired=False)
    [('rows', None), ('more rows', None)]
    """
    if not isinstance(inputs, Window):
        return [(inputs, targets)]
    if targets is not None:
        raise OptionError("targets were passed beside a window", "a window brings its own", "pass the window alone")
    if not paired:
        return [(item, None) for item in inputs]
    for item in inputs:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise OptionError(
                "a window of micro-batches was given to a model with a separate loss",
                f"a micro-batch that is a {type(item).__name__}, not a pair",
                "have the loader yield (inputs, targets)",
            )
    return [(item[0], item[1]) for item in inputs]
