"""How far rounding alone may drive the two gradients apart: terms from the shapes, condition by experiment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bigbatch.core.compare import relative_difference, rounding_bound
from bigbatch.core.split import Piece
from bigbatch.verifier.case import Bench, Case, Gradients, tried
from bigbatch.verifier.layers import terms_of, traced
from bigbatch.verifier.runs import Run, Trial

SHAKE = 16.0


@dataclass(frozen=True)
class Rounding:
    """The bound and what it is made of."""

    bound: float
    terms: int
    condition: float
    dtype: torch.dtype


def rounding_of(trial: Trial, ours: Run) -> Rounding:
    """The bound for one trial: `rounding_bound(terms, dtype, condition)`, at most the root of the dtype's epsilon.

    terms: see `layers.terms_of`. condition: the larger of Σ_k ||w_k g_k|| / ||g|| (how much the micro-batches'
    gradients cancel, where they were seen) and of what every weight's moving by a few rounding errors does to the
    gradient (how much the model magnifies them). The ceiling keeps a bound from becoming so wide that it proves
    nothing.
    """
    dtype = trial.whole.dtype
    bench = trial.case.fresh()
    piece = Piece(trial.samples, bench.inputs, bench.targets)
    calls = tried(lambda: traced(bench, piece, trial.draws.replay(0, trial.samples), trial.case.double)) or []
    terms = terms_of(calls, list(bench.parameters().values()), trial.samples)
    condition = max(1.0, cancelling(trial.whole.gradients, ours.parts), magnified(trial))
    bound = rounding_bound(terms, dtype, condition) if math.isfinite(condition) else math.inf
    return Rounding(min(bound, math.sqrt(torch.finfo(dtype).eps)), terms, condition, dtype)


def cancelling(whole: Gradients, parts: Sequence[Gradients]) -> float:
    """Σ_k ||w_k g_k|| / ||g||."""
    total = norm(whole)
    return sum(norm(part) for part in parts) / total if total > 0 else 1.0


def norm(gradients: Gradients) -> float:
    return math.hypot(*(float(g.norm().double()) for g in gradients.values() if g is not None))


def magnified(trial: Trial) -> float:
    """How much more than the weights the gradient moves when they move by a few rounding errors."""
    unit = SHAKE * torch.finfo(trial.whole.dtype).eps / 2

    def shake(bench: Bench) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in bench.parameters().values():
                if parameter.dtype.is_floating_point:
                    noise = torch.randn(parameter.shape, generator=generator).to(parameter.device, torch.float64)
                    parameter.copy_(parameter.double() * (1 + unit * noise))

    shaken = trial.repeated(edited(trial.case, shake))
    moved = relative_difference(shaken.gradients, trial.whole.gradients)
    return moved / unit if math.isfinite(moved) else 1.0


def edited(case: Case, *edits: object) -> Case:
    """The same case with more changes to its copies."""
    return replace(case, edits=(*case.edits, *edits))  # type: ignore[arg-type]
