"""Every error of bigbatch says what was asked, what was found and what to do."""

from __future__ import annotations


class BigBatchError(Exception):
    """The root of all errors that bigbatch raises on purpose.

    Args:
        asked: what the caller asked for, without the final full stop.
        found: what was found instead.
        do: what the caller can do about it.

    >>> str(BigBatchError("micro_batch_size=0 was asked for", "it must be at least 1", "pass a positive number"))
    'micro_batch_size=0 was asked for. Found: it must be at least 1. Do: pass a positive number.'
    """

    def __init__(self, asked: str, found: str, do: str) -> None:
        super().__init__(f"{asked}. Found: {found}. Do: {do}.")
        self.asked, self.found, self.do = asked, found, do

    def __reduce__(self) -> tuple[type[BigBatchError], tuple[str, str, str]]:
        return type(self), (self.asked, self.found, self.do)


class OptionError(BigBatchError, ValueError):
    """An option has a value that cannot be meant."""


class SplitError(BigBatchError, ValueError):
    """A batch cannot be cut, or a model's outputs cannot be joined, without guessing."""


class LossError(BigBatchError, ValueError):
    """A loss cannot be weighed: its denominator is unknown, or it is no scalar."""


class ModelError(BigBatchError, ValueError):
    """A model cannot be run in micro-batches with the gradient of the whole batch."""


class MicroBatchTooLarge(BigBatchError, RuntimeError):
    """The smallest micro-batch that can be run does not fit into memory."""


class RecipeError(BigBatchError, ValueError):
    """A recipe cannot be found, read or run."""


class MissingExtra(BigBatchError, ImportError):
    """A feature needs an optional dependency that is not installed."""
