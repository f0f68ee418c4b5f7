"""What bigbatch needs to know of a model: how it is called, where it lives, what it holds, what it may not be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from bigbatch.errors import ModelError, OptionError

PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")


def call(model: Callable[..., Any], inputs: Any, extra: Mapping[str, Any] | None = None) -> Any:
    """A tuple is the arguments, a mapping the keyword arguments, anything else the one argument.

    >>> call(max, (2, 3)), call(dict, {"a": 1}), call(len, [1, 2, 3])
    (3, {'a': 1}, 3)
    """
    extra = extra or {}
    if isinstance(inputs, Tensor):
        return model(inputs, **extra)
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return model(*inputs, **extra)
    if isinstance(inputs, Mapping):
        return model(**inputs, **extra)
    return model(inputs, **extra)


def generators_of(inner: Iterable[nn.Module]) -> list[torch.Generator]:
    """The generators of random numbers that modules hold beside PyTorch's own."""
    return [value for module in inner for value in vars(module).values() if isinstance(value, torch.Generator)]


def inner_modules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """The modules and all that they hold, each once; without the names that `modules()` makes, for every batch asks."""
    inner = list(dict.fromkeys(modules))
    seen = set(inner)
    for module in inner:  # the list grows while it is read
        for child in module._modules.values():
            if child is not None and child not in seen:
                seen.add(child)
                inner.append(child)
    return inner


def names_of(inner: Iterable[nn.Module]) -> dict[nn.Module, str]:
    """The path of each of `inner_modules`, or the class of a module that no other one holds.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    >>> list(names_of(inner_modules([model])).values())
    ['Sequential', '0', '1', '1.0']
    """
    names: dict[nn.Module, str] = {}
    tops = set()
    for module in inner:  # those that hold a module come before it
        if module not in names:
            names[module] = type(module).__name__
            tops.add(module)
        for name, child in module._modules.items():
            if child is not None and child not in names:
                names[child] = name if module in tops else f"{names[module]}.{name}"
    return names


def parameters_of(inner: Iterable[nn.Module]) -> list[nn.Parameter]:
    """The parameters that the modules hold themselves, each once."""
    return list({id(p): p for module in inner for p in module._parameters.values() if p is not None}.values())


def device_of(parameters: Iterable[Tensor]) -> torch.device | None:
    """The one device that all parameters live on; None where there are several, or none."""
    devices = {parameter.device for parameter in parameters}
    return devices.pop() if len(devices) == 1 else None


def peak_bytes(device: torch.device | None) -> int | None:
    """The allocator's peak on a GPU; None where nothing is counted."""
    return torch.cuda.max_memory_allocated(device) if device is not None and device.type == "cuda" else None


def sizes_of(parameters: Iterable[Tensor]) -> frozenset[int]:
    """Every length that some axis of some parameter has: a field of that length may belong to the model's axes."""
    return frozenset(size for parameter in parameters if not is_lazy(parameter) for size in parameter.shape)


def refuse_parallel(modules: Iterable[nn.Module]) -> None:
    """Several processes come in a later round; until then they are refused by name, not averaged wrongly."""
    asked = "the gradient of the whole batch was asked for"
    for outer in modules:
        for name, module in outer.named_modules():
            kinds = {kind.__name__ for kind in type(module).__mro__}
            wrapper = next((kind for kind in PARALLEL if kind in kinds), None)
            if wrapper:
                raise ModelError(asked, f"{name or 'the model'} is a {wrapper}", "pass the model that it wraps")
    if (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    ):
        raise ModelError(
            asked, f"{torch.distributed.get_world_size()} processes", "run one process; several are not supported yet"
        )


def check_option(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise OptionError(f"{name}={value!r} was asked for", "that is no such option", f"pass {' or '.join(allowed)}")
