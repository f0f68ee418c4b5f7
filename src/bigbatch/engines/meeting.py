"""What a micro-batch meets on its way: its calls of batch norm are caught, and what it computes is marked as its own.

A model may keep a tensor between two layers, in an attribute or a hook, and read it later in the same forward. With
micro-batches side by side it would read its neighbour's. So every tensor that comes from a micro-batch's samples bears
its mark, and a micro-batch that reads another one's is stopped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bigbatch.core.batch_norm import ASKED, arguments_of, is_kernel
from bigbatch.core.models import names_of
from bigbatch.core.rng import inside_checkpoint
from bigbatch.engines.turns import Turns
from bigbatch.errors import ModelError

MARK = "_bigbatch_comes_from"
ON_THE_WAY = {__file__, F.__file__, torch.overrides.__file__, torch._ops.__file__}
CONSTANT = {  # nothing of a sample but its shape, dtype and device goes into what they make
    *(torch.zeros_like, torch.ones_like, torch.full_like, torch.empty_like),
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_full, Tensor.new_empty),
}
OF_A_LEAF = {  # what is asked of a parameter itself, or set on it, rather than computed with it
    *(Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.requires_grad_, Tensor.retain_grad),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("grad", "is_leaf", "grad_fn", "_backward_hooks")),
}
SETTERS = ("__set__", "__delete__")


class Call:
    """One call of batch norm, on its way to meet those of the other micro-batches.

    Attributes:
        where: the line of code that made the call.
        entered: the piece that waits.
        met: what it needs to go on, once all are here.
    """

    entered: Any = None
    met: Any = None

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.weight, self.bias = given["weight"], given["bias"]
        self.running_mean, self.running_var = given["running_mean"], given["running_var"]
        self.momentum, self.eps = given["momentum"], given["eps"]
        self.where = line_of_caller()

    def key(self, inner: Iterable[nn.Module]) -> Any:
        """What two calls of one layer have in common, though each has running statistics of its own."""
        if self.weight is not None and self.weight.is_leaf:
            return id(self.weight)
        return self.owner(inner) or self.where

    def owner(self, inner: Iterable[nn.Module]) -> nn.Module | None:
        """The module whose weight or running statistics these are, while they are the micro-batch's own."""
        own = {id(held) for held in (self.weight, self.running_mean) if held is not None}
        for module in inner:
            if any(id(held) in own for held in (*module._parameters.values(), *module._buffers.values())):
                return module
        return None

    def name(self, inner: Iterable[nn.Module]) -> str:
        owner = self.owner(inner)
        return f"batch norm called at {self.where}" if owner is None else names_of(inner)[owner]


def line_of_caller() -> str:
    """The first line of code outside of `torch.nn.functional` that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in ON_THE_WAY:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Meeting(TorchFunctionMode):
    """Sees every function of PyTorch that one micro-batch calls.

    Args:
        mark: the name of the forward, and the number of the micro-batch in it.
        turns: may end the micro-batch at any function, and is told of what is refused here.
        batch_norm: `batch_norm(k, x, call)` answers micro-batch k's calls of batch norm in training mode.
        own: what the micro-batch computes with in place of some parameters, by their ids.
    """

    def __init__(
        self,
        mark: tuple[str, int],
        turns: Turns,
        batch_norm: Callable[[int, Tensor, Call], Tensor],
        own: Mapping[int, Tensor],
    ) -> None:
        super().__init__()
        self.mark, self.turns, self.batch_norm, self.own = mark, turns, batch_norm, own

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.turns.refuse_to_go_on()
        given = arguments_of(func, args, kwargs)
        if given is not None:
            return self._caught(given.pop("input"), Call(given))
        if is_kernel(func, args, kwargs):
            found = f"a kernel of batch norm, {func.__name__}, called at {line_of_caller()}"
            raise self._refused(found, "call torch.nn.functional.batch_norm, or pass batch_norm='local'")
        mine = False
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                mine = self._is_mine(value) or mine
            elif type(value) is list or type(value) is tuple:
                mine = any([self._is_mine(item) for item in value if isinstance(item, Tensor)]) or mine
        if self.own and func not in OF_A_LEAF and getattr(func, "__name__", "") not in SETTERS:
            args, kwargs = self._with_own(args), {name: self._with_own(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        if mine and func not in CONSTANT:
            self.follow(args[:1] if out is None else (out,))  # what returns nothing has written to its first argument
        return out

    def follow(self, values: Iterable[Any]) -> None:
        """Marks tensors, also in lists and tuples."""
        for value in values:
            if isinstance(value, Tensor):
                value.__dict__[MARK] = self.mark
            elif isinstance(value, list | tuple) and not isinstance(value, torch.Size):
                self.follow(value)

    def _with_own(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.own.get(id(value), value)
        return type(value)(map(self._with_own, value)) if type(value) in (list, tuple) else value

    def _is_mine(self, value: Tensor) -> bool:
        mark = value.__dict__.get(MARK)
        if mark is None or mark[0] != self.mark[0]:
            return False
        if mark[1] == self.mark[1]:
            return True
        raise self._refused(
            f"micro-batch {self.mark[1]} reads a tensor of shape {tuple(value.shape)} that was computed from "
            f"micro-batch {mark[1]}: the model keeps it between two layers (in an attribute, a hook, a list)",
            "hand it on as an argument or a result, freeze batch norm with .eval(), or pass batch_norm='local'",
        )

    def _caught(self, x: Tensor, call: Call) -> Tensor:
        if inside_checkpoint():
            raise self._refused(
                f"a batch norm inside torch.utils.checkpoint ({call.where}), whose second forward would be alone",
                "switch checkpointing off: activations wait on the host already",
            )
        self._is_mine(x)
        out = self.batch_norm(self.mark[1], x, call)
        self.follow((out,))
        return out

    def _refused(self, found: str, do: str) -> ModelError:
        return cast(ModelError, self.turns.failed(ModelError(ASKED, found, do)))
