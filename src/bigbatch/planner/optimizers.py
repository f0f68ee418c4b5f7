"""Leaner optimizers: what their state and their step take, beside those of the user's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.models import parameters_of
from bigbatch.errors import OptionError
from bigbatch.planner.fixed import Fixed, fixed_of, on_host, optimizer_of
from bigbatch.planner.host_state import keep_state_on_host
from bigbatch.planner.trace import Job


@dataclass(frozen=True)
class Variant:
    """An optimizer and what it takes.

    Attributes:
        name: of the rung that it makes.
        optimizer: its class, with the option that makes it leaner.
        fixed: bytes that no micro-batch size changes.
        make: makes it for the model's parameters; an optimizer that exists is changed.
        changes_numerics: whether weights move otherwise.
    """

    name: str
    optimizer: str
    fixed: Fixed
    make: Callable[[], torch.optim.Optimizer]
    changes_numerics: bool = False

    @property
    def switch(self) -> str:
        """What is to be written beside the door."""
        return f"; plan.optimizer() is {self.optimizer}" if self.name else ""


def variants(job: Job, on_cuda: bool) -> list[Variant]:
    """The optimizer as given, first, and those that would take less."""
    if job.optimizer is None:
        return [Variant("", "none", fixed_of(job), none_given)]
    parameters = parameters_of(job.inner)
    optimizer = optimizer_of(job.optimizer, parameters, parameters)
    name = type(optimizer).__name__
    # On CUDA PyTorch takes all parameters in one go, unless it is told otherwise.
    together = "foreach" in optimizer.defaults and optimizer.defaults.get("foreach") is None
    together = together and on_cuda and not optimizer.defaults.get("fused")
    given = fixed_of(job, {"foreach": True} if together else {})
    found = [Variant("", name, given, partial(made, job.optimizer, parameters))]
    alone = fixed_of(job, {"foreach": False}) if together else given
    if together:
        options = {"foreach": False}
        make = partial(made, job.optimizer, parameters, options)
        found.append(Variant(f"{name}, foreach=False", f"{name}(..., foreach=False)", alone, make))
    if on_cuda and alone.state > alone.parameters / 2:
        make = partial(made, job.optimizer, parameters, {"foreach": False} if together else {}, away=True)
        away = on_host(alone)
        found.append(Variant("optimizer state on the host", f"{name} with its state on the host", away, make))
    if given.state > given.parameters / 2 and name != "Adafactor":
        lean = fixed_of(replace(job, optimizer=torch.optim.Adafactor), {"foreach": False})
        make = partial(made, torch.optim.Adafactor, parameters, {"foreach": False})
        if lean.state < given.state:
            found.append(Variant("Adafactor", "torch.optim.Adafactor(..., foreach=False)", lean, make, True))
    return found


def made(
    given: Any, parameters: Sequence[Tensor], options: Mapping[str, Any] | None = None, away: bool = False
) -> torch.optim.Optimizer:
    """The user's optimizer, or what their function makes of the trained parameters, with options in all groups."""
    optimizer: torch.optim.Optimizer = given
    if not isinstance(given, torch.optim.Optimizer):
        optimizer = given([parameter for parameter in parameters if parameter.requires_grad])
    for group in optimizer.param_groups:
        group.update(options or {})
    return keep_state_on_host(optimizer) if away else optimizer


def none_given() -> torch.optim.Optimizer:
    raise OptionError("the optimizer of a plan was asked for", "a plan without one", "plan with optimizer=...")
