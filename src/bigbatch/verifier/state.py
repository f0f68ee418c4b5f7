"""What else must end where the whole batch leaves it: buffers, weights, and the loss that is returned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from bigbatch.verifier.case import Bench, tried
from bigbatch.verifier.rounding import edited
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
    faults = list(plain_faults(trial, ours, tolerance))
    if faults:
        shown = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
        do = "register such a tensor as a buffer, and let each batch move it once, as Accumulator and MicroBatched do"
        yield Cause("buffers", shown, do)
    if trial.case.run is None and loss_is_off(trial, ours):
        off = loss_difference(ours.loss, trial.whole.loss)
        yield Cause("loss", f"the returned loss is off by {off:.1e}", "do not report it as the batch's")


def loss_is_off(trial: Trial, ours: Run) -> bool:
    """Whether a returned loss is off by more than rounding, where the whole batch has a finite one."""
    finite = trial.whole.loss is not None and math.isfinite(trial.whole.loss)
    off = loss_difference(ours.loss, trial.whole.loss)
    return finite and off is not None and off > math.sqrt(torch.finfo(trial.whole.dtype).eps)


def buffer_faults(before: Buffers, ours: Buffers, whole: Buffers, tolerance: float) -> Iterator[str]:
    for name in dict.fromkeys([*whole, *ours]):
        if name not in ours or name not in whole:
            yield f"{name} exists on one side only"
            continue
        fault = buffer_fault(name, before.get(name, whole[name]), ours[name], whole[name], tolerance)
        if fault is not None:
            yield fault


def plain_faults(trial: Trial, ours: Run, tolerance: float) -> Iterator[str]:
    """The same for plain attributes, of those whose values one batch hands on to the next (a moving average).

    What every forward makes anew (a cache of its last outputs) is no state of the training.
    """
    before, whole = trial.bench.plain(), trial.whole.plain
    for name, start in before.items():
        left, right = ours.plain.get(name), whole.get(name)
        if left is None or right is None or not start.shape == left.shape == right.shape:
            continue
        fault = buffer_fault(f"{name} (a plain attribute)", start, left, right, tolerance)
        if fault is not None and handed_on(trial, name, right):
            yield fault


def handed_on(trial: Trial, name: str, ended: Tensor) -> bool:
    """Whether an attribute ends elsewhere when it starts elsewhere."""

    def shift(bench: Bench) -> None:
        tensor = bench.plain()[name]
        tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)

    shifted = tried(lambda: trial.repeated(edited(trial.case, shift)))
    end = None if shifted is None else shifted.plain.get(name)
    return end is None or not torch.equal(end, ended)


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
