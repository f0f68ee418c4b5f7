"""What a gradient can reach from a model, a loss and a loop: modules, and tensors beside them; each by its name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CellType, CodeType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

DEPTH, MANY = 6, 1000  # how far is looked behind a name, and in containers of how many items
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
EMPTY = CellType()


@dataclass
class Held:
    """Modules and loose tensors, outermost first, each once.

    Attributes:
        modules: name -> module that is no child of another one; the first has the empty name.
        loose: name -> tensor that gets a gradient, but is no parameter of these modules.
        behind: names in `loose` of tensors that were reached through the graph of a result.

    >>> layer, temperature = nn.Linear(2, 1), torch.tensor(0.1, requires_grad=True)
    >>> def loss_fn(rows):
    ...     return (layer(rows) / temperature).mean()
    >>> list(held({"loss_fn": loss_fn}).loose)
    ['temperature']
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    loose: dict[str, Tensor] = field(default_factory=dict)
    behind: set[str] = field(default_factory=set)

    @property
    def own(self) -> list[Tensor]:
        """The loose tensors themselves, without those that only a result leads to."""
        return [tensor for name, tensor in self.loose.items() if name not in self.behind]

    def trainable(self) -> dict[str, Tensor]:
        """Everything that may get a gradient."""
        return {**parameters_of(self.modules), **self.loose}


def held(sources: Mapping[str, Any]) -> Held:
    """What can be reached from some roots."""
    found, seen = Held(), set[int]()
    loose: dict[str, Tensor] = {}
    for root, source in sources.items():
        for name, value in walk("", source, seen, DEPTH):
            kept: dict[str, Any] = found.modules if isinstance(value, nn.Module) else loose
            first = isinstance(value, nn.Module) and not found.modules
            kept["" if first else unused(name.strip(".") or root, root, kept)] = value
    parameters = parameters_of(found.modules)
    known = {id(parameter) for parameter in parameters.values()}
    for name, tensor in loose.items():
        if id(tensor) not in known:
            name = unused(name, "beside the model", {**parameters, **found.loose})
            found.loose[name] = tensor
            if id(tensor) not in seen:  # no walk came to it by itself
                found.behind.add(name)
    return found


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of a `MicroBatched`, which answers for it in everything; any other module itself."""
    inner = vars(module).get("_wrapped")
    return inner if isinstance(inner, nn.Module) else module


def parameters_of(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    return {
        f"{start}.{name}".strip("."): p for start, module in modules.items() for name, p in module.named_parameters()
    }


def unused(name: str, root: str, taken: Mapping[str, Any]) -> str:
    """A name that is not taken: as it is, after its root, or numbered."""
    names = [name, f"{root}.{name}", *(f"{root}.{name} ({k})" for k in range(2, len(taken) + 3))]
    return next(free for free in names if free not in taken)


def trainable(value: Any) -> bool:
    """Whether a tensor gets a gradient of its own."""
    return isinstance(value, Tensor) and value.requires_grad and value.is_leaf


def walk(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, nn.Module | Tensor]]:
    """The outermost modules and the trainable tensors behind a value; those hidden in a module come after it."""
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        value = unwrapped(value)
        seen.add(id(value))
        yield name, value
        inner = [(f"{name}.{path}".strip("."), module) for path, module in value.named_modules()]
        seen.update(id(module) for _, module in inner)
        for path, module in inner:
            for attribute, hidden in vars(module).items():
                if attribute not in OF_EVERY_MODULE:
                    yield from walk(f"{path}.{attribute}", hidden, seen, depth - 1)
    elif isinstance(value, Tensor):
        yield from ((name, leaf) for leaf in ([value] if trainable(value) else leaves_behind(value)))
    else:
        for part, inside in parts(value):
            variable = inspect.isroutine(value) or isinstance(value, functools.partial)
            yield from walk(part if variable else f"{name}{part}", inside, seen, depth - 1)


def leaves_behind(tensor: Tensor) -> list[Tensor]:
    """The tensors that a result gives gradients to: no copy reaches them, so they are watched."""
    nodes = [] if tensor.grad_fn is None else [tensor.grad_fn]
    seen = set(nodes)
    for node in nodes:  # the list grows while it is read
        new = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(new)
        nodes.extend(new)
    return [node.variable for node in nodes if hasattr(node, "variable")]


def parts(value: Any) -> list[tuple[str, Any]]:
    """What a function, a container or an object of the user's own can reach, and under which name."""
    home = getattr(value, "__module__", None) or type(value).__module__
    if isinstance(value, functools.partial):
        return [
            ("", value.func),
            *((f"argument {i}", item) for i, item in enumerate(value.args)),
            *value.keywords.items(),
        ]
    if isinstance(value, type | ModuleType) or str(home).partition(".")[0] == "torch":
        return []
    if inspect.ismethod(value):
        return [("", value.__self__), ("", value.__func__)]
    if inspect.isfunction(value):
        return named_by(value)
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()] if len(value) <= MANY else []
    if isinstance(value, list | tuple | set | frozenset):
        return [(f"[{i}]", item) for i, item in enumerate(value)] if len(value) <= MANY else []
    return [(f".{key}", item) for key, item in getattr(value, "__dict__", {}).items()]


def named_by(function: Any) -> list[tuple[str, Any]]:
    """The variables that a function's code names, in its closure, among its defaults and in its file."""
    code, cells = function.__code__, function.__closure__ or ()
    held = [(name, cell.cell_contents) for name, cell in zip(code.co_freevars, cells, strict=True) if cell != EMPTY]
    values = function.__defaults__ or ()
    first = code.co_argcount - len(values)
    held += [*zip(code.co_varnames[first:], values, strict=False), *(function.__kwdefaults__ or {}).items()]
    scope = function.__globals__
    return held + [(name, scope[name]) for name in sorted(names_of(code)) if name in scope]


def names_of(code: CodeType) -> set[str]:
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*inner)


def plain_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Tensors that modules keep as plain attributes, neither parameters nor buffers, and without a gradient."""
    return {
        f"{name}.{attribute}".strip("."): value.detach()
        for name, module in modules.items()
        for attribute, value in vars(module).items()
        if isinstance(value, Tensor) and not value.requires_grad and value.layout == torch.strided
    }
