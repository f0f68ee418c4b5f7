"""The command `bigbatch`: one file a command; errors are said in three phrases, without a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from bigbatch.errors import BigBatchError
from bigbatch.recipes.extras import require


def installed_version() -> str:
    """The version of bigbatch that is installed."""
    try:
        return version("bigbatch")
    except PackageNotFoundError:
        return "(not installed)"


def application() -> Any:
    """The commands, as a `typer.Typer`.

    Raises:
        MissingExtra: typer or rich is missing.
    """
    require("typer", "rich")
    import typer

    from bigbatch.cli import plan, train, verify

    app = typer.Typer(
        name="bigbatch",
        help="The gradient of the big batch, exactly, on the GPU you have.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode=None,  # plain help: the same in a terminal, a pipe and a test
        # A fault in the user's own recipe is shown as Python shows it.
        pretty_exceptions_enable=False,
    )

    def show(asked: bool) -> None:
        if asked:
            typer.echo(f"bigbatch {installed_version()}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", callback=show, is_eager=True, help="Show the version."),
    ) -> None:
        """The gradient of the big batch, exactly, on the GPU you have."""

    app.command("plan")(plan.command)
    app.command("train")(train.command)
    app.command("verify")(verify.command)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; `arguments` are those of the process where None is given.

    A BigBatchError ends it with code 2, after what was asked, found and can be done. Other exceptions pass through:
    they are faults in a user's own file, or ours.
    """
    try:
        application()(None if arguments is None else list(arguments))
    except BigBatchError as error:
        print(f"asked: {error.asked}\nfound: {error.found}\ndo:    {error.do}", file=sys.stderr)
        sys.exit(2)
