"""The longest sample that fits: memory is a parabola in the length, drawn through three lengths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.split import Piece
from bigbatch.core.tree import leaves, map_leaves
from bigbatch.planner.curves import again_of, course_of, lagrange, on_device, on_device_bytes
from bigbatch.planner.ladder import Room, largest_count
from bigbatch.planner.predict import Peak, Prediction
from bigbatch.planner.scratch import Scratch
from bigbatch.planner.trace import Job, traced

FACTORS = (1, 2, 3)


def largest_length(job: Job, prediction: Prediction, room: Room, scratch: Scratch) -> int | None:
    """The longest sample that fits, one sample at a time; None where samples have no length, or it cannot be told."""
    length = length_of(job.singles[0])
    if length is None:
        return None
    try:
        longer = [peak_of(stretched(job, length, factor), prediction, scratch) for factor in FACTORS[1:]]
    except Exception:  # a model may take one length only
        return None
    fixed = prediction.fixed
    peaks = [max(on_device_bytes(part(1, 2)) for part in prediction.parts), *longer]

    def fits(length_now: int) -> bool:
        held = sum(peak * share for peak, share in zip(peaks, lagrange(FACTORS, length_now / length), strict=True))
        always = fixed.parameters + fixed.buffers + fixed.state
        return room.fits(Peak({"window": round(held), "always": always}, 0), fixed)

    return largest_count(fits)


def length_of(piece: Piece) -> int | None:
    """The second axis of the first tensor of whole numbers that has two: that of tokens."""
    for leaf in leaves(piece.inputs):
        if isinstance(leaf, Tensor) and leaf.dim() == 2 and not leaf.is_floating_point() and leaf.dtype != torch.bool:
            return leaf.size(1)
    return None


def stretched(job: Job, length: int, factor: int) -> Job:
    """The same samples with every field repeated that has the tokens' length in its second axis."""

    def longer(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.size(1) == length:
            return torch.cat([leaf] * factor, 1)
        return leaf

    singles = [Piece(1, map_leaves(longer, one.inputs), map_leaves(longer, one.targets)) for one in job.singles[:1]]
    return replace(job, singles=singles)


def peak_of(job: Job, prediction: Prediction, scratch: Scratch) -> float:
    """The worst moment of one sample's forward and backward, with gradients there already."""
    sequential = prediction.way.engine == "sequential"
    ledger = traced(job, prediction.way, 1, 1 if sequential else 2, scratch)
    there = prediction.fixed.gathered if sequential else 0
    return there + float(on_device(course_of(again_of(ledger) if sequential else ledger)).max())
