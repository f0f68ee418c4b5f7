"""How one loss is weighed: what its denominator counts, and how a micro-batch's loss is got from its outputs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core.loss_table import entry_of, facts_of, name_of
from bigbatch.core.losses import KnownLoss, call_loss, recognise
from bigbatch.core.split import Piece
from bigbatch.core.weigh import Count, divisor, divisors, number, weights
from bigbatch.errors import LossError, OptionError

Denominator = Count | dict[str, Count]
UNKNOWN_LOSS = (
    "bigbatch does not know this loss's denominator, so the loss is computed once on the outputs of the whole batch: "
    "exact, at the price of a second forward. If it is a mean over samples, pass reduction='mean'; if it divides by "
    "something else, pass reduction=count, a function count(inputs, targets) -> number of one micro-batch, and divide "
    "by the third argument: loss_fn(outputs, targets, count). Both save the second forward."
)


def nothing(_: Denominator) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Rule:
    """A loss and its denominator.

    Attributes:
        form: "sum", "mean" or "total" as in `core/weigh.py`; "counted" where the loss divides by the totals itself.
        count: `count(inputs, targets, samples)` of one micro-batch.
        loss: `loss(outputs, targets, totals)` of one micro-batch.
        extra: keyword arguments for the model, made from the totals.
        terms: how many samples the outputs hold, where `count` has to trust that they hold the micro-batch's.
        copies: `copies(outputs, targets)`: to how many terms of the mean broadcasting makes one that was counted.
    """

    form: str
    count: Callable[[Any, Any, int], Any]
    loss: Callable[[Any, Any, Any], Tensor]
    extra: Callable[[Denominator], Mapping[str, Any]] = field(default=nothing)
    terms: Callable[[Any], int] | None = None
    copies: Callable[[Any, Any], int] | None = None

    def for_batch(self) -> Callable[[Any, Any, Any], Tensor]:
        """`of(outputs, targets, totals)`, the loss of one micro-batch, for the micro-batches of one batch."""
        copies, seen = self.copies, 0
        if copies is None:
            return self.loss

        def of(outputs: Any, targets: Any, totals: Any) -> Tensor:
            nonlocal seen
            loss, found = self.loss(outputs, targets, totals), copies(outputs, targets)
            if found and seen and found != seen:
                raise LossError(
                    "a mean over elements was asked for",
                    f"broadcasting makes {seen} elements of the loss from one of the targets in one micro-batch, and "
                    f"{found} in another, so the targets do not tell how many there are",
                    "expand the targets to the shape of the outputs, or wrap the loss in a function of your own",
                )
            seen = found or seen
            return loss

        return of

    def refuse_other_samples(self, outputs: Any, samples: int) -> None:
        """LossError where the outputs hold another number of samples than the micro-batch."""
        if self.terms is not None and self.terms(outputs) != samples:
            raise LossError(
                "a loss that is a mean over samples was asked for",
                f"the model returned {self.terms(outputs)} samples for a micro-batch of {samples}",
                "wrap the loss in a function of your own, which is run once on the whole batch",
            )


class RuleNow:
    """The rule of a loss as it stands at each call: options and hooks may be set on the loss between two batches.

    Calling it costs a few microseconds where nothing was changed. A loss that has become unknown is told of once.
    """

    def __init__(self, model: Any, loss_fn: Callable[..., Tensor] | None, reduction: Any) -> None:
        self._given, self._told = (model, loss_fn, reduction), False
        self._followed = reduction == "auto" and loss_fn is not None  # other rules call the loss as it stands
        self._read()

    def __call__(self) -> Rule | None:
        if self._followed and facts_of(self._given[1]) != self._facts:
            self._read()
        if self._rule is None and self._followed and not self._told:
            self._told = True
            warnings.warn(UNKNOWN_LOSS, stacklevel=3)
        return self._rule

    def _read(self) -> None:
        self._rule = rule_for(*self._given)
        self._facts = facts_of(self._given[1])  # what held when the rule was made


def rule_for(model: Any, loss_fn: Callable[..., Tensor] | None, reduction: Any) -> Rule | None:
    """The rule that `reduction` states, or the one that the loss is known by; None where the loss must be asked."""
    if reduction == "auto":
        known = None if loss_fn is None else recognise(loss_fn)
        return None if known is None else _known(known)
    loss = loss_of if loss_fn is None else functools.partial(_stated, loss_fn)
    if reduction == "mean":
        return Rule("mean", samples, loss)
    if reduction == "sum":
        return Rule("total", samples, loss)
    if not callable(reduction):
        raise OptionError(
            f"reduction={reduction!r} was asked for",
            "it names no way to weigh a loss",
            'pass "auto", "mean", "sum" or a function count(inputs, targets)',
        )
    if loss_fn is None and isinstance(model, nn.Module):
        return None  # the count is stated; whether the model takes the total has to be asked
    if entry_of(loss_fn) is not None:
        raise LossError(
            f"{name_of(loss_fn)} was given as the loss, beside a count function",
            "a loss of torch.nn does not take the count as its third argument",
            "wrap it, lambda outputs, targets, count: loss(outputs, targets) / count, with reduction='sum' in the loss",
        )
    if loss_fn is None:
        return Rule("counted", functools.partial(_counted, reduction), loss_of, lambda totals: {"count": totals})
    return Rule("counted", functools.partial(_counted, reduction), loss_fn)


def refuse_plain_function(model: Any, loss_fn: Any, reduction: Any, modules: Sequence[nn.Module]) -> None:
    """A plain function cannot be asked what its loss is divided by, and shows its modules only if they are found."""
    if isinstance(model, nn.Module) or (loss_fn is not None and modules):
        return
    asked = f"{getattr(model, '__name__', type(model).__name__)} was given as the model"
    if reduction == "auto" and loss_fn is None:
        raise OptionError(
            asked,
            "a plain function that returns the loss, whose denominator nobody stated",
            'pass reduction="mean", "sum" or a function count(inputs, targets)',
        )
    if not modules:
        raise OptionError(asked, "no module behind it", "name the modules that it trains: modules=[...]")


def _known(known: KnownLoss) -> Rule:
    def count(_inputs: Any, targets: Any, samples: int) -> Any:
        return known.count(targets, samples)

    return Rule(known.form, count, known.loss, nothing, known.terms, known.copies)


def _stated(loss_fn: Callable[..., Tensor], outputs: Any, targets: Any, _totals: Any) -> Tensor:
    return call_loss(loss_fn, outputs, targets)


def _counted(count: Callable[[Any, Any], Any], inputs: Any, targets: Any, _samples: int) -> Any:
    return count(inputs, targets)


def samples(_inputs: Any, _targets: Any, samples: int) -> int:
    return samples


def loss_of(output: Any, _targets: Any = None, _totals: Any = None) -> Tensor:
    """The loss that a model returned: the output itself, its `.loss`, or the first of a tuple."""
    loss = output if isinstance(output, Tensor) else getattr(output, "loss", None)
    if loss is None and isinstance(output, tuple | list) and output:
        loss = output[0]
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if not isinstance(loss, Tensor):
        raise LossError(
            "the model's own loss was asked for (loss_fn=None)",
            f"it returned a {type(output).__name__} without a loss",
            "put the targets into `inputs` (as labels=...), or pass a loss_fn",
        )
    return loss


def weigh(
    rule: Rule, pieces: Sequence[Piece], items: Sequence[tuple[Any, Any]], device: torch.device | None
) -> tuple[list[Count], Any, Denominator]:
    """The weights of the micro-batches, the totals that the loss is handed, and the denominator for the report.

    Args:
        rule: the loss and its denominator.
        pieces: the micro-batches.
        items: the same inputs and targets before they were cut; a plain sum needs only their counts.
        device: where totals are handed to the loss.
    """
    whole = sum(piece.samples for piece in pieces)
    if rule.form == "sum":
        total = divisor([number(rule.count(inputs, targets, whole)) for inputs, targets in items])
        return weights("sum", [total]) * len(pieces), total, total
    counts = [rule.count(piece.inputs, piece.targets, piece.samples) for piece in pieces]
    if rule.form == "counted":
        ones: list[Count] = [1.0] * len(pieces)
        if isinstance(counts[0], Mapping):
            totals = divisors(counts)
            return ones, {term: _tensor(total, device) for term, total in totals.items()}, totals
        total = divisor([number(count) for count in counts])
        return ones, _tensor(total, device), total
    numbers = [number(count) for count in counts]
    total = divisor(numbers)
    return weights(rule.form, numbers), total, 1 if rule.form == "total" else total


def _tensor(total: Count, device: torch.device | None) -> Tensor:
    """Count functions speak in tensors, so what they add up to is handed on as one."""
    if isinstance(total, Tensor):
        return total
    return torch.full((), total, dtype=torch.int64 if isinstance(total, int) else torch.float64, device=device)
