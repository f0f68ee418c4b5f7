"""What a run does: the recipe's defaults, overridden by what was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigbatch.errors import OptionError
from bigbatch.fit.budget import budget_bytes

PRECISIONS = ("fp32", "bf16", "fp16")


@dataclass(frozen=True)
class Settings:
    """All that a run can be told.

    Attributes:
        batch_size: samples for one update; the last batch of an epoch may hold fewer.
        micro_batch_size: the most samples that are run at once, or "auto".
        memory: the budget of "auto", as in `Accumulator`; None where none was stated.
        epochs: passes over the training data.
        lr: the learning rate that the recipe's optimizer starts from.
        precision: "fp32", or autocast to "bf16" or "fp16" (the latter with a scaled loss, on a GPU).
        seed: where all random numbers of the run start.
        max_steps: updates after which the run ends; None leaves it to `epochs`.
        cpu: leave the accelerator alone.
        proof: compare with the whole batch before training, for the closing table.
    """

    batch_size: int = 32
    micro_batch_size: int | str = 8
    epochs: int = 1
    lr: float = 1e-3
    precision: str = "fp32"
    seed: int = 0
    max_steps: int | None = None
    cpu: bool = False
    proof: bool = True
    memory: int | str | float | None = None

    def updates(self, samples: int) -> int:
        """Updates of the whole run over a training set of so many samples.

        >>> Settings(batch_size=4, epochs=2).updates(10), Settings(batch_size=4, epochs=2, max_steps=5).updates(10)
        (6, 5)
        """
        planned = self.epochs * math.ceil(samples / self.batch_size)
        return planned if self.max_steps is None else min(planned, self.max_steps)


def _whole_above(least: int) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


RULES: Mapping[str, tuple[Callable[[Any], bool], str, str]] = {
    "batch_size": (_whole_above(1), "it must be a whole number of at least 1", "pass a number of samples"),
    "micro_batch_size": (
        lambda value: value == "auto" or _whole_above(1)(value),
        'it must be a whole number of at least 1, or "auto"',
        'pass a number of samples, or "auto"',
    ),
    "epochs": (_whole_above(1), "it must be a whole number of at least 1", "pass a number of epochs"),
    "max_steps": (
        lambda value: value is None or _whole_above(1)(value),
        "it must be a whole number of at least 1",
        "pass a number of updates, or leave it out",
    ),
    "lr": (
        lambda value: isinstance(value, int | float) and math.isfinite(value) and value >= 0,
        "it must be a finite number of at least 0",
        "pass a learning rate such as 1e-3",
    ),
    "precision": (lambda value: value in PRECISIONS, "it is not known", f"pass one of {', '.join(PRECISIONS)}"),
    "seed": (
        lambda value: _whole_above(0)(value) and value < 2**32,
        "it must be a whole number from 0 to 4294967295",
        "pass another seed",
    ),
}


def decide(defaults: Mapping[str, Any], asked: Mapping[str, Any]) -> Settings:
    """The settings of a run; None in `asked` means "as the recipe says".

    A budget makes the micro-batch size automatic, whatever number the recipe says; a number that is asked for puts
    aside the recipe's budget.

    Raises:
        OptionError: a value that cannot be meant, or two that cannot be meant together; they are named.

    >>> decide({"micro_batch_size": 64}, {"memory": "2GiB"}).micro_batch_size
    'auto'
    >>> decide({"batch_size": 500, "lr": 0.1}, {"batch_size": None, "lr": 0.2}).lr
    0.2
    >>> decide({}, {"batch_size": 0})
    Traceback (most recent call last):
    bigbatch.errors.OptionError: batch_size=0 was asked for. Found: it must be a whole number of at least 1. Do: ...
    """
    asked = {name: value for name, value in asked.items() if value is not None}
    values = {**defaults, **asked}
    for name, (holds, found, do) in RULES.items():
        if name in values and not holds(values[name]):
            raise OptionError(f"{name}={values[name]!r} was asked for", found, do)
    if values.get("memory") is None:
        return Settings(**values)
    budget_bytes(values["memory"])  # refuses what is no amount of memory
    number = asked.get("micro_batch_size", "auto")
    if number != "auto" and "memory" in asked:
        raise OptionError(
            f"memory={asked['memory']!r} was asked for together with micro_batch_size={number}",
            "a budget chooses the micro-batch size, and the number leaves nothing to choose",
            "leave one of them out",
        )
    chosen = {"micro_batch_size": "auto"} if number == "auto" else {"memory": None}
    return Settings(**{**values, **chosen})
