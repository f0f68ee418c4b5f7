"""Two ways to get one batch's gradient by plain PyTorch: at once, and as loops by hand usually do it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core import models
from bigbatch.core.move import to_device
from bigbatch.core.tree import map_leaves
from bigbatch.terms import Recipe

Way = Callable[[Any, Any], Tensor]
Around = Callable[[int, int], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Job:
    """A model and a loss of one's own, on one device, and how their loss adds up."""

    model: nn.Module
    loss_fn: Callable[..., Tensor] | None
    reduction: Any
    activations: str | None
    device: torch.device


def job_of(recipe: Recipe, device: torch.device) -> Job:
    """The recipe's own model and loss, moved to the device."""
    if isinstance(recipe.loss_fn, nn.Module):
        recipe.loss_fn.to(device)
    return Job(recipe.model.to(device), recipe.loss_fn, recipe.reduction, recipe.activations, device)


def copied(job: Job, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Job:
    """The same job with copies of model and loss, without gradients; in another dtype, elsewhere, where asked."""
    model, loss_fn = copy.deepcopy((job.model, job.loss_fn))
    device = device or job.device
    for module in (model, loss_fn):
        if isinstance(module, nn.Module):
            module.to(device=device, dtype=dtype).zero_grad()
    return replace(job, model=model, loss_fn=loss_fn, device=device)


def named_parameters(job: Job) -> dict[str, nn.Parameter]:
    """The parameters of the model and, where the loss is a module, of the loss; each once."""
    found = dict(job.model.named_parameters())
    known = set(map(id, found.values()))
    if isinstance(job.loss_fn, nn.Module):
        found |= {f"loss_fn.{name}": p for name, p in job.loss_fn.named_parameters() if id(p) not in known}
    return found


def loss_of(job: Job, inputs: Any, targets: Any) -> Tensor:
    """The loss of these samples alone."""
    extra = (job.reduction(inputs, targets),) if callable(job.reduction) and job.activations is None else ()
    outputs = models.call(job.model, inputs)
    if job.loss_fn is not None:
        return job.loss_fn(outputs, targets, *extra)
    loss: Tensor = outputs if isinstance(outputs, Tensor) else outputs["loss"]
    return loss


def whole_batch(job: Job) -> Way:
    """One forward and backward over the whole batch: the definition of right."""

    def run(inputs: Any, targets: Any) -> Tensor:
        loss = loss_of(job, to_device(inputs, job.device), to_device(targets, job.device))
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return run


def by_hand(job: Job, micro_batch_size: int, accum_steps: int, around: Around | None = None) -> Way:
    """The usual loop: cut off pieces of one size, divide each piece's loss by the number of pieces, add up.

    Args:
        job: what is trained.
        micro_batch_size: samples of each piece but the last, which holds what is left.
        accum_steps: what each loss is divided by.
        around: entered around the piece that goes from one sample to another, to hand out its random numbers.
    """

    def run(inputs: Any, targets: Any) -> Tensor:
        total = torch.zeros((), device=job.device)
        for first, last in cuts(samples_of(inputs), micro_batch_size):
            piece = to_device(rows((inputs, targets), first, last), job.device)
            with around(first, last) if around is not None else nullcontext():
                loss = loss_of(job, *piece) / accum_steps
            loss.backward()  # type: ignore[no-untyped-call]
            total = total + loss.detach()
        return total

    return run


def samples_of(batch: Any) -> int:
    """Rows of the first tensor in a batch.

    >>> samples_of({"ids": torch.zeros(3, 2), "scale": 0.5})
    3
    """
    sizes: list[int] = []
    map_leaves(lambda leaf: sizes.append(len(leaf)) if isinstance(leaf, Tensor) and leaf.dim() else None, batch)
    return sizes[0] if sizes else 0


def cuts(samples: int, micro_batch_size: int) -> Iterator[tuple[int, int]]:
    """Where pieces begin and end that are cut off one after the other, as `torch.split` does.

    >>> list(cuts(10, 4))
    [(0, 4), (4, 8), (8, 10)]
    """
    for first in range(0, samples, micro_batch_size):
        yield first, min(first + micro_batch_size, samples)


def rows(batch: Any, first: int, last: int) -> Any:
    """These samples of a batch whose tensors hold one row a sample; what has no rows is shared."""
    samples = samples_of(batch)

    def cut(leaf: Any) -> Any:
        return leaf[first:last] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples else leaf

    return map_leaves(cut, batch)
