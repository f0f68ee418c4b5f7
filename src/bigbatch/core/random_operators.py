"""What random operators are, and which part of a random result belongs to which samples; serves `rng.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


@cache
def may_draw(func: Any) -> bool:
    """True for operators tagged as seeded; some (binomial, Dirichlet) lack the tag, but they do take a generator."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name.endswith("_backward"):  # a backward uses the numbers that its forward drew
        return False
    return torch.Tag.nondeterministic_seeded in func.tags or any("Generator" in str(a.type) for a in schema.arguments)


def bound_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Every argument by its name, those left at their default included."""
    values = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    values.update({a.name: value for a, value in zip(func._schema.arguments, args, strict=False)})
    return {**values, **kwargs}


def draws_now(bound: Mapping[str, Any]) -> bool:
    """False where the arguments switch the randomness off: evaluation, or attention and recurrence without dropout."""
    off = bound.get("training") is False or bound.get("train") is False
    return not (off or bound.get("dropout_p") == 0.0 or bound.get("dropout") == 0.0)


def written_by(func: Any, bound: Mapping[str, Any], out: Any) -> list[Tensor]:
    """The tensors that the operator filled: its results first, then the arguments it wrote to."""
    names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    found: list[Tensor] = []
    for leaf in tree_leaves([out, [bound[name] for name in names]]):
        if isinstance(leaf, Tensor) and not any(leaf is known for known in found):
            found.append(leaf)
    return found


def plain_arguments(bound: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that must not depend on the micro-batch: numbers and flags, but neither tensors nor sizes."""
    skipped = (Tensor, list, tuple, torch.Generator)
    return {name: value for name, value in bound.items() if not isinstance(value, skipped)}


def only_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The only axis in which two shapes differ; None where there is not exactly one."""
    differing = [axis for axis, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
    return differing[0] if len(one) == len(other) and len(differing) == 1 else None


def share(whole: Tensor, shape: Sequence[int], samples: int, first: int, last: int) -> Tensor | None:
    """The part of `whole` that belongs to samples [first, last) and has `shape`; None where that cannot be told.

    The axis is the only one whose size differs. Its size may be a multiple of `samples`: then the samples are taken to
    be the outer part, as in attention weights [samples * heads, T, T]. Equal shapes mean noise that all samples share.

    >>> import torch
    >>> share(torch.arange(8).view(2, 4), (2, 1), samples=4, first=2, last=3).tolist()
    [[2], [6]]
    """
    if tuple(whole.shape) == tuple(shape):
        return whole
    axis = only_difference(whole.shape, shape)
    if axis is None:
        return None
    rows, rest = divmod(whole.shape[axis], samples)
    if rest or shape[axis] != rows * (last - first):
        return None
    return whole.narrow(axis, rows * first, rows * (last - first))


def _dropped(source: Tensor, mask: Tensor, bound: Mapping[str, Any]) -> Tensor:
    p = float(bound["p"])
    return source * mask * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


def _leaky(source: Tensor, noise: Tensor, bound: Mapping[str, Any]) -> Tensor:
    return source * noise


# Operators that mix noise and input: the noise is their second written tensor, the first is worked out from it anew.
MIXERS: dict[str, Callable[[Tensor, Tensor, Mapping[str, Any]], Tensor]] = {
    "aten::native_dropout": _dropped,
    "aten::rrelu_with_noise": _leaky,
    "aten::rrelu_with_noise_": _leaky,
    "aten::rrelu_with_noise_functional": _leaky,
}


@dataclass(frozen=True)
class Draw:
    """What one random operator drew for the whole batch."""

    name: str
    plain: dict[str, Any]
    results: list[Tensor]


def is_fused(func: Any) -> bool:
    """True for attention and recurrence in one kernel, which neither show their masks nor take others."""
    return "attention" in func._schema.name or "_rnn" in func._schema.name


def no_slices(func: Any, written: Sequence[Tensor]) -> str | None:
    """Why what this operator drew cannot be cut into samples; None where it can."""
    if is_fused(func):
        return "a fused kernel keeps its dropout mask to itself"
    if any(t.is_nested or t.layout != torch.strided for t in written):
        return "its result is not a dense tensor"
    return None


def parts_of(
    draw: Draw | None, name: str, plain: dict[str, Any], targets: list[Tensor], span: tuple[int, int, int]
) -> tuple[list[Tensor], str | None]:
    """What each target must hold, or the reason why that cannot be told."""
    if draw is None:
        return [], "the whole batch drew no more numbers"
    if draw.name != name:
        return [], f"the whole batch drew by {draw.name} here"
    if not draw.results:
        return [], "the whole batch's numbers are not known"
    odd = [key for key in plain if plain[key] != draw.plain.get(key)]
    if odd:
        return [], f"{odd[0]} is {plain[odd[0]]}, for the whole batch it was {draw.plain.get(odd[0])}"
    parts: list[Tensor] = []
    for whole, target in zip(draw.results, targets, strict=True):
        part = None if target.is_nested else share(whole, target.shape, *span)
        if part is None:
            return [], f"shape {tuple(target.shape)} is no part of {tuple(whole.shape)} that belongs to the samples"
        parts.append(part)
    return parts, None
