"""Copies of everything that a proof runs, so that the user's model, loss and optimizer stay as they are.

Objects are deep-copied with one memo, so that what they share stays shared. A function is rebuilt around the copies of
the modules and optimizers that it reaches, by its closure or by names of its own file.
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

from bigbatch.core.tree import map_leaves
from bigbatch.errors import ModelError

Memo = dict[int, Any]
STATEFUL = (nn.Module, torch.optim.Optimizer)


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
        return rebuilt(value, memo) if reaches(value, set()) else value
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
    """The modules, optimizers and functions that a function's code names: in its closure, and in its own file."""
    if function.__module__ is not None and function.__module__.split(".")[0] == "torch":
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield name, cell.cell_contents
    for name in names_of(function.__code__):
        value = function.__globals__.get(name)
        if isinstance(value, STATEFUL) or getattr(value, "__globals__", None) is function.__globals__:
            yield name, value


def names_of(code: types.CodeType) -> set[str]:
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*inner)


def reaches(function: types.FunctionType, seen: set[int]) -> bool:
    """Whether a module or an optimizer can be reached from a function."""
    if id(function) in seen:
        return False
    seen.add(id(function))
    for _, value in reached(function):
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        if isinstance(owner, STATEFUL) or (isinstance(value, types.FunctionType) and reaches(value, seen)):
            return True
    return False


def rebuilt(function: types.FunctionType, memo: Memo) -> types.FunctionType:
    """The function around copies; it is remembered before it is filled, as it may name itself."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    names = memo.setdefault(id(function.__globals__), dict(function.__globals__))
    new = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, cells)
    new.__kwdefaults__, new.__module__ = function.__kwdefaults__, function.__module__
    memo[id(function)] = new
    free = function.__code__.co_freevars
    for name, value in reached(function):
        stateful = isinstance(value, (*STATEFUL, types.FunctionType, types.MethodType))
        twin = copied(value, memo) if stateful else value
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
