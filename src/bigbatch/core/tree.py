"""Opens any structure that holds tensors and builds it again: node → (names, values) → a node of the same type."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import SUPPORTED_NODES

from bigbatch.errors import SplitError

MISSING = object()
LEAVES = (Tensor, str, bytes, int, float, type(None), PackedSequence, torch.Size, nn.Module, type)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A structure taken apart: `names` (".angle", "[0]", "['two words']"), `values`, and `build(new_values)`."""

    names: list[str]
    values: list[Any]
    build: Callable[[Sequence[Any]], Any]


def opened(node: Any) -> Opened | None:
    """Takes a structure apart by one level; None says that `node` is a leaf.

    Structures are Mappings, named tuples, lists, tuples, deques, classes registered in `torch.utils._pytree` and
    dataclasses. Everything else is a leaf, a PackedSequence too.

    >>> opened({"ids": 1, "two words": 2}).names
    ['.ids', "['two words']"]
    """
    if isinstance(node, LEAVES):
        return None
    if isinstance(node, Mapping):
        return Opened([name_of(key) for key in node], list(node.values()), lambda new: build_mapping(node, new))
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return Opened([f".{name}" for name in node._fields], list(node), type(node)._make)  # type: ignore[attr-defined]
    if isinstance(node, list | tuple | deque):
        return Opened([f"[{i}]" for i in range(len(node))], list(node), lambda new: build_sequence(node, new))
    if type(node) in SUPPORTED_NODES:
        return open_registered(node)
    return open_dataclass(node) if dataclasses.is_dataclass(node) else None


def children(node: Any) -> list[tuple[str, Any]] | None:
    """The named parts of a structure; None for a leaf.

    >>> children([3, 4])
    [('[0]', 3), ('[1]', 4)]
    """
    parts = opened(node)
    return None if parts is None else list(zip(parts.names, parts.values, strict=True))


