"""Why two gradients differ, told by experiments: each changes one thing and looks whether the difference goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.core.batch_norm import by_batch
from bigbatch.core.compare import relative_difference
from bigbatch.core.split import Piece
from bigbatch.micro_batched import MicroBatched
from bigbatch.verifier.case import Bench, Case, Gradients, tried
from bigbatch.verifier.layers import Call, tied, traced
from bigbatch.verifier.rounding import edited
from bigbatch.verifier.runs import Run, Trial
from bigbatch.verifier.shares import scaled_parameters, shares_cause, weighing
from bigbatch.verifier.state import named
from bigbatch.verifier.verdict import Cause


@dataclass(frozen=True)
class Setting:
    """A trial, what the user's configuration did in it, and up to which difference gradients count as equal."""

    trial: Trial
    ours: Run
    tolerance: float

    @property
    def differs(self) -> bool:
        return not self.same(self.ours, self.trial.whole)

    def same(self, a: Run, b: Run) -> bool:
        return relative_difference(a.gradients, b.gradients) <= self.tolerance


def causes_of(setting: Setting) -> Iterator[Cause]:
    """Everything that was found; nothing where the gradients agree."""
    if not math.isfinite(relative_difference(setting.trial.whole.gradients, setting.trial.whole.gradients)):
        yield Cause("not finite", "the whole batch's own gradient holds inf or nan", "verify a batch that trains")
        return
    missing = missing_gradient(setting.trial.whole.gradients, setting.ours.gradients)
    if missing is not None:
        yield missing
        return
    found = list(chance(setting))
    yield from found
    if found:  # what differs from itself cannot be compared with anything else
        return
    frozen = without_batch_norm(setting)
    if frozen is not None:
        setting, blamed = frozen
        yield from blamed
        found += blamed
    if setting.differs:
        reasons = list(split_up(setting))
        yield from reasons
        if not reasons and not found:
            yield Cause("unknown", "no experiment explains the difference", unknown_advice(setting.trial.case))


def missing_gradient(whole: Gradients, ours: Gradients) -> Cause | None:
    """Parameters that have a gradient on one side only."""
    lost = [name for name, gradient in whole.items() if gradient is not None and ours.get(name) is None]
    extra = [name for name, gradient in ours.items() if gradient is not None and whole.get(name) is None]
    if not lost and not extra:
        return None
    found = [f"{named(lost)}: no gradient, though the whole batch gives one"] if lost else []
    found += [f"{named(extra)}: a gradient, though the whole batch gives none"] if extra else []
    do = "look for a zero_grad after the last backward, a backward that is missing, or parameters frozen on the way"
    return Cause("missing gradient", "; ".join(found), do)


def chance(setting: Setting) -> Iterator[Cause]:
    """The same thing twice: with the same random numbers, and with others."""
    trial = setting.trial
    again, other = trial.repeated(), trial.repeated(seed=1)
    if not setting.same(again, trial.whole):
        off = relative_difference(again.gradients, trial.whole.gradients)
        yield Cause(
            "not deterministic",
            f"the whole batch itself differs by {off:.1e} between two runs with the same random numbers",
            "try torch.use_deterministic_algorithms(True), and look for state that forwards share",
        )
    elif trial.draws.unfollowed:
        yield Cause(
            "randomness",
            f"random numbers could not be made the same on both sides ({'; '.join(trial.draws.unfollowed)})",
            "switch this randomness off for the proof",
        )
    elif not setting.same(other, trial.whole) or not setting.same(trial.ours(seed=1), setting.ours):
        yield Cause(
            "randomness",
            "other random numbers give another gradient, and they are drawn outside of the model's PyTorch operators "
            "(Python's random, NumPy, the loss, the loop)",
            "draw them by torch inside of the model's forward, or switch them off for the proof",
        )


def without_batch_norm(setting: Setting) -> tuple[Setting, list[Cause]] | None:
    """The trial with batch norm frozen on both sides, so that one can look past it, and what it is to blame for."""
    layers = setting.trial.bench.named_modules().items()
    names = [f"{name} ({type(module).__name__})".lstrip() for name, module in layers if by_batch(module)]
    calm = try_again(setting, freeze) if names and setting.differs else None
    if calm is None:
        return None
    if sees_the_batch(setting.trial.case):
        return (calm, []) if calm.differs else None
    if calm.differs and not batch_norm_ties(setting):
        return None
    effect = "with it frozen the gradients agree" if not calm.differs else "and it is not the only cause"
    return calm, [
        Cause(
            "batch norm",
            f"{named(names)} normalised by the statistics of each micro-batch; {effect}",
            "run it over the whole batch (batch_norm='exact'), freeze it with .eval(), or use GroupNorm",
        )
    ]


