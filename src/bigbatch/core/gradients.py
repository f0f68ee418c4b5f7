"""Gradients are added to what `.grad` held, all at once at the end of the window, or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.tree import leaves, map_leaves
from bigbatch.errors import ModelError

LOW_PRECISION = (torch.bfloat16, torch.float16)


@contextmanager
def added_at_once(parameters: Iterable[Tensor], grad_dtype: torch.dtype | None = None) -> Iterator[None]:
    """What `.grad` holds is set aside while micro-batches fill it, and added at the end.

    An error inside leaves every `.grad` as it was: the same tensors with the same values. With `grad_dtype`, gradients
    of low-precision parameters are kept and added up in that dtype (`Tensor.grad_dtype` of PyTorch).
    """
    held = [(parameter, parameter.grad) for parameter in parameters if parameter.requires_grad]
    for parameter, _ in held:
        parameter.grad = None
        if grad_dtype is not None and parameter.dtype in LOW_PRECISION:
            parameter.grad_dtype = grad_dtype
    try:
        yield
    except BaseException:
        for parameter, gradient in held:
            parameter.grad = None
            if gradient is not None:
                parameter.grad_dtype = gradient.dtype
            parameter.grad = gradient
        raise
    for parameter, gradient in held:
        if gradient is not None:
            parameter.grad = _sum(gradient, parameter.grad)


@torch.no_grad()
def _sum(held: Tensor, new: Tensor | None) -> Tensor:
    if new is None:
        return held
    if held.layout != torch.strided or held.dtype != new.dtype:
        return held + new
    return held.add_(new)


class Border:
    """The graph in front of the model is cut off and run backward once, after all micro-batches.

    A context encoder that runs once and feeds every micro-batch would be freed by the first backward. Tensors of the
    batch that require a gradient are therefore replaced by leaves; their gradients gather over the window.
    """

    def __init__(self, items: list[tuple[Any, Any]]) -> None:
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self.items = items
        if any(carries_a_graph(part) for item in items for part in item):
            self.items = [
                (map_leaves(self._leaf, inputs), map_leaves(self._leaf, targets)) for inputs, targets in items
            ]

    def _leaf(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return tensor
        if id(tensor) not in self.leaves:
            self.leaves[id(tensor)] = (tensor, tensor.detach().requires_grad_())
        return self.leaves[id(tensor)][1]

    def backward(self) -> None:
        pairs = [(tensor, leaf.grad) for tensor, leaf in self.leaves.values() if leaf.grad is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def carries_a_graph(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return tree.requires_grad
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves(tree))


def versions(parameters: Iterable[Tensor]) -> list[int]:
    return [parameter._version for parameter in parameters]


def refuse_moved_parameters(parameters: Iterable[Tensor], before: list[int]) -> None:
    """An optimizer that steps inside backward would step once a micro-batch."""
    if versions(parameters) != before:
        raise ModelError(
            "one update for the whole batch was asked for",
            "parameters changed during the backward of its first micro-batch (an optimizer step in a gradient hook?)",
            "step the optimizer after accumulator.backward(...), not in a hook",
        )


def detached(tree: Any) -> Any:
    """The same structure with every tensor cut off its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)
