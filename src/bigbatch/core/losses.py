"""The losses of torch.nn in a form in which micro-batches of any sizes add up: g = sum_k w_k * grad(loss_k)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from bigbatch.core import denominators
from bigbatch.core.denominators import Denominator, Place
from bigbatch.core.loss_table import Entry, arguments_of, entry_of, keywords_of, name_of, options_of
from bigbatch.errors import LossError

Call = Callable[..., Tensor]


@dataclass(frozen=True)
class KnownLoss:
    """A loss whose denominator is known.

    Attributes:
        name: the class or function, "CrossEntropyLoss" or "cross_entropy".
        unit: what the denominator counts: "target tokens", "class weights", "samples", "elements"; "" for a sum.
        form: "sum": `loss` gives a micro-batch's plain sum S_k; the batch's loss is sum(S_k) / sum(count_k), and a
            micro-batch without any target gives 0. "mean": `loss` gives a mean over count_k things; the share of the
            micro-batch is count_k / sum(count_k). "total": the loss is a plain sum (reduction="sum"); nothing is
            divided, and `count` gives the samples.
        loss: `loss(outputs, targets)` of one micro-batch in that form, a 0-d tensor; a third argument is ignored.
            Raises LossError where outputs and targets have shapes with which the loss does not add up over samples.
        count: `count(targets, samples)` of one micro-batch or of the whole batch, before any forward: an int, or a
            0-d tensor without a host sync. Raises LossError where the targets are not what the loss needs.
        terms: `terms(outputs)`: how many samples the outputs really hold, for losses whose targets do not tell (the
            triplet losses); a micro-batch in which this is not `count` must be refused. None for all other losses.
        copies: `copies(outputs, targets)`: to how many terms of the mean broadcasting makes one that was counted, 0 for
            a micro-batch without any. It must be the same in all micro-batches of a batch. None where nothing is
            broadcast.
    """

    name: str
    unit: str
    form: str
    loss: Callable[..., Tensor]
    count: Callable[[Any, int], int | float | Tensor]
    terms: Callable[[Any], int] | None = None
    copies: Callable[[Any, Any], int] | None = None


def recognise(loss_fn: Any) -> KnownLoss | None:
    """A loss of torch.nn or torch.nn.functional with its denominator, or None where that is not certain.

    Recognised are the modules of torch.nn, the functions of torch.nn.functional, and `functools.partial` of a
    function with keywords. Unknown are subclasses, modules with hooks (they would see each micro-batch instead of
    the batch), legacy keywords (`size_average`, `reduce`), weights that can be one for each sample, class weights
    that are trained, and a distance that is not `nn.PairwiseDistance`.

    Raises:
        LossError: reduction="none" gives no scalar.

    >>> from functools import partial
    >>> from torch.nn import functional as F
    >>> known = recognise(partial(F.cross_entropy, ignore_index=0))
    >>> known.name, known.form, known.unit
    ('cross_entropy', 'sum', 'target tokens')
    >>> import torch
    >>> known.count(torch.tensor([0, 3, 1, 0]), 4)
    tensor(2)
    >>> recognise(lambda outputs, targets: outputs.sum()) is None
    True
    """
    entry = entry_of(loss_fn)
    if entry is None:
        return None
    name, options = name_of(loss_fn), options_of(loss_fn)
    reduction = options("reduction", "mean")
    if reduction == "none":
        found = "it gives one value for each sample or element, not a scalar"
        raise LossError(f"{name} with reduction='none' was given as the loss", found, "pass reduction='mean' or 'sum'")
    if not _certain(entry, loss_fn, options, reduction):
        return None
    denominator = _denominator(entry, _place(entry, name), options, reduction)
    form = _form(entry, reduction)
    terms = None if reduction == "sum" else denominator.terms
    copies = denominator.copies if form == "mean" else None
    return KnownLoss(
        name,
        "" if reduction == "sum" else denominator.unit,
        form,
        _in_form(entry, loss_fn, denominator, reduction),
        (lambda targets, samples: samples) if reduction == "sum" else denominator.count,
        None if terms is None else lambda outputs: terms(arguments_of(entry.order, outputs, None)),
        None if copies is None else lambda outputs, targets: copies(arguments_of(entry.order, outputs, targets)),
    )


def call_loss(loss_fn: Any, outputs: Any, targets: Any) -> Tensor:
    """The user's loss as it stands: `loss_fn(outputs, targets)`.

    A loss of torch.nn that takes more than two arguments gets the items of `outputs` and `targets` as arguments,
    where they are a tuple or a list: `(anchor, positive, negative)` with targets None, `(x1, x2)` with y,
    log_probs with `(targets, input_lengths, target_lengths)`, `(input, var)` with the targets between them.

    >>> import torch
    >>> x = torch.eye(2)
    >>> call_loss(nn.TripletMarginLoss(margin=3.0), (x, x, x + 1), None).shape
    torch.Size([])
    """
    entry = entry_of(loss_fn)
    if entry is None:
        result: Tensor = loss_fn(outputs, targets)
        return result
    return _call(loss_fn)(*arguments_of(entry.order, outputs, targets))


def _certain(entry: Entry, loss_fn: Any, options: Callable[[str, Any], Any], reduction: str) -> bool:
    """Whether the denominator follows from the targets with these options."""
    if not set(keywords_of(loss_fn)) <= {"reduction", *entry.options.split()}:
        return False
    if reduction not in ("mean", "sum") and (entry.function, reduction) != ("kl_div", "batchmean"):
        return False
    if isinstance(loss_fn, nn.Module) and ("forward" in vars(loss_fn) or _hooked(loss_fn)):
        return False
    weight, distance = options("weight", None), options("distance_function", None)
    if entry.kind == "tokens":
        return weight is None or (weight.dim() == 1 and not weight.requires_grad)
    if entry.function.startswith("binary") and weight is not None and weight.numel() != 1:
        return False
    if isinstance(options("var", None), Tensor) and options("var", None).numel() != 1:
        return False
    return distance is None or type(distance) is nn.PairwiseDistance


def _hooked(module: nn.Module) -> bool:
    """Whether a module or a part of it has hooks."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(part, name) for part in module.modules() for name in hooks)


