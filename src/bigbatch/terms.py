"""The records that cross the borders of rooms: what a step did, what a proof found, what a job is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def _plain(value: Any) -> Any:
    """A value as JSON knows it; a 0-d tensor becomes its number (this is the only place that waits for a GPU)."""
    if isinstance(value, Tensor):
        return value.item() if value.dim() == 0 else value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def table(rows: Mapping[str, Any]) -> str:
    """Names on the left, values on the right, one row a line."""
    width = max(map(len, rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


@dataclass(frozen=True)
class StepReport:
    """What one call of `Accumulator.backward` did.

    Attributes:
        samples: samples in the batch.
        micro_batches: micro-batches that were run.
        micro_batch_size: samples in the largest of them.
        denominator: what the batch's loss was divided by (samples, target tokens, a sum of class weights);
            a mapping where the loss has several terms, None where the loss was computed once on the whole batch.
        retries: tries that ran out of memory before this one.
        peak_bytes: the device allocator's peak since it was last reset; None where the device counts nothing (CPU).
        seconds: wall time of the call; a GPU may still be working when it returns.

    >>> print(StepReport(256, 8, 32, 256))
    samples           256
    micro_batches     8
    micro_batch_size  32
    denominator       256
    retries           0
    peak_bytes        None
    seconds           0.0
    """

    samples: int
    micro_batches: int
    micro_batch_size: int
    denominator: float | Tensor | Mapping[str, float | Tensor] | None
    retries: int = 0
    peak_bytes: int | None = None
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """The same for machines: numbers only, ready for JSON."""
        return {name: _plain(value) for name, value in vars(self).items()}

    def __str__(self) -> str:
        return table(self.to_dict())


@dataclass(frozen=True)
class Recipe:
    """One training job: everything that `bigbatch train` and `bigbatch verify` need to know.

    Attributes:
        model: the network, with its initial weights.
        loss_fn: `loss_fn(outputs, targets)`, or None where the model returns its own loss.
        train_data: a map-style dataset whose items `collate` joins to `(inputs, targets)`.
        eval_data: the held-out data, of the same form.
        optimizer: makes the optimizer from the parameters and a learning rate.
        scheduler: makes the scheduler from the optimizer and the number of updates in the whole run.
        metrics: `metrics(model, eval_data) -> {name: value}`, run on the held-out data after every epoch.
        defaults: what the command line can override: batch_size, micro_batch_size, epochs, lr, precision, seed.
        collate: joins a list of items to `(inputs, targets)`; None means PyTorch's own.
        activations: None runs the loss micro-batch by micro-batch (door 1); "recompute", "offload" or "keep"
            joins the outputs and runs the loss once on the whole batch (door 2).
        reduction: as in `Accumulator`; used by door 1 only.
        name: what the job is called in tables and folders.
    """

    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    train_data: Any
    eval_data: Any
    optimizer: Callable[[Any, float], torch.optim.Optimizer]
    metrics: Callable[[nn.Module, Any], Mapping[str, float]]
    scheduler: Callable[[torch.optim.Optimizer, int], torch.optim.lr_scheduler.LRScheduler] | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    collate: Callable[[Sequence[Any]], Any] | None = None
    activations: str | None = None
    reduction: Any = "auto"
    name: str = "recipe"
