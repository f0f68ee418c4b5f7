"""A plan put into practice: the door that the recommended rung asks for."""

from __future__ import annotations

from typing import Any

from torch import nn

from bigbatch.accumulator import Accumulator
from bigbatch.errors import OptionError
from bigbatch.micro_batched import MicroBatched
from bigbatch.planner.records import Plan


def apply(plan: Plan) -> Accumulator | MicroBatched:
    """The `Accumulator`, or for a loss that nobody can weigh the model in `MicroBatched`, as the plan recommends.

    Raises:
        OptionError: nothing fits.
    """
    if plan.chosen is None:
        least = min(rung.peak_bytes for rung in plan.rungs)
        raise OptionError(
            f"a plan for {plan.memory_bytes} bytes was to be applied",
            f"no rung that fits; the smallest peak is {least} bytes",
            "plan for more memory, shorter samples or a smaller model",
        )
    rung = plan.rungs[plan.chosen]
    model, loss_fn, given = plan.job
    options: dict[str, Any] = {"micro_batch_size": rung.micro_batch_size, "autocast": rung.way.autocast}
    if rung.way.checkpoint:
        options["checkpoint"] = True
    if rung.way.engine != "sequential" or rung.way.activations != "keep":
        options["activations"] = rung.way.activations
    if not rung.switch.startswith("MicroBatched"):
        return Accumulator(model, loss_fn, **options, **given)
    assert isinstance(model, nn.Module)
    return MicroBatched(model, **options, split=given["split"])