def _place(entry: Entry, name: str) -> Place:
    """Where the targets of a loss stand."""
    orders = {"two": Place(name), "targets last": Place(name, item=-1), "targets second": Place(name, 1, 0)}
    return orders[entry.order]


def _denominator(entry: Entry, place: Place, options: Callable[[str, Any], Any], reduction: str) -> Denominator:
    """The denominator of a loss; its weights are read at each call."""
    if reduction == "batchmean":
        by_elements, by_rows = denominators.elements(place, denominators.no_weight), denominators.rows(place, 1)
        return replace(by_rows, check=by_elements.check)
    if entry.kind == "tokens":
        ignored = options("ignore_index", None)
        return denominators.target_tokens(place, -100 if ignored is None else ignored, lambda: options("weight", None))
    pos_weight = (lambda: options("pos_weight", None)) if "pos_weight" in entry.options else denominators.no_weight
    kinds: dict[str, Callable[[], Denominator]] = {
        "elements": lambda: denominators.elements(place, pos_weight),
        "rows": lambda: denominators.rows(place, 1),
        "rows of classes": lambda: denominators.rows(place, 2),
        "positions": lambda: denominators.positions(place, lambda: options("weight", None)),
        "outputs": lambda: denominators.samples_of_outputs(place),
        "sequences": lambda: denominators.sequences(place),
    }
    return kinds[entry.kind]()


def _form(entry: Entry, reduction: str) -> str:
    """A sum where the denominator of a micro-batch can be 0, else the mean as it stands."""
    if reduction == "sum":
        return "total"
    return "sum" if entry.kind == "tokens" or reduction == "batchmean" else "mean"


def _in_form(entry: Entry, loss_fn: Any, denominator: Denominator, reduction: str) -> Call:
    """The loss of one micro-batch in its form; a mean over nothing is 0, as the sum is."""
    total = _call(_summed(loss_fn))
    chosen = _call(loss_fn) if _form(entry, reduction) == "mean" else total

    def loss(outputs: Any, targets: Any, _totals: Any = None) -> Tensor:
        arguments: Sequence[Any] = (
            (outputs, targets) if entry.order == "two" else arguments_of(entry.order, outputs, targets)
        )
        denominator.check(arguments)
        return (chosen if arguments[0].numel() else total)(*arguments)

    return loss


def _summed(loss_fn: Any) -> Any:
    """The same loss with reduction="sum"; a module's twin shares its buffers and parameters."""
    if not isinstance(loss_fn, nn.Module):
        return partial(loss_fn, reduction="sum")
    twin: Any = copy.copy(loss_fn)
    twin.reduction = "sum"
    return twin


def _call(loss_fn: Any) -> Call:
    """The loss by its positional arguments, also where a partial has bound one that stands before the targets."""
    if "linear_weight" not in keywords_of(loss_fn):
        call: Call = loss_fn
        return call
    return lambda outputs, targets: loss_fn(outputs, target=targets)
