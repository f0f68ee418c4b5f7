"""The closing table: this run's memory and gradient, beside one whole batch and beside the usual loop by hand.

All of it is measured in this run, on its first batch and with its initial weights: memory in the run's own precision,
gradients in float64, where rounding explains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.compare import worst
from bigbatch.core.move import to_device
from bigbatch.core.rng import Draws, preserved_rng
from bigbatch.core.tree import map_leaves
from bigbatch.core.units import format_bytes
from bigbatch.terms import table
from bigbatch.training.budget import Budget, budget_of
from bigbatch.training.memory import counted_how, free_bytes, peak_bytes_of
from bigbatch.training.ours import Used, by_bigbatch
from bigbatch.training.ways import (
    Job,
    Way,
    by_hand,
    copied,
    loss_of,
    named_parameters,
    samples_of,
    whole_batch,
)

Gradients = dict[str, Tensor | None]
Batch = tuple[Any, Any]
Memory = int | str | float | None
ROUNDS = 3  # an automatic size is a careful guess, then one of growth, and from the third on rests on two that counted


@dataclass(frozen=True)
class Proof:
    """What was measured; a difference is relative, the largest over all parameters.

    Attributes:
        batch: samples of the batch.
        micro_batch: samples of its largest micro-batch.
        micro_batches: micro-batches of the batch.
        counted: how bytes were counted.
        run_peak_bytes: the most memory held at once by this run's way.
        whole_peak_bytes: the same for one whole batch; None where it would not have fitted, so was not run.
        difference: of this run's gradient from the whole batch's.
        hand_difference: of the usual loop's gradient.
        last_batch: samples of the last batch of the epoch, where it is smaller than the others.
        last_hand_difference: of the usual loop's gradient on it: it goes on to divide by a full batch's pieces.
        unfollowed: random operators whose numbers could not be repeated, so that differences prove nothing.
        automatic: whether the micro-batch size was chosen; the largest of the first choices is the one in the table.
        budget: what it was chosen for, where a budget was stated.
    """

    batch: int
    micro_batch: int
    micro_batches: int
    counted: str
    run_peak_bytes: int
    whole_peak_bytes: int | None = None
    difference: float | None = None
    hand_difference: float | None = None
    last_batch: int | None = None
    last_hand_difference: float | None = None
    unfollowed: tuple[str, ...] = ()
    automatic: bool = False
    budget: Budget | None = None

    def rows(self) -> dict[str, str]:
        """Names and values as a person reads them."""
        whole = self.whole_peak_bytes
        share = f" ({self.run_peak_bytes / whole:.0%} of it)" if whole else ""
        rows = {
            "batch": f"{self.batch} samples",
            "micro-batch": f"{self.micro_batches} of at most {self.micro_batch} samples{self._chosen()}",
            "peak memory, one whole batch": "not run: too large for this machine" if not whole else format_bytes(whole),
            "peak memory, this run": format_bytes(self.run_peak_bytes) + share,
            "how memory was counted": self.counted,
        }
        if self.budget is not None:
            rows["memory budget"] = self.budget.row(self.run_peak_bytes)
        if self.difference is not None and self.hand_difference is not None:
            rows["gradient off by, this run"] = f"{self.difference:.1e} (relative, float64)"
            rows["gradient off by, usual loop by hand"] = percent(self.hand_difference)
        if self.last_hand_difference is not None:
            rows[f"  the same, last batch ({self.last_batch} samples)"] = percent(self.last_hand_difference)
        if self.unfollowed:
            rows["differences are in doubt"] = "; ".join(self.unfollowed)
        return rows

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return {**vars(self), "budget": None if self.budget is None else self.budget.to_dict()}

    def _chosen(self) -> str:
        if self.budget is not None:
            return f", chosen for {format_bytes(self.budget.bytes)}"
        return ", chosen by what fits" if self.automatic else ""

    def __str__(self) -> str:
        return table(self.rows())


def percent(share: float) -> str:
    """A share with as many digits as it takes to see it.

    >>> percent(0.125), percent(0.00123), percent(2e-9)
    ('12.5 %', '0.123 %', '2e-07 %')
    """
    return f"{100 * share:.3g} %"


def prove(
    job: Job,
    first: Batch,
    last: Batch,
    micro_batch_size: int | str,
    autocast: torch.dtype | None,
    memory: Memory = None,
) -> Proof:
    """Measures both ways on copies of the job; weights, gradients and random numbers stay as they were.

    Args:
        job: model and loss, on the device of the run.
        first: a batch of full size, as `(inputs, targets)`.
        last: the last batch of an epoch.
        micro_batch_size: the most samples that the run holds at once, or "auto".
        autocast: the precision in which memory is counted; None leaves it to the weights.
        memory: the budget of "auto".
    """
    with preserved_rng(), torch.autocast(job.device.type, autocast, enabled=autocast is not None):
        used, run_peak = _measured(copied(job), first, micro_batch_size, memory)
    proof = Proof(
        batch=samples_of(first),
        micro_batch=used.micro_batch_size,
        micro_batches=used.micro_batches,
        counted=counted_how(job.device),
        run_peak_bytes=run_peak,
        automatic=micro_batch_size == "auto",
        budget=budget_of(job, memory),
    )
    # Float64 takes twice the bytes; a batch that might drive the machine to its knees is not tried.
    if 2 * run_peak * used.micro_batches > free_bytes(job.device):
        return proof
    with preserved_rng(), torch.autocast(job.device.type, autocast, enabled=autocast is not None):
        own = copied(job)
        _, whole_peak = peak_bytes_of(lambda: whole_batch(own)(*first), job.device)
    by_hand_size = used.micro_batch_size if isinstance(micro_batch_size, str) else micro_batch_size
    double = None if proof.budget is None else 2 * proof.budget.bytes  # numbers in float64 are twice as long
    found = _differences(job, first, last, by_hand_size, (micro_batch_size, double))
    return replace(proof, whole_peak_bytes=whole_peak, **found)


def _measured(own: Job, batch: Batch, micro_batch_size: int | str, memory: Memory) -> tuple[Used, int]:
    """The largest micro-batch and the highest peak of this run's way, over the first rounds of an automatic size."""
    way = by_bigbatch(own, micro_batch_size, memory=memory)
    uses: list[Used] = []
    peaks: list[int] = []
    for _ in range(ROUNDS if micro_batch_size == "auto" else 1):
        for parameter in named_parameters(own).values():
            parameter.grad = None
        peaks.append(peak_bytes_of(lambda: way(*batch), own.device)[1])
        uses.append(way.used())
    return max(uses, key=lambda used: used.micro_batch_size), max(peaks)


