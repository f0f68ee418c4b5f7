"""`bigbatch plan RECIPE`: will a recipe's batch fit a card, what does it cost, and what is to be turned on?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated

import torch
import typer

from bigbatch.cli.options import BatchSize, Json, RecipeName, Seed
from bigbatch.errors import OptionError
from bigbatch.planner import plan
from bigbatch.planner.cards import Card, card
from bigbatch.planner.records import Plan
from bigbatch.recipes import load
from bigbatch.recipes.extras import require
from bigbatch.terms import Recipe
from bigbatch.training.settings import Settings, decide
from bigbatch.training.setup import first_and_last

DOES_NOT_FIT = 2


def command(
    recipe: RecipeName,
    batch_size: BatchSize = None,
    memory: Annotated[
        str | None, typer.Option(help="What the plan has to fit: 8GiB, bytes, or 0.5 for half of the device.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(help='A card to plan for, such as "RTX 4060"; its memory, where --memory says nothing.'),
    ] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    seed: Seed = None,
    out: Annotated[Path | None, typer.Option(help="Draw a picture into this file (.png, .svg or .pdf).")] = None,
    as_json: Json = False,
) -> None:
    """Predict what an update needs, without a GPU. Ends with code 2 if nothing fits."""
    asked = {"batch_size": batch_size, "precision": precision, "seed": seed}
    decide({}, {**asked, "memory": memory})
    found = card(gpu) if gpu is not None else None
    check(out)
    job = load(recipe, seed)
    settings = decide(job.defaults, asked)
    made = plan_of(job, settings, memory_of(memory, found), found)
    if out is not None:
        made.draw(out)
    typer.echo(json.dumps(made.to_dict(), indent=2) if as_json else str(made))
    raise typer.Exit(0 if made.fits else DOES_NOT_FIT)


def check(out: Path | None) -> None:
    """Refuses, before anything is computed, a picture that cannot be written.

    Raises:
        MissingExtra: matplotlib is missing.
        OptionError: the folder is missing, or the name ends otherwise.
    """
    if out is None:
        return
    require("matplotlib")
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise OptionError(f"out={str(out)!r} was asked for", "no picture that can be drawn", "end it with .png")
    if not out.parent.is_dir() or out.is_dir():
        found = f"no folder {str(out.parent)!r}" if not out.parent.is_dir() else "it is a folder"
        raise OptionError(f"out={str(out)!r} was asked for", found, "name a file in a folder that exists")


def memory_of(asked: str | None, found: Card | None) -> int | str:
    """The memory to plan for: what was asked, or the card's; a fraction is one of the card.

    Raises:
        OptionError: neither says.

    >>> memory_of("0.5", Card("RTX 3060", 12)) / 2**30, memory_of("8GiB", None)
    (5.8125, '8GiB')
    """
    if found is not None and asked is None:
        return found.memory_bytes
    if asked is None:
        do = 'pass --memory 8GiB or --gpu "RTX 4060"'
        raise OptionError("A plan was asked for", "neither memory nor gpu says what it has to fit", do)
    if found is not None and re.fullmatch(r"0?\.\d+|1\.0*", asked):
        return round(float(asked) * found.memory_bytes)
    return asked


def plan_of(recipe: Recipe, settings: Settings, memory: int | str | float, found: Card | None) -> Plan:
    """The plan for the first samples of a run, on the card or on what `bigbatch train` would run on."""
    recipe.model.train()
    torch.manual_seed(settings.seed)
    (inputs, targets), _ = first_and_last(recipe, settings)
    on_cuda = found is not None or torch.cuda.is_available()
    return plan(
        recipe.model,
        recipe.loss_fn,
        inputs,
        targets,
        batch_size=settings.batch_size,
        memory=memory,
        optimizer=lambda parameters: recipe.optimizer(parameters, settings.lr),
        precision=settings.precision,
        reduction=recipe.reduction,
        device="cuda" if on_cuda else "cpu",
        card=found.name if found is not None else None if on_cuda else "the CPU",
    )
