"""Which weights the micro-batches' gradients were given, and which they should have been given."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.core.compare import explain_by_weights, relative_difference
from bigbatch.verifier.case import Gradients
from bigbatch.verifier.runs import Run
from bigbatch.verifier.verdict import Cause

CLOSE = 1e-3
DO = "weigh each micro-batch by its share of the batch's samples or target tokens, as Accumulator does"


@dataclass(frozen=True)
class Weighing:
    """Weights of the same micro-batch gradients, and what they leave unexplained (relative).

    Attributes:
        right, rest: for the whole batch's gradient.
        used, left: for the gradient that was found.
        apart: by how much the two gradients differ.
    """

    right: Sequence[float]
    rest: float
    used: Sequence[float]
    left: float
    apart: float


def weighing(whole: Run, ours: Run, singles: Sequence[Run], tolerance: float) -> Weighing | None:
    """Both weighings by least squares; None where they cannot be told.

    With few parameters, least squares explains anything. There, weights that people use are tried instead: shares of
    the samples for the whole batch, an equal part or one for what was found.
    """
    parts = [run.gradients for run in singles]
    if not parts:
        return None
    apart = relative_difference(ours.gradients, whole.gradients)
    entries = sum(int((wide(g) != 0).sum()) for g in whole.gradients.values() if isinstance(g, Tensor))
    if entries >= 4 * len(parts):
        right, rest = explain_by_weights(whole.gradients, parts)
        return Weighing(right, rest, *explain_by_weights(ours.gradients, parts), apart)
    total = sum(last - first for first, last in ours.spans)
    shares = [(last - first) / total for first, last in ours.spans]
    rest = relative_difference(summed(parts, shares), whole.gradients)
    for used in ([1 / len(parts)] * len(parts), [1.0] * len(parts)):
        left = relative_difference(summed(parts, used), ours.gradients)
        if max(rest, left) <= tolerance:
            return Weighing(shares, rest, used, left, apart)
    return None


def summed(parts: Sequence[Gradients], weights: Sequence[float]) -> Gradients:
    """The gradients of micro-batches, weighed and added up."""
    total: Gradients = {}
    for part, weight in zip(parts, weights, strict=True):
        for name, gradient in part.items():
            if gradient is not None:
                held = total.get(name)
                total[name] = gradient * weight if held is None else held + gradient * weight
    return total


def shares_cause(found: Weighing, tolerance: float) -> Cause:
    """What is wrong with the weights, given that the right ones explain the whole batch's gradient."""
    used, right = found.used, found.right
    largest = max(map(abs, right))
    moved = max(abs(u - r) for u, r in zip(used, right, strict=True)) / largest
    if found.left > tolerance or moved < found.apart / 10:
        return Cause(
            "gradient changed",
            "the micro-batches' gradients can be weighed so that they give the whole batch's, but what was found is no "
            "weighing of them",
            "look for hooks, clipping inside of the batch, a further backward or another loss",
        )
    told = f"weights used {listed(used)}, right {listed(right)}"
    lost = [k for k in range(len(used)) if abs(used[k]) <= CLOSE * largest < abs(right[k])]
    if lost:
        numbers = ", ".join(str(k + 1) for k in lost)
        do = "look for a zero_grad or a step between the backwards, or a micro-batch that is skipped"
        return Cause("lost micro-batches", f"micro-batch {numbers} of {len(used)} did not count ({told})", do)
    ratios = [u / r if r else math.inf for u, r in zip(used, right, strict=True)]
    if max(ratios) - min(ratios) <= 0.1 * abs(ratios[0] - 1.0):
        scale = f"the gradient is {ratios[0]:.4g} times the whole batch's ({told})"
        return Cause("wrong scale", scale, "divide by the whole batch's denominator, and only once")
    even = max(used) - min(used) <= CLOSE * abs(used[0])
    if even and abs(sum(used) - sum(right)) > CLOSE * abs(sum(right)):
        scale = f"the weights add up to {sum(used):.4g}, the whole batch's to {sum(right):.4g} ({told})"
        return Cause("wrong scale", scale, f"divide by the whole batch's denominator, and only once; {DO}")
    if even:
        return Cause("mean of means", f"all micro-batches weigh the same, whatever they hold ({told})", DO)
    return Cause("wrong shares", f"the same micro-batches with other weights give the whole gradient ({told})", DO)


def scaled_parameters(whole: Gradients, ours: Gradients, tolerance: float) -> Cause | None:
    """Some parameters have a multiple of their gradient, all others the right one; None where that is not so.

    A parameter of a single number is a multiple of anything, so it must be a whole one.

    >>> import torch
    >>> right = {"weight": torch.tensor([1.0, 2.0]), "temperature": torch.tensor([0.5])}
    >>> scaled_parameters(right, {**right, "temperature": torch.tensor([1.5])}, 1e-6).found
    'temperature has 3 times its gradient; all others are right'
    """
    told, equal = [], 0
    for name, right in whole.items():
        found = ours.get(name)
        if right is None or found is None:
            if right is not found:
                return None
            continue
        if relative_difference({name: found}, {name: right}) <= tolerance:
            equal += 1
            continue
        a, b = wide(found), wide(right)
        factor = float((a * b).sum() / (b * b).sum()) if bool(b.any()) else 0.0
        whole_number = factor > 0 and abs(max(factor, 1 / factor) % 1.0 - 0.5) > 0.5 - tolerance
        if relative_difference({name: a}, {name: factor * b}) > tolerance or (b.numel() == 1 and not whole_number):
            return None
        told.append(f"{name} has {factor:.7g} times its gradient")
    if not told or not equal:
        return None
    shown = "; ".join(told[:3]) + (f"; {len(told) - 3} more are scaled" if len(told) > 3 else "")
    do = "look for a backward that reaches them once for every micro-batch, or a hook that scales them"
    return Cause("wrong scale", f"{shown}; all others are right", do)


def wide(gradient: Tensor) -> Tensor:
    dense = gradient.detach().to_dense() if gradient.layout != torch.strided else gradient.detach()
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    return real.to(torch.float64)


def listed(weights: Sequence[float]) -> str:
    """Weights in a sentence.

    >>> listed([1 / 3] * 3)
    '[0.3333, 0.3333, 0.3333]'
    """
    shown = ", ".join(f"{weight:.4g}" for weight in weights[:6])
    return f"[{shown}, ...]" if len(weights) > 6 else f"[{shown}]"
