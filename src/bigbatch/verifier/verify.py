"""`verify`: the user's own configuration beside the whole batch, on a small real batch."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.core import models
from bigbatch.core.compare import relative_difference, worst
from bigbatch.core.rules import rule_for
from bigbatch.errors import BigBatchError, ModelError, OptionError
from bigbatch.fit.sizer import check_auto
from bigbatch.micro_batched import MicroBatched
from bigbatch.verifier.case import Case, chosen_size
from bigbatch.verifier.causes import Setting, causes_of, quiet
from bigbatch.verifier.rounding import Rounding, edited, rounding_of
from bigbatch.verifier.runs import Run, Trial, automatic_size
from bigbatch.verifier.state import loss_difference, loss_is_off, named, state_causes
from bigbatch.verifier.verdict import Cause, Verdict
from bigbatch.windows import Window

TOLD_BY_THE_VERDICT = ("bigbatch does not know this loss", "batch_norm='local'")


def verify(
    model: Callable[..., Any],
    loss_fn: Callable[..., Tensor] | None,
    inputs: Any,
    targets: Any = None,
    *,
    micro_batch_size: int | str | None = None,
    run: Callable[..., Any] | None = None,
    **options: Any,
) -> Verdict:
    """Says whether a configuration gives the gradient of the whole batch, and if not, why.

    The whole batch is run once, by plain PyTorch, and once as configured; both on copies, in float64 where the model
    allows, with the same random numbers. It needs the memory of the whole batch: take a small one, of 8 to 32 samples.

    Args:
        model: as for `Accumulator`; or a `MicroBatched` model, which is then judged with `loss_fn` on its outputs.
        loss_fn: the loss of the whole batch; None where the model returns its own.
        inputs: one small batch, as for `Accumulator.backward`.
        targets: the same; None where they travel in `inputs`.
        micro_batch_size: samples in one micro-batch; None takes a wrapper's own, or a size that gives at least three
            micro-batches of uneven sizes; "auto", or a budget (`memory`), takes the size that the automatic one
            begins with, where that splits the batch.
        run: a loop of your own to be judged instead: `run(model, inputs, targets)` gets copies, runs forwards and
            backwards and leaves the gradient in `.grad`. It may return the batch's loss.
        options: those of `Accumulator`.

    Returns:
        The verdict; its `bound` is made as `rounding.rounding_of` says.

    Raises:
        BigBatchError: what `Accumulator` or `MicroBatched` refuse is refused here as well; or a copy cannot be made.

    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5),
    2019.

    >>> _ = torch.manual_seed(0)
    >>> model, loss_fn = torch.nn.Linear(4, 3), torch.nn.CrossEntropyLoss()
    >>> inputs, targets = torch.randn(10, 4), torch.randint(0, 3, (10,))
    >>> verify(model, loss_fn, inputs, targets).equal
    True
    >>> def loop(model, inputs, targets):
    ...     for rows, labels in zip(inputs.split(4), targets.split(4)):
    ...         (loss_fn(model(rows), labels) / 3).backward()
    >>> verdict = verify(model, loss_fn, inputs, targets, run=loop)
    >>> verdict.equal, [cause.name for cause in verdict.causes]
    (False, ['mean of means'])
    """
    if options.get("memory") is not None and micro_batch_size is None:
        micro_batch_size = "auto"
    refuse(model, inputs, micro_batch_size, run, options)
    number = None if isinstance(micro_batch_size, str) else micro_batch_size
    case = Case(model, loss_fn, inputs, targets, run, options, number)
    with untouched(case), warnings.catch_warnings():
        for start in TOLD_BY_THE_VERDICT:
            warnings.filterwarnings("ignore", message=start)
        rule_for(model, loss_fn, options.get("reduction", "auto"))
        case, notes = with_size(case, automatic=isinstance(micro_batch_size, str))
        trial, ours, reason = attempt(case)
        notes += [reason] if reason else []
        if trial.draws.unfollowed:
            calm = Trial(edited(trial.case, quiet))
            ours_calm = calm.ours()
            if not calm.draws.unfollowed:
                notes.append(f"judged with dropout off, as masks could not be shared ({trial.draws.unfollowed[0]})")
                trial, ours = calm, ours_calm
        return judged(trial, ours, notes)


def judged(trial: Trial, ours: Run, notes: list[str]) -> Verdict:
    """The verdict on one trial; causes are looked for only where it is not equal."""
    rounding = rounding_of(trial, ours)
    difference = relative_difference(ours.gradients, trial.whole.gradients)
    state = list(state_causes(trial, ours, rounding.bound))
    causes: list[Cause] = []
    if difference > rounding.bound:
        causes = list(causes_of(Setting(trial, ours, tolerance_of(rounding, difference))))
    if any(cause.name == "batch norm" for cause in causes):  # its statistics, and the loss, differ for the same reason
        state = [cause for cause in state if cause.name == "weights moved"]
    elif causes:
        state = [cause for cause in state if cause.name != "loss"]
    if trial.whole.dtype != torch.float64 and trial.case.double:
        notes = [*notes, f"the model computes in {trial.whole.dtype} inside, also as a float64 copy"]
    if trial.whole.loss is not None and not math.isfinite(trial.whole.loss):
        notes = [*notes, f"the whole batch's own loss is {trial.whole.loss}, so no loss was compared with it"]
    if trial.case.run is not None:
        notes = [*notes, *loop_notes(trial, ours, difference <= rounding.bound)]
    name, off = worst(ours.gradients, trial.whole.gradients)
    return Verdict(
        equal=difference <= rounding.bound and not state,
        difference=difference,
        bound=rounding.bound,
        loss_difference=loss_difference(ours.loss, trial.whole.loss),
        worst_parameter=name,
        worst_difference=off,
        causes=(*causes, *state),
        dtype=trial.whole.dtype,
        samples=trial.samples,
        micro_batches=len(ours.spans),
        micro_batch_size=max((last - first for first, last in ours.spans), default=0),
        terms=rounding.terms,
        condition=rounding.condition,
        notes=tuple(notes),
    )


def loop_notes(trial: Trial, ours: Run, right: bool) -> Iterator[str]:
    """What is no fault of a loop's gradient, but should be known."""
    if right and loss_is_off(trial, ours):
        yield f"the loop returned {ours.loss:.6g}, but the loss of the whole batch is {trial.whole.loss:.6g}"
    inner = models.inner_modules(trial.bench.modules)
    if any(isinstance(value, torch.Generator) for module in inner for value in vars(module).values()):
        yield "judged with shared numbers, also where the model draws from a generator of its own"


