"""Copies of everything that a proof runs, so that the user's model, loss and optimizer stay as they are.

Objects are deep-copied with one memo, so that what they share stays shared. A function is rebuilt around the copies of
what runs may change: modules, optimizers, generators and tensors that get a gradient, which it reaches by its closure,
by its defaults or by names of its own file, also in lists, tuples and dicts.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bigbatch.core.held import MANY, names_of, trainable
from bigbatch.core.tree import map_leaves
from bigbatch.errors import ModelError

Memo = dict[int, Any]
STATEFUL = (nn.Module, torch.optim.Optimizer, torch.Generator)


def copied(value: Any, memo: Memo) -> Any:
    """A copy of a model, a loss, a function or an option.

    Raises:
        ModelError: it cannot be copied.

    >>> layer, memo = nn.Linear(2, 1), {}
    >>> step = (lambda layer: lambda rows: layer(rows).mean())(layer)
    >>> copied(step, memo).__closure__[0].cell_contents is copied(layer, memo), copied(layer, memo) is layer
    (True, False)
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.FunctionType):
        return rebuilt(value, memo) if holds(value) else value
    if type(value) in (list, tuple, dict) and holds(value):
        return rebuilt_container(value, memo)
    if isinstance(value, functools.partial):
        keywords = {name: copied(item, memo) for name, item in value.keywords.items()}
        return functools.partial(copied(value.func, memo), *(copied(item, memo) for item in value.args), **keywords)
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise ModelError(
            f"a copy of the {type(value).__name__} was asked for, so that the original stays untouched",
            f"copy.deepcopy failed with {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
            "make it copyable: keep no tensors of a graph, open files, locks or hooks of other objects in it",
        ) from error


def reached(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function's code names in its closure, and what runs may change or is code among its own file's names."""
    if function.__module__ is not None and function.__module__.split(".")[0] == "torch":
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell.cell_contents
    for name in names_of(function.__code__):
        value = function.__globals__.get(name)
        own = getattr(value, "__globals__", None) is function.__globals__
        if own or isinstance(value, (*STATEFUL, Tensor, functools.partial, list, tuple, dict)):
            yield name, value


def holds(value: Any, seen: set[int] | None = None) -> bool:
    """Whether something can be reached that a run may change: a module, an optimizer, a generator, a gradient.

    >>> holds([nn.Linear(2, 1)]), holds({"rate": torch.tensor(0.1)}), holds(torch.tensor(0.1, requires_grad=True))
    (True, False, True)
    """
    seen = set() if seen is None else seen
    if isinstance(value, STATEFUL) or trainable(value):
        return True
    if id(value) in seen:
        return False
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, types.FunctionType):
        inside = [*(item for _, item in reached(value)), *(value.__defaults__ or ())]
        inside += (value.__kwdefaults__ or {}).values()
    elif isinstance(value, types.MethodType):
        inside = [value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    elif type(value) in (list, tuple, dict) and len(value) <= MANY:
        inside = list(value.values() if isinstance(value, dict) else value)
    return any(holds(item, seen) for item in inside)


def twin_of(value: Any, memo: Memo) -> Any:
    """What a copy of a function or a container holds in place of a value: the value itself where no run changes it."""
    changes = id(value) in memo or isinstance(value, types.MethodType) or holds(value)
    return copied(value, memo) if changes else value


def rebuilt_container(value: Any, memo: Memo) -> Any:
    """A list, tuple or dict around copies; a list or dict is remembered before it is filled, as it may hold itself."""
    if isinstance(value, tuple):
        return memo.setdefault(id(value), tuple(twin_of(item, memo) for item in value))
    new: Any = {} if isinstance(value, dict) else []
    memo[id(value)] = new
    if isinstance(value, dict):
        new.update((key, twin_of(item, memo)) for key, item in value.items())
    else:
        new.extend(twin_of(item, memo) for item in value)
    return new


def rebuilt(function: types.FunctionType, memo: Memo) -> types.FunctionType:
    """The function around copies; it is remembered before it is filled, as it may name itself."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    names = memo.setdefault(id(function.__globals__), dict(function.__globals__))
    new = types.FunctionType(function.__code__, names, function.__name__, None, cells)
    memo[id(function)], new.__module__ = new, function.__module__
    new.__defaults__, new.__kwdefaults__ = (
        None if values is None else twin_of(values, memo) for values in (function.__defaults__, function.__kwdefaults__)
    )
    free = function.__code__.co_freevars
    for name, value in reached(function):
        twin = twin_of(value, memo)
        if name in free:
            cells[free.index(name)].cell_contents = twin
        else:
            names[name] = twin
    return new


def widened(tensor: Tensor) -> Tensor:
    """The tensor in float64 (complex128); integers stay."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def batch_copy(tree: Any, double: bool) -> Any:
    """The batch's tensors cloned and cut off any graph, in float64 where asked; all other leaves are shared."""

    def copy_leaf(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf.to(torch.float64) if double and leaf.data.is_floating_point() else leaf
        if not isinstance(leaf, Tensor):
            return leaf
        clone = leaf.detach().clone()
        return widened(clone) if double else clone

    return map_leaves(copy_leaf, tree)