def _differences(
    job: Job, first: Batch, last: Batch, by_hand_size: int, our_size: tuple[int | str, Memory]
) -> dict[str, Any]:
    """The differences of a `Proof`, in float64 (on the CPU where the device has none)."""
    wide = copied(job, torch.float64, torch.device("cpu") if job.device.type == "mps" else job.device)
    samples, last_samples = samples_of(first), samples_of(last)
    draws = Draws()
    hand = by_hand(wide, by_hand_size, math.ceil(samples / by_hand_size), around=draws.replay)
    batch = widened(first)
    right = whole_gradients(wide, batch, draws)
    ours = by_bigbatch(wide, our_size[0], around=draws.replay, memory=our_size[1])
    found = {
        "difference": off(wide, ours, batch, right),
        "hand_difference": off(wide, hand, batch, right),
    }
    unfollowed = draws.unfollowed
    if last_samples < samples:
        batch = widened(last)
        right = whole_gradients(wide, batch, draws)
        found |= {"last_batch": last_samples, "last_hand_difference": off(wide, hand, batch, right)}
    return {**found, "unfollowed": tuple(dict.fromkeys([*unfollowed, *draws.unfollowed]))}


def off(job: Job, way: Way, batch: Batch, right: Gradients) -> float:
    """The largest relative difference of a way's gradients, over all parameters."""
    return worst(gradients_of(job, lambda: way(*batch)), right)[1]


def whole_gradients(job: Job, batch: Batch, draws: Draws) -> Gradients:
    """The gradients of the whole batch; the random numbers of its forward are recorded."""
    inputs, targets = to_device(batch, job.device)

    def run() -> None:
        with draws.record(samples_of(inputs)):
            loss = loss_of(job, inputs, targets)
        loss.backward()  # type: ignore[no-untyped-call]

    return gradients_of(job, run)


def gradients_of(job: Job, work: Callable[[], Any]) -> Gradients:
    """What some work adds to the gradients of model and loss."""
    parameters = named_parameters(job)
    for parameter in parameters.values():
        parameter.grad = None
    work()
    return {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()}


def widened(batch: Batch) -> Batch:
    """The batch with its floating-point tensors in float64."""

    def wide(leaf: Any) -> Any:
        return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    inputs, targets = map_leaves(wide, batch)
    return inputs, targets
