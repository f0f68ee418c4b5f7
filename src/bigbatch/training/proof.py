"""The closing table: this run's memory and gradient, beside one whole batch and beside the usual loop by hand.

All of it is measured in this run, on its first batch and with its initial weights: memory in the run's own precision,
gradients in float64, where rounding explains nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.compare import worst
from bigbatch.core.move import to_device
from bigbatch.core.rng import Draws, preserved_rng
from bigbatch.core.tree import map_leaves
from bigbatch.core.units import format_bytes
from bigbatch.terms import table
from bigbatch.training.memory import counted_how, free_bytes, peak_bytes_of
from bigbatch.training.ways import (
    Job,
    Way,
    by_bigbatch,
    by_hand,
    copied,
    loss_of,
    named_parameters,
    samples_of,
    whole_batch,
)

Gradients = dict[str, Tensor | None]
Batch = tuple[Any, Any]


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

    def rows(self) -> dict[str, str]:
        """Names and values as a person reads them."""
        whole = self.whole_peak_bytes
        share = f" ({self.run_peak_bytes / whole:.0%} of it)" if whole else ""
        rows = {
            "batch": f"{self.batch} samples",
            "micro-batch": f"{self.micro_batches} of at most {self.micro_batch} samples",
            "peak memory, one whole batch": "not run: too large for this machine" if not whole else format_bytes(whole),
            "peak memory, this run": format_bytes(self.run_peak_bytes) + share,
            "how memory was counted": self.counted,
        }
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
        return dict(vars(self))

    def __str__(self) -> str:
        return table(self.rows())


def percent(share: float) -> str:
    """A share with as many digits as it takes to see it.

    >>> percent(0.125), percent(0.00123), percent(2e-9)
    ('12.5 %', '0.123 %', '2e-07 %')
    """
    return f"{100 * share:.3g} %"


def prove(job: Job, first: Batch, last: Batch, micro_batch_size: int, autocast: torch.dtype | None) -> Proof:
    """Measures both ways on copies of the job; weights, gradients and random numbers stay as they were.

    Args:
        job: model and loss, on the device of the run.
        first: a batch of full size, as `(inputs, targets)`.
        last: the last batch of an epoch.
        micro_batch_size: the most samples that the run holds at once.
        autocast: the precision in which memory is counted; None leaves it to the weights.
    """
    samples = samples_of(first)
    micro_batches = math.ceil(samples / micro_batch_size)
    with preserved_rng(), torch.autocast(job.device.type, autocast, enabled=autocast is not None):
        own = copied(job)
        _, run_peak = peak_bytes_of(lambda: by_bigbatch(own, micro_batch_size)(*first), job.device)
    proof = Proof(samples, math.ceil(samples / micro_batches), micro_batches, counted_how(job.device), run_peak)
    # Float64 takes twice the bytes; a batch that might drive the machine to its knees is not tried.
    if 2 * run_peak * micro_batches > free_bytes(job.device):
        return proof
    with preserved_rng(), torch.autocast(job.device.type, autocast, enabled=autocast is not None):
        own = copied(job)
        _, whole_peak = peak_bytes_of(lambda: whole_batch(own)(*first), job.device)
    found = _differences(job, first, last, micro_batch_size)
    return Proof(**{**vars(proof), "whole_peak_bytes": whole_peak, **found})


def _differences(job: Job, first: Batch, last: Batch, micro_batch_size: int) -> dict[str, Any]:
    """The differences of a `Proof`, in float64 (on the CPU where the device has none)."""
    wide = copied(job, torch.float64, torch.device("cpu") if job.device.type == "mps" else job.device)
    samples, last_samples = samples_of(first), samples_of(last)
    draws = Draws()
    hand = by_hand(wide, micro_batch_size, math.ceil(samples / micro_batch_size), around=draws.replay)
    batch = widened(first)
    right = whole_gradients(wide, batch, draws)
    ours = by_bigbatch(wide, micro_batch_size, around=draws.replay)
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
