"""Optimizer state that waits on the host: a step brings the state of one parameter to the device, and takes it back."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

Made = TypeVar("Made", bound=Optimizer)


def keep_state_on_host(optimizer: Made) -> Made:
    """The same optimizer, whose steps go from parameter to parameter; between steps the device holds no state.

    For optimizers that treat each parameter by itself, as Adam, SGD and Adafactor do. Hooks of a step run once for each
    parameter. State that is there already moves with the next step.

    >>> weight = torch.nn.Parameter(torch.ones(3))
    >>> optimizer = keep_state_on_host(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
    >>> weight.grad = torch.ones(3)
    >>> optimizer.step()
    >>> weight.tolist(), optimizer.state[weight]["momentum_buffer"].device.type
    ([0.8999999761581421, 0.8999999761581421, 0.8999999761581421], 'cpu')
    """
    whole = optimizer.step

    def step(self: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        each = [list(group["params"]) for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = []
            for group, parameters in zip(self.param_groups, each, strict=True):
                for parameter in parameters:
                    group["params"] = [parameter]
                    move(self.state.get(parameter, {}), parameter.device)
                    whole()
                    move(self.state.get(parameter, {}), torch.device("cpu"))
                group["params"] = []
        finally:
            for group, parameters in zip(self.param_groups, each, strict=True):
                group["params"] = parameters
        return loss

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


def move(state: dict[str, Any], device: torch.device) -> None:
    """Moves what is as large as a weight; counters stay where their optimizer wants them."""
    for name, value in state.items():
        if is_large(value) and value.device != device:
            state[name] = value.to(device)


def is_large(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
