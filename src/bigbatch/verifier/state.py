"""What else must end where the whole batch leaves it: buffers, weights, and the loss that is returned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bigbatch.verifier.runs import Run, Trial
from bigbatch.verifier.verdict import Cause

Buffers = Mapping[str, Tensor]


def state_causes(trial: Trial, ours: Run, tolerance: float) -> Iterator[Cause]:
    """Weights that moved, buffers that ended elsewhere, a returned loss that is not the batch's."""
    if ours.moved:
        yield Cause(
            "weights moved",
            f"{named(ours.moved)} changed before the batch was over",
            "step the optimizer once, after the last backward",
        )
    before = trial.bench.buffers()
    faults = list(buffer_faults(before, ours.buffers, trial.whole.buffers, tolerance))
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        yield Cause("buffers", shown, "let each batch move them once, as Accumulator and MicroBatched do")
    off = loss_difference(ours.loss, trial.whole.loss)
    judged = trial.case.run is None and trial.whole.loss is not None and math.isfinite(trial.whole.loss)
    if judged and off is not None and off > math.sqrt(torch.finfo(trial.whole.dtype).eps):
        yield Cause("loss", f"the returned loss is off by {off:.1e}", "do not report it as the batch's")


def buffer_faults(before: Buffers, ours: Buffers, whole: Buffers, tolerance: float) -> Iterator[str]:
    for name in dict.fromkeys([*whole, *ours]):
        if name not in ours or name not in whole:
            yield f"{name} exists on one side only"
            continue
        fault = buffer_fault(name, before.get(name, whole[name]), ours[name], whole[name], tolerance)
        if fault is not None:
            yield fault


def buffer_fault(name: str, before: Tensor, ours: Tensor, whole: Tensor, tolerance: float) -> str | None:
    """What is wrong with one buffer, in words; None where it ended as the whole batch leaves it.

    >>> buffer_fault("steps", torch.tensor(0), torch.tensor(3), torch.tensor(1), 0.0)
    'steps moved 3 times as far as the whole batch moves it'
    """
    if ours.shape != whole.shape:
        return f"{name} has shape {tuple(ours.shape)}, the whole batch leaves {tuple(whole.shape)}"
    before, left, right = wide(before), wide(ours), wide(whole)
    size = max(float(right.norm()), float(before.norm()))
    slack = max(tolerance, 64 * torch.finfo(whole.dtype).eps) if whole.is_floating_point() else 0.0
    off = float((left - right).norm())
    if torch.equal(ours, whole) or off <= slack * size:
        return None
    if before.shape == right.shape:
        move, wanted = left - before, right - before
        times = float((move * wanted).sum() / (wanted * wanted).sum()) if bool(wanted.any()) else 0.0
        if times and float((move - times * wanted).norm()) <= 1e-6 * float(move.norm()):
            return f"{name} moved {times:.4g} times as far as the whole batch moves it"
    return f"{name} ended elsewhere (difference {off / size if size else off:.1e})"


def wide(buffer: Tensor) -> Tensor:
    """A buffer as float64 numbers."""
    real = torch.view_as_real(buffer) if buffer.is_complex() else buffer
    return real.detach().to(torch.float64)


def loss_difference(ours: float | None, whole: float | None) -> float | None:
    """|ours - whole| / |whole|; None where a loss was not returned."""
    if ours is None or whole is None:
        return None
    if ours == whole:
        return 0.0
    off = abs(ours - whole) / abs(whole) if whole else math.inf
    return off if math.isfinite(off) else math.inf


def named(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
