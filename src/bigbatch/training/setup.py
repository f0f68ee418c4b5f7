"""From a recipe and its settings to the parts that Accelerate's loop works with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, default_collate

from bigbatch.errors import ModelError, OptionError, RecipeError
from bigbatch.planner.plan import AUTOCAST
from bigbatch.terms import Recipe
from bigbatch.training.foreseen import foreseen
from bigbatch.training.ours import Ours, by_bigbatch
from bigbatch.training.settings import Settings
from bigbatch.training.ways import Job, named_parameters

MIXED = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}


@dataclass(frozen=True)
class Parts:
    """What the loop works with, after Accelerate has prepared it.

    Attributes:
        accelerator: the `accelerate.Accelerator`.
        job: model and loss.
        way: `way(inputs, targets)` adds the whole batch's gradient and returns its loss; knows how it did that.
        parameters: all that is trained, to be clipped together.
        optimizer: Accelerate's; it knows whether a step was skipped.
        scheduler: Accelerate's, or None.
        loader: yields batches where they lie; micro-batches are moved one by one.
    """

    accelerator: Any
    job: Job
    way: Ours
    parameters: list[nn.Parameter]
    optimizer: Any
    scheduler: Any
    loader: Any


def accelerator_for(settings: Settings, out: Path) -> Any:
    """An Accelerator for one process, which tracks to `<out>/tensorboard`.

    Raises:
        OptionError: the device cannot compute in the precision that was asked for.
        ModelError: there are several processes.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # Accelerate keeps the first run's precision for the whole process; a second run may ask for another.
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        accelerator = Accelerator(
            mixed_precision=MIXED[settings.precision],
            cpu=settings.cpu,
            log_with="tensorboard",
            project_dir=str(out),
        )
    except ValueError as error:
        asked = f"precision={settings.precision!r} was asked for"
        raise OptionError(asked, str(error).rstrip("."), "pass precision fp32") from error
    if settings.precision == "fp16" and accelerator.device.type == "cpu":
        raise OptionError(  # Accelerate would go on in float32 and say nothing
            "precision='fp16' was asked for", "the CPU has no loss scaling for fp16", "pass precision fp32 or bf16"
        )
    if accelerator.num_processes > 1:
        raise ModelError(
            f"training in {accelerator.num_processes} processes was asked for",
            "bigbatch trains in one process so far",
            "start one process",
        )
    return accelerator


def indices(recipe: Recipe, settings: Settings) -> BatchSampler:
    """Which samples make each batch; the same for the same seed, and the smaller last batch is used."""
    order = RandomSampler(recipe.train_data, generator=torch.Generator().manual_seed(settings.seed))
    return BatchSampler(order, settings.batch_size, drop_last=False)


def first_and_last(recipe: Recipe, settings: Settings) -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """The first and the last batch of the first epoch, each as `(inputs, targets)`."""
    batches = list(indices(recipe, settings))
    join = recipe.collate or default_collate
    first, last = (pair(join([recipe.train_data[i] for i in batch])) for batch in (batches[0], batches[-1]))
    return first, last


def pair(batch: Any) -> tuple[Any, Any]:
    """A batch as `(inputs, targets)`.

    Raises:
        RecipeError: it is none.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise RecipeError(
            "A batch was asked for as (inputs, targets)",
            f"a {type(batch).__name__}" + (f" of {len(batch)}" if isinstance(batch, tuple | list) else ""),
            "have the recipe's data and its collate give pairs; targets may be None",
        )
    return batch[0], batch[1]


def prepared(recipe: Recipe, settings: Settings, job: Job, accelerator: Any) -> Parts:
    """Model, optimizer, scheduler and loader in Accelerate's hands.

    Accelerate leaves batches where they lie: the whole batch may not fit beside the model.
    """
    parameters = list(named_parameters(job).values())
    plain = DataLoader(recipe.train_data, batch_sampler=indices(recipe, settings), collate_fn=recipe.collate)
    loader = accelerator.prepare_data_loader(plain, device_placement=False)
    optimizer = recipe.optimizer(parameters, settings.lr)
    updates = settings.updates(len(recipe.train_data))
    scheduler = recipe.scheduler(optimizer, updates) if recipe.scheduler is not None else None
    model, optimizer, scheduler = accelerator.prepare(job.model, optimizer, scheduler)
    own = Job(model, job.loss_fn, job.reduction, job.activations, job.device)
    size, memory = settings.micro_batch_size, settings.memory
    way = by_bigbatch(own, size, accelerator.scaler, accelerator.backward, memory=memory)
    if way.sizer is not None and memory is not None:
        way.sizer.predict = foreseen(job, first_and_last(recipe, settings)[0], AUTOCAST[settings.precision])
    return Parts(accelerator, own, way, parameters, optimizer, scheduler, loader)
