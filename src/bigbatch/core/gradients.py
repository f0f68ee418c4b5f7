"""Gradients are added to what `.grad` held, all at once at the end of the window, or not at all."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from bigbatch.core.sums import Sums, expect, is_low, plus, rounded
from bigbatch.core.tree import map_leaves, tensors_of

NOTHING = nullcontext()
ONCE = "_bigbatch_happens_once"
Hooks = Mapping[int, Callable[[Any], Any]]


@contextmanager
def added_at_once(parameters: Iterable[Tensor], grad_dtype: torch.dtype | None = None) -> Iterator[Sums]:
    """What `.grad` holds is set aside while micro-batches fill it, and added at the end.

    Hooks of the parameters see the batch's gradient once, as they do when the whole batch runs backward: one that
    clips, or steps an optimizer, does what it was written for. An error inside leaves every `.grad` as it was: the
    same tensors with the same values. Hooks happen once: an error from the first of them on is marked.

    Args:
        parameters: what gets a gradient.
        grad_dtype: the dtype in which gradients of low-precision parameters are added up and left, which their
            `Tensor.grad_dtype` is set to. None: added up in float32, and rounded once to what that says already.
    """
    each = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}  # named twice, added once
    held = [(parameter, parameter.grad) for parameter in each.values()]
    copies: list[tuple[Tensor, Tensor]] = []
    hooked = [(p, *hooks_of(p)) for p, _ in held if p._backward_hooks or p._post_accumulate_grad_hooks]
    sums = Sums()
    low = [parameter for parameter, _ in held if is_low(parameter)]
    before = [(parameter, parameter.grad_dtype) for parameter in low]
    for parameter, _ in held:
        parameter.grad = None
    if grad_dtype is not None:
        expect([(parameter, grad_dtype) for parameter in low])
    try:
        with _set_aside(hooked) if hooked else NOTHING, sums.gathered(low if grad_dtype is None else ()):
            yield sums
        with once(lambda: True) if hooked else NOTHING:
            _hand_over(held, hooked, sums, copies)
    except BaseException:
        for parameter, _ in held:
            parameter.grad = None
        expect(before)
        for parameter, gradient in held:
            parameter.grad = gradient
        with torch.no_grad():
            for gradient, copy in copies:
                gradient.copy_(copy)
        raise


def _hand_over(
    held: Sequence[tuple[Tensor, Tensor | None]],
    hooked: Sequence[tuple[Tensor, Hooks, Hooks]],
    sums: Sums,
    copies: list[tuple[Tensor, Tensor]],
) -> None:
    for parameter, before, _ in hooked:
        _changed_by(before, parameter, sums)
    arrived = {parameter for parameter, _, _ in hooked if parameter.grad is not None or id(parameter) in sums.totals}
    _add(held, sums, copies)
    for parameter, _, after in hooked:
        for hook in list(after.values()) if parameter in arrived else ():
            hook(parameter)


@contextmanager
def once(has_begun: Callable[[], bool]) -> Iterator[None]:
    """Marks an error that comes when code of the user's has begun that cannot be taken back: nobody tries again."""
    try:
        yield
    except BaseException as error:
        if has_begun():
            error.__dict__[ONCE] = True
        raise


def is_to_be_tried_again(error: BaseException) -> bool:
    return not error.__dict__.get(ONCE, False)


def hooks_of(parameter: Tensor) -> tuple[Hooks, Hooks]:
    """The hooks that may change a parameter's gradient, and those that run once it has been added to `.grad`."""
    return parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}


@contextmanager
def _set_aside(hooked: Sequence[tuple[Tensor, Hooks, Hooks]]) -> Iterator[None]:
    """Takes the hooks off and puts the same dicts back, so that the handles that remove them go on working."""

    def place(parameter: Any, before: Hooks, after: Hooks) -> None:
        parameter._backward_hooks, parameter._post_accumulate_grad_hooks = before, after

    for parameter, _, _ in hooked:
        place(parameter, OrderedDict(), OrderedDict())
    try:
        yield
    finally:
        for parameter, before, after in hooked:
            place(parameter, before, after)


