"""A plan put into practice: the door and the optimizer that the recommended rung asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.accumulator import Accumulator
from bigbatch.errors import OptionError
from bigbatch.micro_batched import MicroBatched
from bigbatch.planner.records import Plan, Rung


@dataclass(frozen=True)
class Asked:
    """What a plan was made for.

    Attributes:
        model: the user's.
        loss_fn: the user's.
        options: of the doors.
        optimizers: one for each rung: makes its optimizer.
    """

    model: Any
    loss_fn: Any
    options: Mapping[str, Any]
    optimizers: Sequence[Callable[[], torch.optim.Optimizer]]


def apply(plan: Plan) -> Accumulator | MicroBatched:
    """The `Accumulator`, or for a loss that nobody can weigh the model in `MicroBatched`, as the plan recommends.

    Raises:
        OptionError: nothing fits.
    """
    rung, asked = plan.rungs[chosen_of(plan)], plan.job
    options: dict[str, Any] = {"micro_batch_size": rung.micro_batch_size, "autocast": rung.way.autocast}
    if rung.way.checkpoint:
        options["checkpoint"] = True
    if rung.way.engine != "sequential" or rung.way.activations != "keep":
        options["activations"] = rung.way.activations
    if not is_door_2(rung):
        return Accumulator(asked.model, asked.loss_fn, **options, **asked.options)
    assert isinstance(asked.model, nn.Module)
    return MicroBatched(asked.model, **options, split=asked.options["split"])


def optimizer(plan: Plan) -> torch.optim.Optimizer:
    """The optimizer that the recommended rung takes, for the model's parameters; one that exists already is changed.

    Raises:
        OptionError: nothing fits, or the plan was made without an optimizer.
    """
    make: Callable[[], torch.optim.Optimizer] = plan.job.optimizers[chosen_of(plan)]
    return make()


def is_door_2(rung: Rung) -> bool:
    return rung.switch.startswith("MicroBatched")


def chosen_of(plan: Plan) -> int:
    """The place of the recommended rung."""
    if plan.chosen is None:
        least = min(rung.peak_bytes for rung in plan.rungs)
        raise OptionError(
            f"a plan for {plan.memory_bytes} bytes was to be applied",
            f"no rung that fits; the smallest peak is {least} bytes",
            "plan for more memory, shorter samples or a smaller model",
        )
    return plan.chosen
