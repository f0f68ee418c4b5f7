"""What no micro-batch size changes: weights, gradients, and the optimizer's state and step, from a step under fakes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from bigbatch.core.models import parameters_of
from bigbatch.core.sums import is_low
from bigbatch.planner.curves import course_of, on_device
from bigbatch.planner.ledger import GRADIENTS, Ledger, bytes_of_all
from bigbatch.planner.stand_ins import stand_ins
from bigbatch.planner.trace import Job

PARAMETERS, BUFFERS, STATE = "parameters", "buffers", "optimizer state"


@dataclass(frozen=True)
class Fixed:
    """Bytes that no micro-batch size changes.

    Attributes:
        parameters: all of them.
        buffers: all of them.
        gradients: as they are handed to the optimizer.
        gathered: as they are added up between micro-batches: those of low precision in float32.
        state: the optimizer's.
        step: what the optimizer's step holds for itself.
    """

    parameters: int
    buffers: int
    gradients: int
    gathered: int
    state: int
    step: int

    def to_dict(self) -> dict[str, int]:
        return {
            PARAMETERS: self.parameters,
            BUFFERS: self.buffers,
            GRADIENTS: self.gradients,
            STATE: self.state,
        }


def fixed_of(job: Job, options: Mapping[str, Any] | None = None) -> Fixed:
    """What no micro-batch size changes; `options` are set in all groups of the optimizer."""
    parameters = parameters_of(job.inner)
    buffers = [buffer for module in job.inner for buffer in module._buffers.values() if buffer is not None]
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    state, step = stepped(job, options or {}) if job.optimizer is not None else (0, 0)
    gathered = sum(p.numel() * (4 if is_low(p) and p.grad_dtype == p.dtype else p.element_size()) for p in trained)
    return Fixed(bytes_of_all(parameters), bytes_of_all(buffers), bytes_of_all(trained), gathered, state, step)


def stepped(job: Job, options: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the optimizer's state after a step, and the most that a step holds beside it, both under fakes."""
    before = parameters_of(job.inner)
    mode, ledger = FakeTensorMode(allow_non_fake_inputs=True), Ledger()
    with stand_ins(job.inner, mode), mode:
        fakes = parameters_of(job.inner)
        optimizer = optimizer_of(job.optimizer, before, fakes)
        for group in optimizer.param_groups:
            group.update(options)
        for parameter in fakes:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        with ledger:
            optimizer.step()
            first = ledger.now
            optimizer.step()
        state = [leaf for leaf in tree_leaves([list(held.values()) for held in optimizer.state.values()])]
        size = bytes_of_all([leaf for leaf in state if isinstance(leaf, Tensor)])
    return size, int(on_device(course_of(ledger))[first:].max()) - size


def optimizer_of(given: Any, before: Iterable[Tensor], fakes: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The user's optimizer, or what their function makes, for the fakes."""
    fakes = list(fakes)
    if not isinstance(given, torch.optim.Optimizer):
        made: torch.optim.Optimizer = given([fake for fake in fakes if fake.requires_grad])
        return made
    stands = {id(real): fake for real, fake in zip(before, fakes, strict=True)}
    twin = copy.copy(given)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [stands[id(parameter)] for parameter in group["params"] if id(parameter) in stands]}
        for group in given.param_groups
    ]
    return twin