@torch.no_grad()
def _changed_by(hooks: Hooks, parameter: Tensor, sums: Sums) -> None:
    gradient = sums.taken(parameter) if hooks else None
    if gradient is None:
        return
    parameter.grad = rounded(gradient, parameter)
    for hook in list(hooks.values()):
        changed = hook(parameter.grad)
        parameter.grad = parameter.grad if changed is None else changed


@torch.no_grad()
def _add(held: Sequence[tuple[Tensor, Tensor | None]], sums: Sums, copies: list[tuple[Tensor, Tensor]]) -> None:
    """Adds what has arrived to what was held, and notes copies by which all of it can be taken back."""
    if not sums.totals and all(gradient is None for _, gradient in held):
        return  # all of it has arrived where it belongs
    for parameter, gradient in held:
        total = sums.taken(parameter)
        if total is not None:
            parameter.grad = rounded(total if gradient is None else plus(gradient, total), parameter)
        else:
            parameter.grad = gradient
    for parameter, gradient in held:
        total = parameter.grad
        if gradient is None or total is None or total is gradient:
            continue
        if gradient.layout == total.layout == torch.strided and gradient.dtype == total.dtype:
            copies.append((gradient, gradient.clone()))
            gradient.copy_(total)
            copies[-1] = gradient, total.copy_(copies[-1][1])  # no more than one copy takes memory of its own
            parameter.grad = gradient


class Border:
    """The graph in front of the model is cut off and run backward once, after all micro-batches.

    A context encoder that runs once and feeds every micro-batch would be freed by the first backward. Tensors of the
    batch that require a gradient are therefore replaced by leaves; their gradients gather over the window.
    """

    def __init__(self, items: list[tuple[Any, Any]], cut_off: bool = True) -> None:
        self.leaves: dict[int, tuple[Tensor, Tensor]] = {}
        self.sums = Sums()
        self.used_up = False  # whether the graph in front has begun to run backward
        self.items = items
        if cut_off and any(carries_a_graph(part) for item in items for part in item):
            self.items = [
                (map_leaves(self._leaf, inputs), map_leaves(self._leaf, targets)) for inputs, targets in items
            ]

    def _leaf(self, tensor: Any) -> Any:
        if isinstance(tensor, PackedSequence):
            return tensor._replace(data=self._leaf(tensor.data))
        if not isinstance(tensor, Tensor) or not tensor.requires_grad:
            return tensor
        if id(tensor) not in self.leaves:
            leaf = tensor.detach().requires_grad_()
            self.leaves[id(tensor)] = (tensor, leaf)
            if is_low(leaf):
                self.sums.follow(leaf)
        return self.leaves[id(tensor)][1]

    def trained(self) -> list[Tensor]:
        """The inputs that are leaves themselves and get a `.grad`."""
        return [tensor for tensor, _ in self.leaves.values() if tensor.is_leaf]

    def backward(self) -> None:
        """Hands on what the leaves gathered; a graph in front of the model is run backward, which uses it up."""
        arrived = [(tensor, self.sums.taken(leaf)) for tensor, leaf in self.leaves.values()]
        pairs = [(tensor, rounded(gradient, tensor)) for tensor, gradient in arrived if gradient is not None]
        for tensor, gradient in pairs:
            if tensor.is_leaf:
                tensor.grad = gradient if tensor.grad is None else tensor.grad + gradient
        pairs = [pair for pair in pairs if not pair[0].is_leaf]
        if pairs:
            self.used_up = True
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


def carries_a_graph(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return tree.requires_grad
    return any(tensor.requires_grad for tensor in tensors_of(tree))


def detached(tree: Any) -> Any:
    """The same structure with every tensor cut off its graph."""
    return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)
