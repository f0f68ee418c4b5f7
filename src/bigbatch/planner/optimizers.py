"""Leaner optimizers: what their state and their step take, beside those of the user's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bigbatch.core.models import parameters_of
from bigbatch.planner.fixed import Fixed, fixed_of, optimizer_of
from bigbatch.planner.trace import Job


@dataclass(frozen=True)
class Variant:
    """An optimizer and what it takes.

    Attributes:
        name: of the rung that it makes.
        optimizer: its class, with the option that makes it leaner.
        fixed: bytes that no micro-batch size changes.
        changes_numerics: whether weights move otherwise.
        switch: what is to be written beside the door.
    """

    name: str
    optimizer: str
    fixed: Fixed
    changes_numerics: bool = False
    switch: str = ""


def variants(job: Job, on_cuda: bool) -> list[Variant]:
    """The optimizer as given, first, and those that would take less."""
    if job.optimizer is None:
        return [Variant("", "none", fixed_of(job))]
    parameters = parameters_of(job.inner)
    optimizer = optimizer_of(job.optimizer, parameters, parameters)
    name = type(optimizer).__name__
    # On CUDA PyTorch takes all parameters in one go, unless it is told otherwise.
    together = "foreach" in optimizer.defaults and optimizer.defaults.get("foreach") is None
    together = together and on_cuda and not optimizer.defaults.get("fused")
    given = fixed_of(job, {"foreach": True} if together else {})
    found = [Variant("", name, given)]
    if together:
        alone, switch = fixed_of(job, {"foreach": False}), f"{name}(..., foreach=False)"
        found.append(Variant(f"{name}, foreach=False", switch, alone, switch=f"; {switch}"))
    if given.state > given.parameters / 2 and name != "Adafactor":
        lean = fixed_of(replace(job, optimizer=torch.optim.Adafactor), {"foreach": False})
        if lean.state < given.state:
            found.append(Variant("Adafactor", "Adafactor", lean, True, "; torch.optim.Adafactor(..., foreach=False)"))
    return found
