"""`bigbatch train RECIPE`: trains a recipe and ends with a table of what was measured meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bigbatch.cli.options import BatchSize, Memory, MicroBatchSize, RecipeName, Seed, size
from bigbatch.recipes import load
from bigbatch.training import check, decide, train
from bigbatch.training.folder import fresh
from bigbatch.training.screen import watched
from bigbatch.training.trial import RECIPE, tried

INTERRUPTED = 130


def command(
    recipe: RecipeName,
    batch_size: BatchSize = None,
    micro_batch_size: MicroBatchSize = None,
    memory: Memory = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training data.")] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate to start from.")] = None,
    precision: Annotated[str | None, typer.Option(help="fp32, bf16 or fp16.")] = None,
    seed: Seed = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many updates.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run's folder, runs/<recipe> if not given; never overwritten.")
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Leave the accelerator alone.")] = False,
    proof: Annotated[bool, typer.Option(help="Compare with one whole batch before training.")] = True,
) -> None:
    """Train a recipe: big batches, micro-batch by micro-batch. What is not given is as the recipe says."""
    asked = {
        "batch_size": batch_size,
        "micro_batch_size": size(micro_batch_size),
        "memory": memory,
        "epochs": epochs,
        "lr": lr,
        "precision": precision,
        "seed": seed,
        "max_steps": max_steps,
        "cpu": cpu,
        "proof": proof,
    }
    decide({}, asked)  # a value that cannot be meant is refused before any data is read
    job = load(recipe, seed)
    settings = decide(job.defaults, asked)
    check(job, settings)
    console = Console()
    with watched(console) as watcher:
        folder = fresh(out if out is not None else Path("runs") / job.name)
        trial = tried(watcher.note) if settings.proof and recipe == RECIPE else None
        result = train(job, settings, folder, watcher, trial)
    typer.echo(f"\n{result}\n\nwritten to {folder}: {', '.join(sorted(item.name for item in folder.iterdir()))}")
    if result.stopped:
        raise typer.Exit(INTERRUPTED)
