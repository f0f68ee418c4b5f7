"""Every loss of torch.nn with its options: batches to cut, and the equation that adds the micro-batches up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.core.losses import KnownLoss

SAMPLES, CLASSES = 7, 5


@dataclass(frozen=True)
class Case:
    """A loss with options and a batch; `make` gives outputs and targets, `call` is how a person calls the loss."""

    function: str
    make: Callable[[], tuple[Any, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    call: Callable[[Any, Any, Any], Tensor] = lambda loss, outputs, targets: loss(outputs, targets)
    reductions: tuple[str, ...] = ("mean", "sum")
    axis: int = 0
    module_options: dict[str, Any] | None = None

    def __str__(self) -> str:
        names = [f"{name}={'...' if isinstance(value, Tensor) else value}" for name, value in self.options.items()]
        return f"{self.function}({','.join(names)})"


def real(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def share(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64) * 0.8 + 0.1


def signs(*shape: int) -> Tensor:
    return (torch.randint(0, 2, shape) * 2 - 1).double()


def labels(*shape: int, ignored: int | None = None) -> Tensor:
    drawn = torch.randint(0, CLASSES, shape)
    drawn = drawn if ignored is None else drawn.masked_fill(torch.rand(shape) < 0.4, ignored)
    drawn[0] = 0  # a batch without any target is another test
    return drawn


def pair(outputs: Callable[..., Tensor], targets: Callable[..., Tensor], *shape: int) -> Callable[[], Any]:
    return lambda: (outputs(*shape), targets(*shape))


def spread(loss: Any, outputs: Any, targets: Any) -> Tensor:
    targets = targets if isinstance(targets, tuple) else () if targets is None else (targets,)
    return loss(*outputs, *targets)


def elementwise() -> list[Case]:
    regression = pair(real, real, SAMPLES, CLASSES)
    broadcast = lambda: (real(SAMPLES, CLASSES), real(SAMPLES, 1))  # noqa: E731
    bce, gaussian = ("BCEWithLogitsLoss",), {"call": lambda loss, outputs, y: loss(outputs[0], y, outputs[1])}
    logits = "binary_cross_entropy_with_logits"
    ranking = {"classes": ("MarginRankingLoss",), "call": spread, "options": {"margin": 0.3}}
    log_shares = lambda: (real(SAMPLES, CLASSES).log_softmax(1), share(SAMPLES, CLASSES).log())  # noqa: E731
    kl = {"classes": ("KLDivLoss",), "reductions": ("mean", "sum", "batchmean")}
    return [
        Case("l1_loss", regression, classes=("L1Loss",)),
        Case("mse_loss", regression, classes=("MSELoss",)),
        Case("mse_loss", pair(real, real, SAMPLES), classes=("MSELoss",)),
        Case("mse_loss", broadcast, classes=("MSELoss",)),
        Case("mse_loss", lambda: broadcast()[::-1], classes=("MSELoss",)),
        Case("huber_loss", regression, {"delta": 0.4}, ("HuberLoss",)),
        Case("smooth_l1_loss", broadcast, {"beta": 0.4}, ("SmoothL1Loss",)),
        Case("smooth_l1_loss", regression, {"beta": 0.0}, ("SmoothL1Loss",)),
        Case("soft_margin_loss", pair(real, signs, SAMPLES, 2, 3), classes=("SoftMarginLoss",)),
        Case("hinge_embedding_loss", pair(real, signs, SAMPLES), {"margin": 0.6}, ("HingeEmbeddingLoss",)),
        Case("poisson_nll_loss", pair(real, share, SAMPLES, 3), {"full": True}, ("PoissonNLLLoss",)),
        Case("poisson_nll_loss", pair(share, share, SAMPLES), {"log_input": False, "eps": 0.1}, ("PoissonNLLLoss",)),
        *[
            Case(
                "gaussian_nll_loss",
                lambda shape=shape: ((real(SAMPLES, 3), share(*shape)), real(SAMPLES, 3)),
                {"full": True},
                ("GaussianNLLLoss",),
                **gaussian,
            )
            for shape in ((SAMPLES, 3), (SAMPLES, 1), (SAMPLES,))
        ],
        Case("gaussian_nll_loss", regression, {"var": 0.5}),
        Case("margin_ranking_loss", lambda: ((real(SAMPLES), real(SAMPLES)), signs(SAMPLES)), **ranking),
        Case("margin_ranking_loss", lambda: ((real(SAMPLES, 4), real(SAMPLES, 1)), signs(SAMPLES, 4)), **ranking),
        Case("kl_div", log_shares, {"log_target": True}, **kl),
        Case("kl_div", pair(real, share, SAMPLES, 2, 3), **kl),
        Case("binary_cross_entropy", pair(share, share, SAMPLES), classes=("BCELoss",)),
        Case("binary_cross_entropy", pair(share, share, SAMPLES, 3), {"weight": share(1)}, ("BCELoss",)),
        Case(logits, pair(real, share, SAMPLES), {"weight": share(1), "pos_weight": share(1)}, bce),
        Case(logits, pair(real, share, SAMPLES, CLASSES), {"pos_weight": share(CLASSES)}, bce),
        Case(logits, pair(real, share, SAMPLES, 2, 3), {"pos_weight": share(2, 3)}, bce),
    ]


def samplewise() -> list[Case]:
    def ctc() -> tuple[Any, Any]:
        lengths = torch.tensor([1, 2, 3, 4, 1, 0, 2])
        steps = torch.tensor([8, 7, 8, 8, 6, 8, 1])
        return real(8, SAMPLES, CLASSES).log_softmax(2), (torch.randint(1, CLASSES, (SAMPLES, 4)), steps, lengths)

    several = lambda: torch.tensor([[1, 3, -1, 0, 2], [0, 1, 2, 3, 4], [-1, 0, 0, 0, 0]]).repeat(3, 1)[:SAMPLES]  # noqa: E731
    triples = lambda: (tuple(real(SAMPLES, 4) for _ in range(3)), None)  # noqa: E731
    soft, distance = ("MultiLabelSoftMarginLoss",), "triplet_margin_with_distance_loss"
    distance_options = {"distance_function": nn.PairwiseDistance(p=1), "swap": True}
    margin = ("MultiMarginLoss",)
    return [
        Case("multi_margin_loss", lambda: (real(SAMPLES, CLASSES), labels(SAMPLES)), {}, margin),
        Case(
            "multi_margin_loss",
            lambda: (real(SAMPLES, CLASSES), labels(SAMPLES)),
            {"p": 2, "margin": 0.7, "weight": share(CLASSES)},
            margin,
        ),
        Case("multilabel_margin_loss", lambda: (real(SAMPLES, 5), several()), classes=("MultiLabelMarginLoss",)),
        Case("multilabel_soft_margin_loss", pair(real, share, SAMPLES, CLASSES), {"weight": share(CLASSES)}, soft),
        Case("multilabel_soft_margin_loss", pair(real, share, SAMPLES, 3, CLASSES), classes=soft),
        Case(
            "cosine_embedding_loss",
            lambda: ((real(SAMPLES, 4), real(SAMPLES, 4)), signs(SAMPLES)),
            {"margin": 0.2},
            ("CosineEmbeddingLoss",),
            spread,
        ),
        Case("triplet_margin_loss", triples, {"p": 1.0, "swap": True}, ("TripletMarginLoss",), spread),
        Case(distance, triples, distance_options, ("TripletMarginWithDistanceLoss",), spread),
        Case(distance, triples, {"margin": 0.5}, ("TripletMarginWithDistanceLoss",), spread),
        Case(
            "ctc_loss",
            ctc,
            {"zero_infinity": True},
            ("CTCLoss",),
            lambda loss, outputs, targets: loss(outputs, *targets),
            axis=1,
        ),
    ]


def tokenwise() -> list[Case]:
    entropy, weight = ("CrossEntropyLoss",), torch.tensor([0.2, 4.0, 1.0, 0.0, 2.5], dtype=torch.float64)
    shapes: tuple[tuple[int, ...], ...] = ((SAMPLES,), (SAMPLES, 2, 2))
    cases = []
    for shape in shapes:
        logits = (SAMPLES, CLASSES, *shape[1:])
        for ignored in (-100, 1, 999):
            indices = lambda shape=shape, logits=logits, ignored=ignored: (  # noqa: E731
                real(*logits).log_softmax(1),
                labels(*shape, ignored=ignored),
            )
            for options in ({}, {"weight": weight}):
                chosen = {"ignore_index": ignored, **options}
                cases.append(Case("nll_loss", indices, chosen, ("NLLLoss", "NLLLoss2d")))
                cases.append(Case("cross_entropy", indices, chosen, entropy))
                cases.append(Case("cross_entropy", indices, {"label_smoothing": 0.3, **chosen}, entropy))
        probable = lambda logits=logits: (real(*logits), share(*logits).softmax(1))  # noqa: E731
        for options in ({}, {"weight": weight, "label_smoothing": 0.3}):
            cases.append(Case("cross_entropy", probable, options, entropy))
    return [*cases, *linear(weight)]


def linear(weight: Tensor) -> list[Case]:
    features, name, classes = 3, "linear_cross_entropy", ("LinearCrossEntropyLoss",)
    sizes = {"in_features": features, "num_classes": CLASSES, "dtype": torch.float64}
    indices = lambda: (real(SAMPLES, features), labels(SAMPLES, ignored=2))  # noqa: E731
    by_argument = lambda loss, outputs, targets: loss(outputs, target=targets)  # noqa: E731
    matrix, chunked = real(CLASSES, features).requires_grad_(), nn.LinearCrossEntropyOptions()
    options = {"ignore_index": 2, "weight": weight}
    return [
        Case(name, indices, options, classes, module_options={**sizes, **options, "bias": True}),
        Case(name, indices, {**options, "options": chunked}, classes, module_options={**sizes, "options": chunked}),
        Case(
            name,
            lambda: (real(SAMPLES, features), labels(SAMPLES, 2)),
            {},
            classes,
            module_options={**sizes, "out_features": (2,), "label_smoothing": 0.1},
        ),
        Case(name, lambda: (real(SAMPLES, 3), share(SAMPLES, 5).softmax(1)), {}, classes, module_options=sizes),
        Case(name, indices, {"linear_weight": matrix, **options}, (), by_argument),
        Case(
            name,
            lambda: (real(SAMPLES, features), labels(SAMPLES)),
            {"linear_weight": matrix, "linear_bias": real(CLASSES)},
            (),
            by_argument,
        ),
    ]


torch.manual_seed(0)
CASES = [*elementwise(), *samplewise(), *tokenwise()]


def built(case: Case, reduction: str) -> list[Any]:
    """The loss as a function and as each of its classes."""
    losses: list[Any] = []
    if case.module_options is None:
        losses.append(partial(getattr(F, case.function), reduction=reduction, **case.options))
    options = case.options if case.module_options is None else case.module_options
    return losses + [getattr(nn, name)(reduction=reduction, **options) for name in case.classes]


def cut(tree: Any, first: int, last: int, axis: int = 0) -> Any:
    if isinstance(tree, tuple):
        return tuple(cut(item, first, last) for item in tree)
    return None if tree is None else tree.narrow(axis, first, last - first)


def pieces(case: Case, outputs: Any, targets: Any, sizes: list[int]) -> list[tuple[Any, Any, int]]:
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [(cut(outputs, e - n, e, case.axis), cut(targets, e - n, e), n) for n, e in zip(sizes, ends, strict=True)]


def weights_of(known: KnownLoss, parts: list[tuple[Any, Any, int]]) -> list[Any]:
    """The weights w_k as the equation has them."""
    counts = [float(known.count(targets, samples)) for _, targets, samples in parts]
    if known.form == "total":
        return [1.0] * len(parts)
    return [(1 if known.form == "sum" else count) / sum(counts) for count in counts]


def leaves_of(loss_fn: Any, outputs: Any) -> list[Tensor]:
    """What gradients are compared: the outputs, the parameters of the loss, a trained matrix in a partial."""
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    own = loss_fn.parameters() if isinstance(loss_fn, nn.Module) else loss_fn.keywords.values()
    return [*several, *(value for value in own if isinstance(value, Tensor) and value.requires_grad)]
