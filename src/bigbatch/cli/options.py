"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeName = Annotated[
    str, typer.Argument(metavar="RECIPE", help="digits, stdlib-lm, digit-pairs, a file (mine.py) or a module.")
]
BatchSize = Annotated[int | None, typer.Option(help="Samples for one update.")]
MicroBatchSize = Annotated[str | None, typer.Option(help="The most samples that are run at once, or auto.")]
Memory = Annotated[
    str | None,
    typer.Option(help="Choose the micro-batch size for this budget: 2GiB, bytes, or 0.5 for half of the device."),
]
Seed = Annotated[int | None, typer.Option(help="Where all random numbers start.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON and nothing else.")]


def size(text: str | None) -> int | str | None:
    """A micro-batch size as it was typed; what is no number stays text, which `decide` judges.

    >>> size("64"), size("auto"), size(None)
    (64, 'auto', None)
    """
    try:
        return None if text is None else int(text)
    except ValueError:
        return text
