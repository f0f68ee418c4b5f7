"""Sums of gradients in float32, where parameters and the gradient of each micro-batch are bfloat16 or float16."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import OptionError

LOW_PRECISION = (torch.bfloat16, torch.float16)


def check_grad_dtype(grad_dtype: torch.dtype | None) -> None:
    """Raises:
    OptionError: it is neither None nor a dtype in which gradients can be added up.
    """
    if grad_dtype not in (None, torch.float32, *LOW_PRECISION):
        raise OptionError(
            f"grad_dtype={grad_dtype!r} was asked for",
            "gradients of bfloat16 and float16 parameters, the only ones that it speaks of",
            "leave it out, or pass torch.float32 for an optimizer with float32 weights of its own",
        )


class Sums:
    """Takes what arrives in `.grad` of low-precision parameters, and adds it up in float32.

    Autograd rounds the gradient of each backward to the parameter's dtype. A sum in bfloat16 goes on to lose every
    term below 1/256 of it; one in float32 rounds next to nothing away. It takes 4 bytes a number from the second
    backward on, for as long as the window lasts.
    """

    def __init__(self) -> None:
        self.totals: dict[int, Tensor] = {}

    @contextmanager
    def gathered(self, parameters: Iterable[Tensor]) -> Iterator[None]:
        """Backwards run inside; `.grad` of the parameters that are added up here stays None."""
        handles = [self.follow(parameter) for parameter in parameters if is_low(parameter)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def follow(self, parameter: Tensor) -> RemovableHandle:
        """From now on, until the handle is removed."""
        return parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-any-return, no-untyped-call]

    def taken(self, parameter: Tensor) -> Tensor | None:
        """What has arrived for a parameter, which has it no longer."""
        gradient, parameter.grad = parameter.grad, None
        return self.totals.pop(id(parameter), gradient)

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        gradient, parameter.grad = cast(Tensor, parameter.grad), None
        total = self.totals.get(id(parameter))  # the first one stays as it is: it may be the only one
        self.totals[id(parameter)] = gradient if total is None else self._plus(total.float(), gradient)

    def _plus(self, total: Tensor, gradient: Tensor) -> Tensor:
        return total.add_(gradient) if total.layout == torch.strided else plus(total, gradient)


class Shared:
    """A low-precision parameter of several micro-batches in one graph, where autograd adds up their gradients at once.

    It adds up in the dtype of the tensor that they share. So each micro-batch has the parameter under a name of its
    own, and what these names share is a tensor of float32 that holds no numbers. The sum is rounded once.

    >>> weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    >>> shared = Shared(weight)
    >>> sum(shared.own() * factor for factor in [0.5] * 255 + [256.0]).backward()
    >>> weight.grad  # 256 is where a sum in bfloat16 would have stayed
    tensor([384.], dtype=torch.bfloat16)
    """

    def __init__(self, parameter: Tensor) -> None:
        self.parameter = parameter
        self.wide = _Wide.apply(parameter)  # type: ignore[no-untyped-call]

    def own(self) -> Tensor:
        """The parameter, in the same memory, for one more micro-batch."""
        return _Own.apply(self.wide, self.parameter.detach())  # type: ignore[no-untyped-call, no-any-return]


class _Wide(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor) -> Tensor:
        return parameter.new_zeros((), dtype=torch.float32).expand(parameter.shape)

    @staticmethod
    def backward(ctx: Any, total: Tensor) -> Tensor:
        return total.coalesce() if total.is_sparse else total  # autograd rounds it to the parameter's dtype


class _Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wide: Tensor, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


def is_low(parameter: Tensor) -> bool:
    return parameter.dtype in LOW_PRECISION and not is_lazy(parameter)


def adds_up_low(parameter: Tensor) -> bool:
    """Whether autograd, left to itself, adds up a parameter's gradients in low precision."""
    return parameter.requires_grad and is_low(parameter) and parameter.grad_dtype == parameter.dtype


def expect(dtypes: Iterable[tuple[Tensor, torch.dtype | None]]) -> None:
    """Sets `Tensor.grad_dtype` where it differs: once set it stays, whatever the parameter is converted to later."""
    for parameter, dtype in dtypes:
        if parameter.grad_dtype != dtype:
            gradient, parameter.grad = parameter.grad, None
            parameter.grad_dtype = dtype
            parameter.grad = None if gradient is None else rounded(gradient, parameter)


def plus(one: Tensor, other: Tensor) -> Tensor:
    """The sum of gradients, each of which may be sparse."""
    return other + one if one.layout != other.layout == torch.strided else one + other


def rounded(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in the dtype that a parameter, or a tensor with a graph of its own, takes.

    >>> rounded(torch.tensor(383.5), torch.zeros((), dtype=torch.bfloat16))
    tensor(384., dtype=torch.bfloat16)
    """
    if parameter.dtype not in LOW_PRECISION:
        return gradient
    dtype = parameter.grad_dtype if parameter.is_leaf else parameter.dtype
    if dtype is None or dtype == gradient.dtype:
        return gradient
    return (gradient.coalesce() if gradient.is_sparse else gradient).to(dtype)  # equal rows meet before they round
