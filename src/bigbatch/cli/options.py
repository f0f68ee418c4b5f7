"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="digits, stdlib-lm, digit-pairs, a file (mine.py) or a module.")
]
BatchSize = Annotated[int | None, typer.Option(help="Samples for one update.")]
MicroBatchSize = Annotated[int | None, typer.Option(help="The most samples that are run at once.")]
Seed = Annotated[int | None, typer.Option(help="Where all random numbers start.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]
