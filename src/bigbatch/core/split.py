"""Cuts a batch into micro-batches: one set of even borders for all fields, and nothing is guessed.

A field is a place in the batch, named by its path ("inputs.view.angle", "targets[0]"). Tensors hold one row a sample,
or the batch is refused by name. Numbers, strings and 0-d tensors are shared. A list may hold one item a sample
("samples") or one item a field ("fields"): it is read in the only way that fits, and so from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bigbatch.core.fields import Cutter, Known
from bigbatch.core.packed import cut_strided
from bigbatch.errors import OptionError, SplitError

WORDS = ("shared", "samples", "fields")
SplitFunction = Callable[[Any, Any, "int | None"], Iterable[tuple[int, Any, Any]]]


class Piece(NamedTuple):
    """A micro-batch: its number of samples, its inputs and targets, and the number of its first sample in the batch."""

    samples: int
    inputs: Any
    targets: Any
    first: int = 0


@lru_cache(maxsize=256)
def even_sizes(samples: int, micro_batch_size: int | None) -> tuple[int, ...]:
    """As few pieces as `micro_batch_size` allows, the larger ones first."""
    pieces = -(-samples // (micro_batch_size or samples or 1))
    size, larger = divmod(samples, pieces or 1)
    return (size + 1,) * larger + (size,) * (pieces - larger)


def even_borders(samples: int, micro_batch_size: int | None) -> list[int]:
    """Where each micro-batch begins and the last one ends; sizes differ by at most one.

    Args:
        samples: samples in the batch.
        micro_batch_size: the most samples that a micro-batch may hold; None means one micro-batch.

    Raises:
        OptionError: `micro_batch_size` is no integer of at least 1.

    >>> even_borders(10, 4), even_borders(3, 8), even_borders(0, 4)
    ([0, 4, 7, 10], [0, 3], [0])
    """
    check_size(micro_batch_size)
    borders = [0]
    for size in even_sizes(samples, micro_batch_size):
        borders.append(borders[-1] + size)
    return borders


def check_size(micro_batch_size: int | None) -> None:
    if micro_batch_size is None or (type(micro_batch_size) is int and micro_batch_size >= 1):
        return
    asked = f"micro_batch_size={micro_batch_size!r} was asked for"
    raise OptionError(asked, "it is no integer of at least 1", "pass a number of samples, or None for one piece")


class Splitter:
    """Cuts batches, and remembers how it read their lists.

    Args:
        split: names of shared fields; or a mapping from names to "shared", "samples" or "fields"; or a function
            `split(inputs, targets, micro_batch_size)` that yields `(samples, inputs, targets)`, for batches whose
            samples are no rows (graphs glued together, image patches). A name is a field's last key or its full path.
        model_sizes: sizes of the model's parameters. A vector of floats inside a container that is as long as the
            batch and as one of these may belong to classes or channels, so it is refused until `split` tells.

    >>> batch = {"x": torch.arange(3), "ids": ["a", "b", "c"], "temperature": 0.5}
    >>> [piece.inputs for piece in Splitter().pieces(batch, None, 2)]
    ... # doctest: +NORMALIZE_WHITESPACE
    [{'x': tensor([0, 1]), 'ids': ['a', 'b'], 'temperature': 0.5},
     {'x': tensor([2]), 'ids': ['c'], 'temperature': 0.5}]
    """

    def __init__(self, split: Any = None, model_sizes: frozenset[int] = frozenset()) -> None:
        self._function: SplitFunction | None = split if callable(split) else None
        words = {} if callable(split) else words_of(split)
        self._known = Known(words, model_sizes, unmet=set(words))

    def count(self, inputs: Any, targets: Any) -> int:
        """Samples in the batch.

        Raises:
            SplitError: the fields do not agree on it, or it cannot be told.
        """
        if self._function is not None:
            return sum(piece.samples for piece in pieces_of(self._function, inputs, targets, None))
        return Cutter(inputs, targets, self._known, "the number of samples was asked for").samples

    def pieces(self, inputs: Any, targets: Any, micro_batch_size: int | None) -> list[Piece]:
        """The batch's micro-batches in order; none for a batch without samples. Tensors are views, not copies.

        Args:
            inputs: a tensor, or a tuple or mapping of arguments with any structure inside; samples come first.
            targets: the same, or None.
            micro_batch_size: the most samples that a micro-batch may hold; None means one micro-batch.

        Raises:
            SplitError: a field's first axis disagrees, or it cannot be told from a shared one; it is named.
            OptionError: `micro_batch_size` is no integer of at least 1.
        """
        check_size(micro_batch_size)
        if self._function is not None:
            return pieces_of(self._function, inputs, targets, micro_batch_size)
        if not self._known.words and is_plain(inputs) and is_plain(targets) and len(inputs) == len(targets):
            sizes = even_sizes(len(inputs), micro_batch_size)
            left, right = (cut_strided(inputs, sizes), cut_strided(targets, sizes)) if sizes else ([], [])
            return numbered(sizes, left, right)
        cutter = Cutter(inputs, targets, self._known, f"micro_batch_size={micro_batch_size} was asked for")
        sizes = even_sizes(cutter.samples, micro_batch_size)
        cutter.borders = even_borders(cutter.samples, micro_batch_size)
        return numbered(sizes, cutter.cut(inputs, "inputs"), cutter.cut(targets, "targets")) if sizes else []


def is_plain(value: Any) -> bool:
    return type(value) is Tensor and value.layout is torch.strided and not value.is_nested and value.dim() > 0


def numbered(sizes: tuple[int, ...], inputs: list[Any], targets: list[Any]) -> list[Piece]:
    pieces, first = [], 0
    for size, left, right in zip(sizes, inputs, targets, strict=True):
        pieces.append(Piece(size, left, right, first))
        first += size
    return pieces


def words_of(split: Any) -> dict[str, str]:
    """`split` as a mapping from names to words; an iterable names shared fields."""
    named = split if isinstance(split, Mapping) else {}
    if not named and isinstance(split, Iterable) and not isinstance(split, str | Mapping):
        named = {name: "shared" for name in split}
    if (split is None or named or split in ({}, [], (), set())) and all(word in WORDS for word in named.values()):
        return dict(named)
    found = f"{split!r} is neither names of shared fields, nor a mapping to {', '.join(WORDS)}, nor a function"
    raise OptionError(
        "split= was asked to tell what the fields are", found, 'pass for instance split={"prior": "shared"}'
    )


def pieces_of(split: SplitFunction, inputs: Any, targets: Any, micro_batch_size: int | None) -> list[Piece]:
    triples = []
    for item in split(inputs, targets, micro_batch_size):
        if not isinstance(item, tuple) or len(item) != 3 or type(item[0]) is not int or item[0] < 1:
            asked, found = (
                "split= was asked for the pieces of a batch",
                f"it yielded {type(item).__name__} {item!r:.80}",
            )
            raise SplitError(asked, found, "yield (samples, inputs, targets) with an int of at least 1")
        triples.append(item)
    sizes, left, right = zip(*triples, strict=True) if triples else ((), (), ())
    return numbered(sizes, list(left), list(right))
