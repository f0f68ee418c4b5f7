"""Every loss of torch.nn: its function, its classes, its denominator, and how outputs and targets become arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType, NoneType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Entry:
    """One loss of torch.nn: its function, its classes, its kind of denominator and the options that leave it known.

    `order` is how outputs and targets become arguments; see `arguments_of`.
    """

    function: str
    classes: str
    kind: str
    options: str = ""
    order: str = "two"


ENTRIES = (
    Entry("l1_loss", "L1Loss", "elements"),
    Entry("mse_loss", "MSELoss", "elements"),
    Entry("huber_loss", "HuberLoss", "elements", "delta"),
    Entry("smooth_l1_loss", "SmoothL1Loss", "elements", "beta"),
    Entry("soft_margin_loss", "SoftMarginLoss", "elements"),
    Entry("hinge_embedding_loss", "HingeEmbeddingLoss", "elements", "margin"),
    Entry("poisson_nll_loss", "PoissonNLLLoss", "elements", "log_input full eps"),
    Entry("gaussian_nll_loss", "GaussianNLLLoss", "elements", "full eps var", "targets second"),
    Entry("margin_ranking_loss", "MarginRankingLoss", "elements", "margin", "targets last"),
    Entry("kl_div", "KLDivLoss", "elements", "log_target"),
    Entry("binary_cross_entropy", "BCELoss", "elements", "weight"),
    Entry("binary_cross_entropy_with_logits", "BCEWithLogitsLoss", "elements", "weight pos_weight"),
    Entry("multi_margin_loss", "MultiMarginLoss", "rows", "p margin weight"),
    Entry("multilabel_margin_loss", "MultiLabelMarginLoss", "rows of classes"),
    Entry("multilabel_soft_margin_loss", "MultiLabelSoftMarginLoss", "positions", "weight"),
    Entry("cosine_embedding_loss", "CosineEmbeddingLoss", "rows", "margin", "targets last"),
    Entry("triplet_margin_loss", "TripletMarginLoss", "outputs", "margin p eps swap", "targets last"),
    Entry(
        "triplet_margin_with_distance_loss",
        "TripletMarginWithDistanceLoss",
        "outputs",
        "distance_function margin swap",
        "targets last",
    ),
    Entry("ctc_loss", "CTCLoss", "sequences", "blank zero_infinity", "targets last"),
    Entry("nll_loss", "NLLLoss NLLLoss2d", "tokens", "weight ignore_index"),
    Entry("cross_entropy", "CrossEntropyLoss", "tokens", "weight ignore_index label_smoothing"),
    Entry(
        "linear_cross_entropy",
        "LinearCrossEntropyLoss",
        "tokens",
        "linear_weight linear_bias weight ignore_index label_smoothing options",
        "targets last",
    ),
)
PLAIN = (bool, int, float, str, NoneType)
# Deprecated names (NLLLoss2d) may leave a later torch; that must not break the import.
_BY_FUNCTION = {getattr(F, entry.function): entry for entry in ENTRIES if hasattr(F, entry.function)}
_BY_CLASS = {getattr(nn, name): entry for entry in ENTRIES for name in entry.classes.split() if hasattr(nn, name)}


def entry_of(loss_fn: Any) -> Entry | None:
    """The entry of exactly this class, this function, or a partial of this function without positional arguments."""
    if type(loss_fn) is partial:
        return entry_of(loss_fn.func) if not loss_fn.args and isinstance(loss_fn.func, FunctionType) else None
    return _BY_FUNCTION.get(loss_fn) if isinstance(loss_fn, FunctionType) else _BY_CLASS.get(type(loss_fn))


def arguments_of(order: str, outputs: Any, targets: Any) -> list[Any]:
    """The arguments of a recognised loss: the one place where outputs and targets are spread."""
    if order == "two":
        return [outputs, targets]
    many = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    goals = list(targets) if isinstance(targets, tuple | list) else [] if targets is None else [targets]
    return [*many, *goals] if order == "targets last" else [many[0], *goals, *many[1:]]


def name_of(loss_fn: Any) -> str:
    """What a person calls the loss."""
    function = loss_fn.func if type(loss_fn) is partial else loss_fn
    return function.__name__ if isinstance(function, FunctionType) else type(function).__name__


def keywords_of(loss_fn: Any) -> Mapping[str, Any]:
    """The keywords that a partial has bound."""
    return loss_fn.keywords if type(loss_fn) is partial else {}


def options_of(loss_fn: Any) -> Callable[[str, Any], Any]:
    """Reads an option of a loss, now: an attribute of a module, or a keyword of a partial."""
    if isinstance(loss_fn, nn.Module):
        return lambda name, default: getattr(loss_fn, name, default)
    return keywords_of(loss_fn).get


def facts_of(loss_fn: Any) -> Any:
    """What a loss in the table is known by, to be compared: two are unequal where an option or a hook was changed.

    >>> loss_fn = nn.CrossEntropyLoss()
    >>> before = facts_of(loss_fn)
    >>> loss_fn.label_smoothing = 0.1
    >>> facts_of(loss_fn) == before, facts_of(F.cross_entropy) == facts_of(F.cross_entropy)
    (False, True)
    """
    if isinstance(loss_fn, FunctionType) or entry_of(loss_fn) is None:
        return None
    return facts(vars(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn.keywords)


def facts(value: Any) -> Any:
    """Scalars as they are, the inside of dicts and modules, and which tensor or object it is elsewhere."""
    if isinstance(value, PLAIN):
        return value
    if isinstance(value, dict):
        return tuple([item if type(item) in PLAIN else facts(item) for item in value.values()])
    if isinstance(value, nn.Module):
        return type(value), facts(vars(value))
    return (id(value), value.shape, value.requires_grad) if isinstance(value, Tensor) else id(value)