def rebuild(node: Any, new_children: Sequence[Any]) -> Any:
    """A node of the same type as `node` with other parts, in the order of `children(node)`.

    >>> from collections import OrderedDict
    >>> rebuild(OrderedDict(a=1, b=2), [3, 4])
    OrderedDict([('a', 3), ('b', 4)])
    """
    parts = opened(node)
    return node if parts is None else parts.build(new_children)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The tree with `function` applied to every leaf; the same object where no leaf changed.

    >>> map_leaves(lambda leaf: leaf + 1, {"a": [1, 2], "b": 3})
    {'a': [2, 3], 'b': 4}
    """
    parts = opened(tree)
    return function(tree) if parts is None else assembled(tree, parts, [map_leaves(function, v) for v in parts.values])


def leaves(tree: Any) -> Iterator[Any]:
    """All leaves, from left to right.

    >>> list(leaves({"a": [1, 2], "b": 3}))
    [1, 2, 3]
    """
    parts = opened(tree)
    if parts is None:
        yield tree
        return
    for value in parts.values:
        yield from leaves(value)


def tensors_of(tree: Any) -> Iterator[Tensor]:
    """The tensors of a batch, from left to right; of a PackedSequence its data.

    >>> [tensor.tolist() for tensor in tensors_of({"ids": torch.tensor([1, 2]), "name": "a"})]
    [[1, 2]]
    """
    for leaf in leaves(tree):
        tensor = leaf.data if isinstance(leaf, PackedSequence) else leaf
        if isinstance(tensor, Tensor):
            yield tensor


def assembled(node: Any, parts: Opened, new: Sequence[Any]) -> Any:
    """`node` itself if its parts are unchanged, otherwise a new node."""
    unchanged = all(value is old for value, old in zip(new, parts.values, strict=True))
    return node if unchanged else parts.build(new)


def is_sequence(node: Any) -> bool:
    """Whether a node may be one item a sample as well as one item a field: a list, tuple or deque without names."""
    bare = isinstance(node, list | tuple | deque) and not isinstance(node, torch.Size | PackedSequence)
    return bare and not hasattr(node, "_fields") and not hasattr(type(node), "n_fields")


def name_of(key: Any) -> str:
    return f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r}]"


def key_of(path: str) -> str:
    """The last key of a path, or "" where the last step is a number.

    >>> key_of("inputs.view.angle"), key_of("inputs['two words']"), key_of("targets[0]")
    ('angle', 'two words', '')
    """
    if not path.endswith("]"):
        return path.rpartition(".")[2]
    return path.rpartition("['")[2][:-2] if path.endswith("']") else ""


def build_mapping(node: Mapping[Any, Any], new: Sequence[Any]) -> Any:
    """The same type and keys. A dict's own copy keeps a default factory and extra attributes; another Mapping may
    share its store with its copy, so it is built from a dict, and refused if it does not hold what it was given."""
    items = dict(zip(node, new, strict=True))
    if type(node) is dict:
        return items
    if isinstance(node, dict | UserDict):
        try:
            result: Any = copy.copy(node)
            for key, value in items.items():
                result[key] = value
            return result
        except (TypeError, NotImplementedError):
            pass  # A frozen dict refuses its items one by one and takes them all at once.
    try:
        result = type(node)(items)  # type: ignore[call-arg]
        if list(result) == list(items) and all(result[key] is value for key, value in items.items()):
            return result
    except (TypeError, KeyError):
        pass
    raise unbuildable(node)


def build_sequence(node: Any, new: Sequence[Any]) -> Any:
    kind = type(node)
    if kind is list:
        return list(new)
    if isinstance(node, deque):
        return kind(new, node.maxlen)
    if isinstance(node, list):
        try:
            result = copy.copy(node)
            result[:] = new
            return result
        except (TypeError, NotImplementedError):
            pass  # An immutable list takes its items all at once.
    return kind(new)


def open_registered(node: Any) -> Opened:
    entry = SUPPORTED_NODES[type(node)]
    if entry.flatten_with_keys_fn is None:
        values, context = entry.flatten_fn(node)
        names = [f"[{i}]" for i in range(len(values))]
    else:
        pairs, context = entry.flatten_with_keys_fn(node)
        names, values = [str(key) for key, _ in pairs], [value for _, value in pairs]
    return Opened(names, list(values), lambda new: entry.unflatten_fn(list(new), context))


def open_dataclass(node: Any) -> Opened:
    """Init fields, and whatever else the object holds that building it from its init fields does not bring back."""
    fields = dataclasses.fields(node)
    given = [field.name for field in fields if field.init and hasattr(node, field.name)]
    others = [field.name for field in fields if not field.init and hasattr(node, field.name)]
    extras = (name for name in getattr(node, "__dict__", {}) if name not in given and name not in others)
    others += [name for name in extras if not isinstance(getattr(type(node), name, None), cached_property)]
    if others:
        twin = construct(type(node), {name: getattr(node, name) for name in given})
        others = [name for name in others if not same(getattr(twin, name, MISSING), getattr(node, name))]
    names = given + others

    def build(new: Sequence[Any]) -> Any:
        values = dict(zip(names, new, strict=True))
        result = construct(type(node), {name: values[name] for name in given})
        result = copy.copy(node) if result is None else result
        for name, value in values.items():  # A `__post_init__` may change fields a second time; the given value holds.
            if getattr(result, name, MISSING) is not value:
                object.__setattr__(result, name, value)
        return result

    return Opened([f".{name}" for name in names], [getattr(node, name) for name in names], build)


def construct(kind: Any, fields: dict[str, Any]) -> Any:
    """The object, or None where the constructor asks for other arguments than its fields."""
    try:
        return kind(**fields)
    except TypeError:
        return None


def same(left: Any, right: Any) -> bool:
    """Whether two values are equal, tensor by tensor; a doubt counts as no."""
    if left is right:
        return True
    if type(left) is not type(right):
        return False
    try:
        if isinstance(left, Tensor):
            return left.dtype == right.dtype and left.device == right.device and torch.equal(left, right)
        one, two = opened(left), opened(right)
        if one is None or two is None:
            return bool(left == right)
        return one.names == two.names and all(map(same, one.values, two.values))
    except (TypeError, ValueError, RuntimeError):
        return False


def unbuildable(node: Any) -> SplitError:
    kind = type(node).__qualname__
    return SplitError(
        f"a {kind} with other values was to be built",
        f"{kind} cannot be built from a dict of its items",
        "pass a plain dict, or split= a function that cuts the batch",
    )


def storage_of(tensor: Tensor) -> int:
    """The address of the memory that a tensor and all its views lie in."""
    address: int = tensor.untyped_storage()._cdata
    return address