def sees_the_batch(case: Case) -> bool:
    """Whether batch norm had the whole batch on both sides."""
    door = case.model.__dict__["_door"] if isinstance(case.model, MicroBatched) else None
    mode = case.options.get("batch_norm", "exact") if door is None else door.norms.mode
    return case.run is None and mode == "exact"


def batch_norm_ties(setting: Setting) -> bool:
    call = tied_layer(setting)
    return call is not None and by_batch(call.module)


def freeze(bench: Bench) -> None:
    """Batch norm by its running statistics; the identity where it keeps none."""
    for module in bench.named_modules().values():
        if by_batch(module):
            module.eval()
            if getattr(module, "running_mean", None) is None:
                module.__dict__["forward"] = identity


def identity(rows: Any) -> Any:
    return rows


def quiet(bench: Bench) -> None:
    """Dropout off, wherever a module keeps its probability."""
    for module in bench.named_modules().values():
        for name, value in list(vars(module).items()):
            dropout = "drop" in name or (name == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if dropout and isinstance(value, float):
                setattr(module, name, 0.0)


def try_again(setting: Setting, edit: Callable[[Bench], None]) -> Setting | None:
    """The same trial with one thing changed on both sides."""

    def again() -> Setting:
        trial = Trial(edited(setting.trial.case, edit))
        return Setting(trial, trial.ours(), setting.tolerance)

    made: Setting | None = tried(again)
    return made


def split_up(setting: Setting) -> Iterator[Cause]:
    """What cutting the batch did: a layer that ties samples, wrong shares, or a loss that ties samples."""
    call = tied_layer(setting)
    if call is not None and not by_batch(call.module):  # batch norm has had its turn
        where = f"{call.name} ({type(call.module).__name__})" if call.name else f"{type(call.module).__name__} itself"
        yield Cause(
            "samples tied by a layer",
            f"{where} makes something else of the same samples when the rest of the batch is missing",
            "replace it by a layer that treats each sample alone",
        )
        return
    spans, trial = setting.ours.spans, setting.trial
    scaled = scaled_parameters(trial.whole.gradients, setting.ours.gradients, setting.tolerance)
    if scaled is not None:
        yield scaled
        return
    singles = tried(lambda: trial.single(spans)) if trial.case.way != "wrapper" else None
    found = weighing(trial.whole, setting.ours, singles or [], setting.tolerance)
    if found is not None and found.rest <= setting.tolerance:
        yield shares_cause(found, setting.tolerance)
    elif trial.bench.loss_fn is not None and trial.case.way in ("sequential", "function") and len(spans) > 1:
        joined = tried(lambda: trial.joined(spans))
        if joined is not None and setting.same(joined, trial.whole):
            yield Cause(
                "samples tied by the loss",
                "no weights of the micro-batches' gradients give the whole batch's, but the loss computed once on the "
                "outputs of all of them does",
                "wrap the model: MicroBatched(model), and compute the loss on the whole batch",
            )


def tied_layer(setting: Setting) -> Call | None:
    trial, samples = setting.trial, setting.trial.samples
    span = next((span for span in setting.ours.spans if 0 < span[1] - span[0] < samples), None)
    if span is None:
        return None
    tolerance = math.sqrt(torch.finfo(trial.whole.dtype).eps)

    def compare() -> Call | None:
        bench, part = trial.case.fresh(), trial.case.fresh()
        whole = Piece(samples, bench.inputs, bench.targets)
        piece = trial.case.pieces(part, setting.ours.spans)[setting.ours.spans.index(span)]
        there = traced(bench, whole, trial.draws.replay(0, samples), trial.case.double)
        here = traced(part, piece, trial.draws.replay(*span), trial.case.double)
        return tied(there, here, samples, span, tolerance)

    found: Call | None = tried(compare)
    return found


def unknown_advice(case: Case) -> str:
    if case.loss_fn is None:
        return "let the model return its outputs, and pass the loss as loss_fn, so that both can be told apart"
    return "verify smaller parts of the model, and look for state that forwards share"
