"""What no micro-batch size changes: weights, gradients, and the optimizer's state and step, from a step under fakes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from bigbatch.core.models import parameters_of
from bigbatch.core.sums import adds_up_low
from bigbatch.planner.curves import course_of, on_device
from bigbatch.planner.host_state import is_large
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
        host: what waits on the host between steps.
        states: the optimizer's for each parameter, without counters.
    """

    parameters: int
    buffers: int
    gradients: int
    gathered: int
    state: int
    step: int
    host: int = 0
    states: tuple[int, ...] = ()

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
    state, step, states = (0, 0, []) if job.optimizer is None else stepped(job, options or {})
    gathered = sum(p.numel() * (4 if adds_up_low(p) else p.element_size()) for p in trained)
    weights = bytes_of_all(parameters), bytes_of_all(buffers), bytes_of_all(trained)
    return Fixed(*weights, gathered, state, step, states=tuple(states))


def on_host(fixed: Fixed) -> Fixed:
    """The same where the state waits on the host, and that of one parameter at a time comes back; see `host_state`."""
    away, largest = sum(fixed.states), max(fixed.states, default=0)
    return replace(fixed, state=fixed.state - away, step=fixed.step + largest, host=away)


def stepped(job: Job, options: Mapping[str, Any]) -> tuple[int, int, list[int]]:
    """Under fakes: bytes of the optimizer's state after a step, the most that a step holds beside it, and bytes of each
    parameter's state without counters."""
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
        states = [
            [leaf for leaf in tree_leaves(list(held.values())) if isinstance(leaf, Tensor)]
            for held in optimizer.state.values()
        ]
        size = bytes_of_all([leaf for state in states for leaf in state])
        large = [bytes_of_all([leaf for leaf in state if is_large(leaf)]) for state in states]
    return size, int(on_device(course_of(ledger))[first:].max()) - size, large


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
