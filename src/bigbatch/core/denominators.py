"""What a loss of torch.nn divides by, read from its targets: elements, rows, target tokens, class weights, samples.

A denominator also knows which arguments would tie samples together (a broadcast over the axis of samples, a weight
for each sample), because no share of the batch makes such a loss add up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import LossError

Weight = Callable[[], "Tensor | None"]
"""Reads a weight at the time of the call, so that a module moved to another device is followed."""


@dataclass(frozen=True)
class Place:
    """Where a loss finds its targets.

    Attributes:
        loss: what the loss is called, for errors.
        argument: the position of the targets among the loss's arguments.
        item: their position in the `targets` that are counted; None where `targets` are one tensor.
    """

    loss: str
    argument: int = -1
    item: int | None = None


@dataclass(frozen=True)
class Denominator:
    """How to count what the loss divides by, and when to refuse.

    Attributes:
        unit: what is counted.
        count: `count(targets, samples)` of one micro-batch or of the whole batch. An int where shapes tell it, else a
            0-d tensor on the device of the targets (of the class weights, where there are some), without a host sync.
        check: `check(arguments)` raises LossError where the arguments of one call tie samples together.
        terms: `terms(arguments)`: how many terms one call averages over, where targets cannot tell; else None.
        copies: `copies(arguments)`: to how many terms of one call's mean broadcasting makes one that was counted, 0 for
            a call without any; None where nothing is broadcast.
    """

    unit: str
    count: Callable[[Any, int], int | Tensor]
    check: Callable[[Sequence[Any]], None]
    terms: Callable[[Sequence[Any]], int] | None = None
    copies: Callable[[Sequence[Any]], int] | None = None


def elements(place: Place, weight: Weight) -> Denominator:
    """Mean over the elements of the targets; a `weight` may run along the axes behind the samples only."""

    def count(targets: Any, samples: int) -> int:
        return _labels(place, targets, 1, weight).numel()

    def paired(arguments: Sequence[Any]) -> Sequence[Any]:
        return arguments[:2] if place.argument == 1 else arguments

    def check(arguments: Sequence[Any]) -> None:
        _labels(place, arguments[place.argument], 1, weight)
        _same_samples(place, paired(arguments))

    return Denominator("elements", count, check, copies=lambda arguments: _copies(place, paired(arguments), None))


def rows(place: Place, least_axes: int) -> Denominator:
    """Mean over the rows of the targets, which have at least `least_axes` axes."""

    def count(targets: Any, samples: int) -> int:
        return _labels(place, targets, least_axes).shape[0]

    def check(arguments: Sequence[Any]) -> None:
        _labels(place, arguments[place.argument], least_axes)
        shapes = [tuple(_labels(place, argument, 1).shape) for argument in arguments]
        if any(shape[0] != shapes[0][0] for shape in shapes):
            raise _refusal(place, f"the shapes {shapes} differ in the number of samples")

    return Denominator("samples", count, check)


def positions(place: Place, weight: Weight) -> Denominator:
    """Mean over all axes but the last, which holds the classes; a `weight` may run along the classes."""

    def count(targets: Any, samples: int) -> int:
        return math.prod(_labels(place, targets, 2, weight).shape[:-1])

    def check(arguments: Sequence[Any]) -> None:
        _labels(place, arguments[place.argument], 2, weight)
        _same_samples(place, arguments)

    return Denominator("samples", count, check, copies=lambda arguments: _copies(place, arguments, -1))


def samples_of_outputs(place: Place) -> Denominator:
    """Mean over samples of shape (N, D) that come as outputs, so that targets cannot tell how many there are."""

    def count(targets: Any, samples: int) -> int:
        return samples

    def check(arguments: Sequence[Any]) -> None:
        for argument in arguments:
            _labels(place, argument, 2)
            if argument.dim() > 2:
                raise _refusal(place, f"an argument has the shape {tuple(argument.shape)}, not (samples, features)")
        _same_samples(place, arguments)

    return Denominator("samples", count, check, terms=lambda arguments: int(arguments[0].shape[0]))


def sequences(place: Place) -> Denominator:
    """Mean over sequences, of which the last of the targets holds the lengths (CTC)."""

    def count(targets: Any, samples: int) -> int:
        lengths = targets[-1] if isinstance(targets, tuple | list) and targets else targets
        if isinstance(lengths, Tensor) and lengths.dim() != 1 or not isinstance(lengths, Tensor | tuple | list):
            raise _refusal(place, f"the lengths of the targets are {_what(lengths)}, not one number for each sample")
        return len(lengths)

    def check(arguments: Sequence[Any]) -> None:
        _labels(place, arguments[0], 3)
        count(arguments, 0)

    return Denominator("samples", count, check)


def target_tokens(place: Place, ignore_index: int, weight: Weight) -> Denominator:
    """Sum of the class weights (1 without any) of the targets that are not ignored.

    Targets of floating point are class probabilities of shape (N, C, ...): every position counts as 1, whatever
    its weights (so does ATen's `cross_entropy_loss_prob_target`).
    """

    def count(targets: Any, samples: int) -> int | Tensor:
        labels = _labels(place, targets, 1)
        if labels.is_floating_point():
            _labels(place, targets, 2)
            return labels.shape[0] * math.prod(labels.shape[2:])
        # A byte would be compared modulo 256 (156 == -100) and would be taken for a mask when it indexes the weights.
        labels = labels.long()
        weights = weight()
        if weights is None:
            return labels.ne(ignore_index).count_nonzero()  # half the time of a sum
        labels = labels.to(weights.device)
        kept = labels != ignore_index
        wide = torch.promote_types(weights.dtype, torch.float32)
        return weights[labels.where(kept, 0)].where(kept, 0).sum(dtype=wide)

    def check(arguments: Sequence[Any]) -> None:
        outputs, labels = arguments[0], arguments[place.argument]
        if (
            type(outputs) is type(labels) is Tensor
            and outputs.dim()
            and labels.dim()
            and not labels.is_floating_point()
        ):
            return  # what every micro-batch pays for
        _labels(place, outputs, 1)
        labels = _labels(place, labels, 1)
        if labels.is_floating_point():
            _labels(place, labels, 2)

    return Denominator("target tokens" if weight() is None else "class weights", count, check)


def no_weight() -> Tensor | None:
    """The weight of a loss that has none."""
    return None


def _labels(place: Place, targets: Any, least_axes: int, weight: Weight = no_weight) -> Tensor:
    """The tensor of targets, or LossError where it has no axis of samples or the weight runs along that axis."""
    if place.item is not None and isinstance(targets, tuple | list) and targets:
        targets = targets[place.item]
    if not isinstance(targets, Tensor):
        raise _refusal(place, f"where it needs a tensor there is {_what(targets)}")
    if targets.dim() < least_axes:
        raise _refusal(place, f"a tensor of shape {tuple(targets.shape)} has no axis of samples")
    weights = weight()
    if weights is not None and weights.numel() != 1 and _runs_along_samples(weights, targets):
        shapes = f"{tuple(weights.shape)} for targets of shape {tuple(targets.shape)}"
        raise _refusal(place, f"its weight has the shape {shapes}, so it runs along the samples")
    return targets


def _runs_along_samples(weights: Tensor, targets: Tensor) -> bool:
    """Whether broadcasting weights to the targets uses their first axis."""
    return weights.dim() > targets.dim() or (weights.dim() == targets.dim() and weights.shape[0] != 1)


def _same_samples(place: Place, tensors: Sequence[Any]) -> None:
    """LossError where broadcasting would pair a sample with the samples beside it, as (N, 1) with (N,) does."""
    first = tensors[0]
    for tensor in tensors:
        if not (isinstance(tensor, Tensor) and isinstance(first, Tensor)):
            raise _refusal(place, f"where it needs tensors there are {_what(first)} and {_what(tensor)}")
        if tensor.shape != first.shape and (tensor.dim() != first.dim() or tensor.shape[0] != first.shape[0]):
            shapes = f"{tuple(first.shape)} and {tuple(tensor.shape)}"
            raise _refusal(place, f"the shapes {shapes} broadcast along the samples")


def _copies(place: Place, tensors: Sequence[Tensor], end: int | None) -> int:
    """How many terms one counted term becomes when all tensors are broadcast; their axes count up to `end`."""
    shapes = [tensor.shape[:end] for tensor in tensors]
    if all(shape == shapes[0] for shape in shapes):
        return 1 if math.prod(shapes[0]) else 0
    wide = (0 if 0 in sizes else max(sizes) for sizes in zip(*shapes, strict=True))
    return math.prod(wide) // max(math.prod(shapes[place.argument]), 1)


def _refusal(place: Place, found: str) -> LossError:
    """The error for arguments with which the loss does not add up over micro-batches."""
    asked = f"{place.loss} was asked to add up over micro-batches"
    do = "give it one row for each sample, or wrap it in a function of your own, which is run once on the whole batch"
    return LossError(asked, found, do)


def _what(value: Any) -> str:
    """A value in a few words, for errors."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
