"""What a model's own loss may be divided by, and the samples of a batch that tell these denominators apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.join import join
from bigbatch.core.rules import samples
from bigbatch.core.split import Piece
from bigbatch.core.tree import children, leaves, map_leaves
from bigbatch.core.weigh import Count, number, weights

IGNORED = -100
IGNORED_BY_CONFIG = ("pad_token_id", "semantic_loss_ignore_index")
LABELS = ("label", "target", "positions")  # "start_positions" of an answer
SINGLES = 8
Counting = Callable[[Any, Any, int], Any]
Question = tuple[Piece, ...]  # one or two samples to run the model on


@dataclass(frozen=True)
class Entries:
    """Counts the entries of one field, without those of the value `ignored`, and without the first of each row."""

    path: str
    ignored: int
    shifted: bool

    def __call__(self, inputs: Any, _targets: Any, _samples: int) -> Any:
        field = dict(named_leaves(inputs)).get(self.path)
        if not isinstance(field, Tensor):
            return 0
        return ((field[..., 1:] if self.shifted else field) != self.ignored).sum()


@dataclass(frozen=True)
class Candidate:
    """One way the model's loss may be weighed: what it counts, and whether the model is handed the total."""

    count: Counting
    handed: bool

    def counts(self, pieces: Sequence[Piece]) -> list[Count]:
        return [number(self.count(piece.inputs, None, piece.samples)) for piece in pieces]

    def weights(self, pieces: Sequence[Piece]) -> list[Count]:
        return weights("sum" if self.handed else "mean", self.counts(pieces))


def named_leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    parts = children(tree)
    if parts is None:
        yield path, tree
        return
    for name, child in parts:
        yield from named_leaves(child, path + name)


def counts_of(model: Any, inputs: Any) -> list[Counting]:
    """What a model's loss may be divided by: entries of its labels, samples, and entries of other fields.

    With one label a sample, nothing inside a sample is counted. With labels by position, only a mask may count instead.
    Without a field that is named like labels, every field of whole numbers may hold them.
    """
    config = getattr(model, "config", None)
    by_config = {getattr(config, name, None) for name in IGNORED_BY_CONFIG}
    ignored = [IGNORED, *sorted(value for value in by_config if type(value) is int and value != IGNORED)]
    fields = [(path, leaf) for path, leaf in named_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() > 0]
    labels = [(path, leaf) for path, leaf in fields if any(name in path for name in LABELS)]
    found = [entry for path, leaf in labels for entry in entries(path, leaf, ignored)]
    if labels and not any(leaf.dim() > 1 and not leaf.is_floating_point() for _, leaf in labels):
        return [*found, samples]
    masks = [(path, leaf) for path, leaf in fields if "mask" in path or leaf.dtype == torch.bool]
    others = [] if labels else [(path, leaf) for path, leaf in fields if path not in dict(masks)]
    by_mask = [Entries(path, 0, shifted) for path, leaf in masks for shifted in shifts(leaf)]
    return [*found, samples, *by_mask, *(entry for path, leaf in others for entry in entries(path, leaf, [IGNORED]))]


def entries(path: str, leaf: Tensor, ignored: Sequence[int]) -> list[Entries]:
    if leaf.is_floating_point() or leaf.is_complex():
        return []
    return [Entries(path, value, shifted) for value in ignored for shifted in shifts(leaf)]


def shifts(leaf: Tensor) -> tuple[bool, ...]:
    return (False, True) if leaf.dim() > 1 else (False,)


def agreed(candidates: Sequence[Candidate], pieces: Sequence[Piece]) -> bool:
    """Whether all candidates weigh the micro-batches alike."""
    return len(candidates) < 2 or all(c.weights(pieces) == candidates[0].weights(pieces) for c in candidates[1:])


def told_apart(singles: Sequence[Piece], counts: Sequence[Counting]) -> list[Piece]:
    """A few samples that differ as much as the batch allows in what may be counted, those without a target last."""

    def profile(single: Piece) -> list[float]:
        return [float(number(count(single.inputs, None, single.samples))) for count in counts]

    ordered = sorted(singles, key=profile)
    last = len(ordered) - 1
    chosen = [ordered[i] for i in sorted({last * k // (SINGLES - 1) for k in range(SINGLES)})]
    return sorted(chosen, key=lambda single: profile(single)[0] == 0)


def doubt(candidates: Sequence[Candidate], question: Question) -> tuple[bool, int, float]:
    """Least for the question that tells the candidates apart, rather of samples with targets, and as far as it can."""
    firsts = [float(candidate.weights(question)[0]) for candidate in candidates]
    without = sum(float(count) == 0 for candidate in candidates for count in candidate.counts(question))
    return max(firsts) == min(firsts), without, min(firsts) - max(firsts)


def alike(first: Piece, second: Piece) -> Question:
    """Two samples, the longer one cut to the length of the other along the second axis of its fields."""
    lengths = [common_length(*pair) for pair in zip(leaves(first.inputs), leaves(second.inputs), strict=False)]

    def cut(piece: Piece) -> Piece:
        rest = iter(lengths)

        def shortened(leaf: Any) -> Any:
            length = next(rest, None)
            return leaf if length is None else leaf.narrow(1, 0, length)

        return Piece(piece.samples, map_leaves(shortened, piece.inputs), None)

    return cut(first), cut(second)


def common_length(first: Any, second: Any) -> int | None:
    """The shorter of two lengths; None where there is nothing to cut."""
    for leaf in (first, second):
        if not isinstance(leaf, Tensor) or leaf.is_nested or leaf.dim() < 2:
            return None
    return None if first.size(1) == second.size(1) else min(first.size(1), second.size(1))


def together(first: Piece, second: Piece, pair: Question) -> Any:
    """Two samples as one batch; a tensor that is one object in both samples of the pair is shared, and stays as it is.

    Raises:
        SplitError: they cannot be joined.

    >>> prior = torch.zeros(5)
    >>> a, b = (Piece(1, {"text": torch.zeros(1, length), "prior": prior}, None) for length in (4, 3))
    >>> pair = alike(a, b)
    >>> [tuple(field.shape) for field in together(*pair, pair).values()]
    [(2, 3), (5,)]
    """
    mine = {id(leaf) for leaf in leaves(pair[1].inputs)}
    shared: Mapping[str, Tensor] = {
        f"shared {id(leaf)}": leaf
        for leaf in leaves(pair[0].inputs)
        if isinstance(leaf, Tensor) and id(leaf) in mine and (leaf.dim() == 0 or leaf.size(0) != pair[0].samples)
    }

    def named(leaf: Any) -> Any:
        return f"shared {id(leaf)}" if f"shared {id(leaf)}" in shared else leaf

    both = [map_leaves(named, piece.inputs) for piece in (first, second)]
    joined = join(both, [first.samples, second.samples], "inputs")
    return map_leaves(lambda leaf: shared.get(leaf, leaf) if isinstance(leaf, str) else leaf, joined)
