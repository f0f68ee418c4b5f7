"""A memory budget: what has to fit beside the micro-batches of every size, and whether a measured peak kept to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from bigbatch.core.units import format_bytes
from bigbatch.errors import OptionError
from bigbatch.fit.budget import budget_bytes
from bigbatch.fit.need import bytes_of
from bigbatch.fit.sizer import MOMENTS
from bigbatch.training.ways import Job, named_parameters


@dataclass(frozen=True)
class Budget:
    """A budget and what is in it before the first micro-batch, in bytes.

    Attributes:
        bytes: the budget.
        weights: parameters and buffers.
        gradients: one for each trained parameter.
        optimizer: kept free for the optimizer's state, two numbers for each trained one.
    """

    bytes: int
    weights: int
    gradients: int
    optimizer: int

    def refuse_too_small(self, memory: Any) -> None:
        """Refuses a budget that no micro-batch size can keep.

        Raises:
            OptionError: weights, gradients and optimizer state alone take it all.

        >>> Budget(100, 40, 40, 80).refuse_too_small("100")
        Traceback (most recent call last):
        bigbatch.errors.OptionError: memory='100' was asked for. Found: weights take 40 B, gradients 40 B and ...
        """
        if self.weights + self.gradients + self.optimizer < self.bytes:
            return
        held = f"weights take {format_bytes(self.weights)}, gradients {format_bytes(self.gradients)}"
        raise OptionError(
            f"memory={memory!r} was asked for",
            f"{held} and {format_bytes(self.optimizer)} are kept for the optimizer's state, so no micro-batch is "
            "small enough",
            "state a larger budget, or a micro_batch_size to run without one",
        )

    def row(self, peak_bytes: int) -> str:
        """What a person reads about a peak, which counts gradients and activations.

        >>> Budget(100, 10, 10, 20).row(65), Budget(100, 10, 10, 20).row(75)
        ('100 B; 95 B with weights and optimizer state', '100 B; EXCEEDED, 105 B with weights and optimizer state')
        """
        total = peak_bytes + self.weights + self.optimizer
        kept = "" if total <= self.bytes else "EXCEEDED, "
        return f"{format_bytes(self.bytes)}; {kept}{format_bytes(total)} with weights and optimizer state"

    def to_dict(self) -> Mapping[str, int]:
        return dict(vars(self))


def budget_of(job: Job, memory: int | str | float | None) -> Budget | None:
    """The budget of a run on the job's device; None where none was stated."""
    count = None if memory is None else budget_bytes(memory, job.device)
    if count is None:
        return None
    parameters = list(named_parameters(job).values())
    modules = [module for module in (job.model, job.loss_fn) if isinstance(module, nn.Module)]
    buffers = {id(buffer): buffer for module in modules for buffer in module.buffers()}
    trained = bytes_of([parameter for parameter in parameters if parameter.requires_grad])
    return Budget(count, bytes_of([*parameters, *buffers.values()]), trained, MOMENTS * trained)
