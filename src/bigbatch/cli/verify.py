"""`bigbatch verify RECIPE`: is a recipe's gradient by micro-batches that of the whole batch? On a small real batch."""

from __future__ import annotations

import json

import torch
import typer

from bigbatch.cli.options import BatchSize, Json, MicroBatchSize, RecipeName, Seed, size
from bigbatch.micro_batched import MicroBatched
from bigbatch.recipes import load
from bigbatch.terms import Recipe
from bigbatch.training.settings import Settings, decide
from bigbatch.training.setup import first_and_last
from bigbatch.verifier import Verdict, verify

AUTO = 8  # an automatic size is judged on a batch that is small enough for this one


def command(
    recipe: RecipeName,
    micro_batch_size: MicroBatchSize = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Compare a recipe's gradient with that of one whole batch, in float64. Ends with code 0 if they are equal."""
    asked = {"micro_batch_size": size(micro_batch_size), "batch_size": batch_size, "seed": seed}
    decide({}, asked)
    job = load(recipe, seed)
    settings = decide(job.defaults, asked)
    samples = batch_size or small_batch(settings, len(job.train_data))
    verdict = verdict_of(job, decide(job.defaults, {**asked, "batch_size": samples}))
    typer.echo(json.dumps(verdict.to_dict(), indent=2) if as_json else str(verdict))
    raise typer.Exit(0 if verdict.equal else 1)


def small_batch(settings: Settings, samples: int) -> int:
    """As few samples as make four micro-batches of uneven sizes, where the recipe's batch and its data hold so many.

    >>> small_batch(Settings(batch_size=500, micro_batch_size=64), 1437)
    193
    """
    number = settings.micro_batch_size
    return min(settings.batch_size, 3 * (number if isinstance(number, int) else AUTO) + 1, samples)


def verdict_of(recipe: Recipe, settings: Settings) -> Verdict:
    """The verdict on the first batch of a run, by the door that the recipe takes."""
    recipe.model.train()
    torch.manual_seed(settings.seed)
    (inputs, targets), _ = first_and_last(recipe, settings)
    number = settings.micro_batch_size if isinstance(settings.micro_batch_size, int) else None  # None: one is chosen
    if recipe.activations is not None:
        wrapped = MicroBatched(recipe.model, settings.micro_batch_size, activations=recipe.activations)
        return verify(wrapped, recipe.loss_fn, inputs, targets, micro_batch_size=number)
    return verify(recipe.model, recipe.loss_fn, inputs, targets, micro_batch_size=number, reduction=recipe.reduction)
