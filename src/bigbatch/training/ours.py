"""The way of a run: one batch's gradient as bigbatch gets it, by either door, and how it was got."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from bigbatch.accumulator import Accumulator
from bigbatch.core.move import to_device
from bigbatch.core.split import Piece
from bigbatch.fit.sizer import Sizer
from bigbatch.micro_batched import MicroBatched
from bigbatch.terms import StepReport
from bigbatch.training.ways import Around, Job, Way, loss_of


@dataclass(frozen=True)
class Used:
    """How a batch was run: micro-batches, samples of the largest, and tries that ran out of memory."""

    micro_batches: int
    micro_batch_size: int
    retries: int


@dataclass(frozen=True)
class Ours:
    """The way of a run.

    Attributes:
        run: the way itself.
        used: how the last batch was run.
        state: what was learnt about micro-batch sizes, ready for JSON; empty where the size was given.
        sizer: chooses the size where it is automatic.
    """

    run: Way
    used: Callable[[], Used]
    state: Callable[[], dict[str, Any]]
    sizer: Sizer | None = None

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        return self.run(inputs, targets)


def by_bigbatch(
    job: Job,
    micro_batch_size: int | str,
    scaler: Any = None,
    backward: Callable[[Tensor], None] = Tensor.backward,
    around: Around | None = None,
    memory: int | str | float | None = None,
) -> Ours:
    """The way that a run takes: door 1, or door 2 where outputs are joined.

    Args:
        job: what is trained.
        micro_batch_size: the most samples that are run at once, or "auto".
        scaler: door 1 multiplies gradients by its scale.
        backward: runs the joined loss backward (door 2); Accelerate's own scales it.
        around: entered around the micro-batch that goes from one sample to another, to hand out its random numbers.
        memory: the budget of "auto".
    """
    if job.activations is not None:
        return _by_door_2(job, micro_batch_size, backward, around, memory)

    def around_piece(piece: Piece) -> AbstractContextManager[Any]:
        return around(piece.first, piece.first + piece.samples) if around is not None else nullcontext()

    accumulator = Accumulator(
        job.model,
        job.loss_fn,
        micro_batch_size=micro_batch_size,
        memory=memory,
        reduction=job.reduction,
        scaler=scaler,
    )
    accumulator.around = around_piece if around is not None else None

    return Ours(accumulator.backward, lambda: used_by(accumulator.report), accumulator.state_dict, accumulator.sizer)


def _by_door_2(
    job: Job,
    micro_batch_size: int | str,
    backward: Callable[[Tensor], None],
    around: Around | None,
    memory: int | str | float | None,
) -> Ours:
    wrapped = MicroBatched(job.model, micro_batch_size, memory=memory, activations=job.activations or "recompute")
    joined, door = replace(job, model=wrapped), wrapped._door

    def around_piece(piece: Piece) -> AbstractContextManager[Any]:
        return around(piece.first, piece.first + piece.samples) if around is not None else nullcontext()

    def run(inputs: Any, targets: Any) -> Tensor:
        loss = loss_of(joined, inputs, to_device(targets, job.device))
        backward(loss)
        return loss.detach()

    door.around = around_piece if around is not None else None
    automatic = isinstance(micro_batch_size, str)
    sizer = door.sizer if automatic else None
    return Ours(run, lambda: used_by(wrapped.report), lambda: door.sizer.state_dict() if automatic else {}, sizer)


def used_by(report: StepReport | None) -> Used:
    """How a batch was run, from a door's report.

    >>> used_by(StepReport(10, 3, 4, None, retries=1))
    Used(micro_batches=3, micro_batch_size=4, retries=1)
    """
    report = report or StepReport(0, 0, 0, None)
    return Used(report.micro_batches, report.micro_batch_size, report.retries)