def tolerance_of(rounding: Rounding, difference: float) -> float:
    """Up to where an experiment says that the difference has gone: rounding, or a hundredth of what is left."""
    return max(rounding.bound, min(math.sqrt(torch.finfo(rounding.dtype).eps), difference / 100))


def attempt(case: Case) -> tuple[Trial, Run, str]:
    """Both sides in float64, or in the model's own dtype where it fails there; and the reason for that."""
    try:
        trial = Trial(case)
        return trial, trial.ours(), ""
    except BigBatchError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"not run in float64, as the model fails there: {lines[0]}"
    trial = Trial(replace(case, double=False))
    return trial, trial.ours(), reason


def with_size(case: Case, automatic: bool = False) -> tuple[Case, list[str]]:
    """The case with a micro-batch size that splits the batch, and a note where one was chosen."""
    if case.run is not None:
        return case, []
    bench = case.fresh()
    samples, size = case.samples(bench), case.size(bench)
    if automatic and samples > 1:
        size = automatic_size(case)
        case = replace(case, options={name: value for name, value in case.options.items() if name != "memory"})
        if size < samples:
            return replace(case, micro_batch_size=size), [f"micro_batch_size={size} was chosen automatically"]
    elif samples < 2 or (size is not None and (size < samples or case.micro_batch_size is not None)):
        unsplit = samples < 2 or size is None or size >= samples
        return case, ["the batch was run in one micro-batch, so nothing was split"] if unsplit else []
    chosen, whose = chosen_size(samples), "automatic" if automatic else "wrapper's own"
    why = "" if size is None else f", as the {whose} {size} would not split {samples} samples"
    return replace(case, micro_batch_size=chosen), [f"micro_batch_size={chosen} was chosen{why}"]


def refuse(model: Any, inputs: Any, micro_batch_size: int | str | None, run: Any, options: dict[str, Any]) -> None:
    check_auto(micro_batch_size, options.get("memory"))
    if isinstance(inputs, Window):
        raise OptionError(
            "a proof on a window was asked for", "verify takes one batch", "join the window's micro-batches"
        )
    if run is not None and micro_batch_size is not None:
        raise OptionError(
            f"run= and micro_batch_size={micro_batch_size} were given",
            "a loop of your own cuts by itself",
            "leave one out",
        )
    if isinstance(model, MicroBatched) and options:
        raise OptionError(
            f"{', '.join(options)} was given for a MicroBatched model",
            "its options were fixed when it was wrapped",
            "pass them to MicroBatched",
        )


@contextmanager
def untouched(case: Case) -> Iterator[None]:
    """Nothing may reach the user's own parameters and tensors past the copies; their `.grad` waits aside meanwhile.

    Raises:
        ModelError: something did.
    """
    own = {id(tensor): (name, tensor) for name, tensor in case.every.trainable().items()}
    before = [(name, tensor, tensor.grad, tensor._version) for name, tensor in own.values()]
    for _, tensor, *_ in before:
        tensor.grad = None
    failed: Exception | None = None
    try:
        yield
    except BigBatchError:
        raise
    except Exception as error:  # a graph of the user's own cannot be run twice, which is no help to read
        failed = error
    finally:
        touched = [name for name, tensor, _, version in before if tensor.grad is not None or tensor._version != version]
        for _, tensor, gradient, _ in before:
            tensor.grad = gradient
    if touched:
        raise ModelError(
            "a proof on copies of the model was asked for",
            f"{len(touched)} parameters of the model itself or tensors beside it were used instead ({named(touched)})",
            "have functions take the model as an argument, name it by a variable of the same file, and compute what "
            "depends on such a tensor inside of them",
        ) from failed
    if failed is not None:
        raise failed
