"""Why two gradients differ, told by experiments: each changes one thing and looks whether the difference goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core.compare import explain_by_weights, relative_difference
from bigbatch.core.models import by_batch
from bigbatch.core.split import Piece
from bigbatch.verifier.case import Bench, Case, tried
from bigbatch.verifier.layers import Call, tied, traced
from bigbatch.verifier.rounding import edited
from bigbatch.verifier.runs import Run, Trial
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
    found = list(chance(setting))
    yield from found
    if found:  # what differs from itself cannot be compared with anything else
        return
    frozen = without_batch_norm(setting)
    if frozen is not None:
        setting, cause = frozen
        yield cause
        found.append(cause)
    if setting.differs:
        reasons = list(split_up(setting))
        yield from reasons
        if not reasons and not found:
            yield Cause("unknown", "no experiment explains the difference", unknown_advice(setting.trial.case))


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


def without_batch_norm(setting: Setting) -> tuple[Setting, Cause] | None:
    """The trial with batch norm frozen on both sides, where batch norm has a part in the difference."""
    names = [name for name, module in setting.trial.bench.named_modules().items() if by_batch(module)]
    if not names:
        return None
    calm = try_again(setting, freeze)
    if calm is None or not (setting.differs and (not calm.differs or batch_norm_ties(setting))):
        return None
    found = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    effect = "with it frozen the gradients agree" if not calm.differs else "and it is not the only cause"
    return calm, Cause(
        "batch norm",
        f"{found} normalised by the statistics of each micro-batch; {effect}",
        "freeze it with .eval(), or use a norm over one sample (GroupNorm)",
    )


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
    if call is not None:
        where = f"{call.name} ({type(call.module).__name__})" if call.name else f"{type(call.module).__name__} itself"
        yield Cause(
            "samples tied by a layer",
            f"{where} makes something else of the same samples when the rest of the batch is missing",
            "replace it by a layer that treats each sample alone",
        )
        return
    spans, trial = setting.ours.spans, setting.trial
    singles = tried(lambda: trial.single(spans)) if trial.case.way != "wrapper" else None
    shares = tried(lambda: shares_cause(setting, singles)) if singles else None
    if shares is not None:
        yield shares
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
        there = traced(bench, whole, trial.draws.replay(0, samples))
        return tied(there, traced(part, piece, trial.draws.replay(*span)), samples, span, tolerance)

    found: Call | None = tried(compare)
    return found


def shares_cause(setting: Setting, singles: Sequence[Run]) -> Cause | None:
    """Other weights of the same micro-batch gradients would have given the whole batch's gradient."""
    whole, parts = setting.trial.whole.gradients, [run.gradients for run in singles]
    entries = sum(int((g != 0).sum()) for g in whole.values() if isinstance(g, Tensor))
    if entries < 4 * len(parts):
        return None
    right, rest = explain_by_weights(whole, parts)
    used, left = explain_by_weights(setting.ours.gradients, parts)
    if rest > setting.tolerance or left > max(setting.tolerance, 1e-3):
        return None
    close = 1e-3
    ratios = [u / r if r else math.inf for u, r in zip(used, right, strict=True)]
    told = f"weights used {listed(used)}, right {listed(right)}"
    lost = [k for k, u in enumerate(used) if abs(u) <= close * max(map(abs, right))]
    lost = [k for k in lost if abs(right[k]) > close * max(map(abs, right))]
    if lost:
        numbers = ", ".join(str(k + 1) for k in lost)
        do = "look for a zero_grad or a step between the backwards, or a micro-batch that is skipped"
        return Cause("lost micro-batches", f"micro-batch {numbers} of {len(used)} did not count ({told})", do)
    if max(ratios) - min(ratios) <= close * abs(ratios[0]):
        found = f"the gradient is {ratios[0]:.4g} times the whole batch's ({told})"
        return Cause("wrong scale", found, "divide by the whole batch's denominator, and only once")
    do = "weigh each micro-batch by its share of the batch's samples or target tokens, as Accumulator does"
    if max(used) - min(used) <= close * abs(used[0]):
        return Cause("mean of means", f"all micro-batches weigh the same, whatever they hold ({told})", do)
    return Cause("wrong shares", f"the same micro-batches with other weights give the whole gradient ({told})", do)


def listed(weights: Sequence[float]) -> str:
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:6])
    return f"[{shown}, ...]" if len(weights) > 6 else f"[{shown}]"


def unknown_advice(case: Case) -> str:
    if case.loss_fn is None:
        return "let the model return its outputs, and pass the loss as loss_fn, so that both can be told apart"
    return "verify smaller parts of the model, and look for state that forwards share"
