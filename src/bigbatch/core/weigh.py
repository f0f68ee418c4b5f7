"""Shares that make micro-batches add up to the batch: g = Σ_k w_k g_k.

`g_k` is the gradient of micro-batch k's loss and `w_k` its share in the batch's denominator. Three forms of loss exist:

- "sum":   the loss of a micro-batch is a plain sum S_k; the batch's loss is Σ S_k / Σ c_k, so w_k = 1 / Σ c_k.
- "mean":  the loss of a micro-batch is a mean over c_k things; w_k = c_k / Σ c_k.
- "total": the losses of micro-batches add up as they are; w_k = 1.

This file is the only one that divides a loss. A batch without any target (Σ c_k = 0) is divided by one: its loss is
zero, not 0/0. Only the batch's total is raised so, never a sample's or a micro-batch's count, which would change the
others'.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from numbers import Complex, Integral, Number, Real
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import LossError

Count = int | float | Tensor


def number(count: Any) -> Count:
    """A count as a Python number where that costs no wait for a device, else as a 0-d tensor."""
    if type(count) is int or type(count) is float:
        return count
    if not isinstance(count, Tensor):
        imaginary = isinstance(count, Complex) and not isinstance(count, Real)
        if isinstance(count, bool) or imaginary or not isinstance(count, Number):
            raise LossError(
                "a denominator was asked of the count function",
                f"it returned a {type(count).__name__}",
                "return a number, a 0-d tensor, or a dict of them",
            )
        return int(count) if isinstance(count, Integral) else float(count)  # type: ignore[arg-type]  # of NumPy's
    if count.numel() != 1:
        raise LossError(
            "a denominator was asked of the count function",
            f"it returned a tensor of shape {tuple(count.shape)}",
            "return one number for the micro-batch, such as (targets != -100).sum()",
        )
    if count.device.type == "cpu":
        value: int | float = count.item()
        return value
    there: Tensor = count.detach().reshape(())
    return there if there.dtype.is_floating_point else there.double()


def divisor(counts: Sequence[Count]) -> Count:
    """The batch's denominator: the counts of all micro-batches together, or one where they are all zero.

    Raises:
        LossError: the total is negative or not finite; one that lies on another device is not waited for.

    >>> divisor([3, 0, 5]), divisor([0, 0])
    (8, 1)
    """
    total = sum(counts)
    if isinstance(total, Tensor):
        return torch.where(total == 0, torch.ones_like(total), total)
    if not isfinite(total) or total < 0:
        raise LossError(
            "a denominator was asked for",
            f"the counts of {len(counts)} micro-batches add up to {total}",
            "count something that is finite and not negative, such as (targets != -100).sum()",
        )
    return total if total != 0 else 1


def divisors(counts: Sequence[Mapping[str, Any]]) -> dict[str, Count]:
    """The denominators of a loss of several terms, each over the whole batch.

    >>> divisors([{"tokens": 12, "samples": 2}, {"tokens": 0, "samples": 2}])
    {'tokens': 12, 'samples': 4}
    """
    terms = list(counts[0])
    for found in counts:
        if list(found) != terms:
            raise LossError(
                "the count function was asked for the denominators of every micro-batch",
                f"it named {terms} for one micro-batch and {list(found)} for another",
                "return the same names each time, with zero where a term has no target",
            )
    return {term: divisor([number(found[term]) for found in counts]) for term in terms}


def weights(form: str, counts: Sequence[Count]) -> list[Count]:
    """The weights w_k of the micro-batches of one batch, by the form of their loss.

    >>> weights("mean", [4, 4, 2]), weights("sum", [4, 4, 2]), weights("total", [4, 4, 2])
    ([0.4, 0.4, 0.2], [0.1, 0.1, 0.1], [1.0, 1.0, 1.0])
    """
    if form == "total":
        return [1.0] * len(counts)
    total = divisor(counts)
    if form == "sum":
        return [1.0 / total] * len(counts)
    return [count / total for count in counts]
