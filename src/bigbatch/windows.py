"""Micro-batches that a loader delivers one by one, gathered into the windows that make one update each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigbatch.core.split import Piece
from bigbatch.core.tree import storage_of, tensors_of
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
        seen: list[list[Seen]] = []
        for micro_batch in self.loader:
            new = seen_in(micro_batch)
            if len(gathered) == self.accum_steps:
                refuse_refilled([*seen, new])  # the loader has run once more since the window was full
                yield Window(tuple(gathered), last=False)
                gathered, seen = [], []
            gathered.append(held(micro_batch))
            seen.append(new)
        if gathered:
            refuse_refilled(seen)
            yield Window(tuple(gathered), last=True)

    def __len__(self) -> int:
        """The number of updates in one pass; a TypeError where the loader has no length."""
        return -(-len(self.loader) // self.accum_steps)  # type: ignore[arg-type]


def windows(loader: Iterable[Any], accum_steps: int) -> Windows:
    """The batches of a loader that yields micro-batches: `accum_steps` at a time, and what is left at the end.

    One item is looked at ahead, so a stream without a length closes its last window too, and that window's loss is
    divided by its own size. The result can be iterated once for every epoch. All micro-batches of a window and the
    item behind it are held at one time, so a loader must not fill the same tensor again.

    Args:
        loader: yields micro-batches, `(inputs, targets)` for a model with a separate loss.
        accum_steps: micro-batches in one batch.

    Raises:
        OptionError: `accum_steps` is no positive whole number; or, where a window is due, the loader has written to
            what it yielded before.

    >>> [(len(window), window.last) for window in windows(range(10), accum_steps=4)]
    [(4, False), (4, False), (2, True)]
    >>> len(windows(range(10), accum_steps=4))
    3
    """
    return Windows(loader, accum_steps)


class Seen(NamedTuple):
    """A tensor of a micro-batch, and how often it had been written to when it was delivered."""

    tensor: Tensor
    version: int


def seen_in(micro_batch: Any) -> list[Seen]:
    """The tensors of a micro-batch whose changes can be told; those made in inference mode count none."""
    return [Seen(tensor, tensor._version) for tensor in tensors_of(micro_batch) if not tensor.is_inference()]


def held(tree: Any) -> Any:
    """The same in dicts, lists and tuples of its own, as a loader may put the next tensors into those that it yielded.

    >>> batch = {"rows": [1, 2]}
    >>> held(batch) == batch, held(batch) is batch
    (True, False)
    """
    if type(tree) is dict:
        return {name: held(value) for name, value in tree.items()}
    return type(tree)(map(held, tree)) if type(tree) in (list, tuple) else tree


def refuse_refilled(seen: Sequence[Sequence[Seen]]) -> None:
    """OptionError where a tensor was written to since it came, or two micro-batches share memory from outside.

    PyTorch counts what is written to a tensor and to its views. It counts nothing that NumPy writes, but there every
    `torch.from_numpy` makes a storage of its own. Delivering one tensor several times is no change.

    >>> buffer = torch.zeros(2)
    >>> delivered = [seen_in(buffer)]
    >>> refuse_refilled(delivered * 2)
    >>> _ = buffer.fill_(1)
    >>> refuse_refilled(delivered)
    Traceback (most recent call last):
    ...
    bigbatch.errors.OptionError: a window of micro-batches was asked of a loader. Found: a tensor of shape (2,) was \
written to after it was yielded. Do: have the loader yield copies, such as buffer.clone().
    """
    found, first, met = "", dict[int, tuple[int, Tensor]](), set[int]()
    for item, (tensor, version) in ((item, each) for item, tensors in enumerate(seen) for each in tensors):
        if tensor._version != version:
            found = f"a tensor of shape {tuple(tensor.shape)} was written to after it was yielded"
        elif id(tensor) not in met and has_address(tensor):
            before, other = first.setdefault(tensor.data_ptr(), (item, tensor))
            if before != item and storage_of(other) != storage_of(tensor):
                found = f"tensors of shape {tuple(tensor.shape)} of two micro-batches lie in the same memory"
        met.add(id(tensor))
    if found:
        do = "have the loader yield copies, such as buffer.clone()"
        raise OptionError("a window of micro-batches was asked of a loader", found, do)


def has_address(tensor: Tensor) -> bool:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return plain and tensor.data_ptr() != 0  # empty tensors and those of the meta device lie nowhere


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
