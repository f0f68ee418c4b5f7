"""In which floating-point types a model computes, and a way to have it compute in float64 although it says float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WIDER = {torch.float32: torch.float64, torch.complex64: torch.complex128}
BY_BITS = (Tensor.view, torch.frombuffer)  # these read memory as a type, they do not convert


class InDouble(TorchFunctionMode):
    """Where a model asks for float32 by name (`x.float()`, `dtype=torch.float32`), it is given float64.

    Norms and losses of many models do so whatever they are given, and would round a float64 copy to float32. It is
    entered in every forward, as a recomputation may run in a thread of its own.

    >>> with InDouble():
    ...     torch.ones(2, dtype=torch.float64).float().dtype
    torch.float64
    """

    def __init__(self, on: bool = True) -> None:
        super().__init__()
        self.on = on

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.on or func in BY_BITS:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0].double()
        named = {name: wider(value) for name, value in kwargs.items()}
        return func(*(wider(value) for value in args), **named)


def wider(value: Any) -> Any:
    return WIDER.get(value, value) if isinstance(value, torch.dtype) else value


class Dtypes(TorchFunctionMode):
    """Notes the floating-point types that a gradient goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in out if isinstance(out, tuple | list) else (out,):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                self.seen.add(leaf.dtype)
        return out


def coarsest(dtypes: list[torch.dtype]) -> torch.dtype:
    """The least precise of some floating-point types.

    >>> coarsest([torch.float64, torch.bfloat16, torch.float32])
    torch.bfloat16
    """
    floating = [dtype for dtype in dtypes if dtype.is_floating_point or dtype.is_complex]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)
