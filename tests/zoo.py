"""The zoo: small awkward models, each with a batch of N samples and a loss, for the laws to hold on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_sequence

import zoo_models as models
from laws import Case, N
from zoo_models import C, D, H, T, Two, V

LENGTHS = [2, 7, 1, 4, 4, 6, 3, 5, 2, 1]


def features() -> Tensor:
    return torch.randn(N, D)


def classes() -> tuple[Tensor, Tensor]:
    return features(), torch.randint(0, C, (N,))


def numbers() -> tuple[Tensor, Tensor]:
    return features(), torch.randn(N, C)


def series() -> tuple[Tensor, Tensor]:
    return torch.randn(N, T, D), torch.randint(0, C, (N,))


def tokens() -> tuple[Tensor, Tensor]:
    """Every sample has another number of target tokens, one has none."""
    ids, labels = torch.randint(0, V, (N, T)), torch.randint(0, V, (N, T))
    labels[torch.arange(T) >= torch.arange(N)[:, None].remainder(T + 1)] = -100
    return ids, labels


def own_tokens() -> tuple[dict[str, Tensor], None]:
    ids, labels = tokens()
    labels[:, -1] = torch.where(torch.arange(N) % 3 == 1, 2, -100)
    return {"input_ids": ids, "labels": labels}, None


def images() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 256, (N, 3, 4, 4), dtype=torch.uint8), torch.randint(0, C, (N,))


def network(*middle: Any) -> Any:
    """Makes Two with layers in the middle."""
    return lambda: Two(nn.Sequential(*(make() for make in middle)))


def convolution(norm: Any) -> Any:
    def make() -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3), norm(), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, C)]
        return nn.Sequential(Scaled(), *layers)

    return make


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x.double() / 255).contiguous(memory_format=torch.channels_last)


def frozen_norm() -> nn.Module:
    norm = nn.BatchNorm2d(4).eval()
    norm.running_mean.uniform_()
    norm.train = lambda mode=True: norm  # type: ignore[method-assign,misc]
    return norm


def packed_rows(value: Any, first: int, last: int) -> Any:
    """Rows of a packed sequence, by way of its list of sequences."""
    if isinstance(value, Tensor):
        return value[first:last]
    return pack_sequence(list(sequences()[first:last]), enforce_sorted=False)


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(n, D, generator=generator, dtype=torch.float64) for n in LENGTHS]


def jagged(first: int = 0, last: int = N) -> Tensor:
    return torch.nested.nested_tensor(sequences()[first:last], layout=torch.jagged)


def jagged_rows(value: Tensor, first: int, last: int) -> Tensor:
    return jagged(first, last) if value.is_nested else value[first:last]


def listed_rows(value: Any, first: int, last: int) -> Any:
    if isinstance(value, Tensor):
        return value[first:last]
    return ({name: column[first:last] for name, column in value[0].items()},)


def info_nce(outputs: tuple[Tensor, Tensor], _targets: Any = None) -> Tensor:
    left, right = (F.normalize(output, dim=1) for output in outputs)
    return F.cross_entropy(left @ right.T / 0.1, torch.arange(len(left)))


def ranking(outputs: Tensor, targets: Tensor) -> Tensor:
    """Every sample is compared with every other one."""
    scores = outputs.sum(1)
    return F.softplus(scores[:, None] - scores[None, :])[targets[:, None] > targets[None, :]].mean()


def spread_out(outputs: Tensor, targets: Tensor) -> Tensor:
    """Standard deviations over the batch: no sum over samples at all."""
    return F.cross_entropy(outputs, targets) + F.relu(2 - outputs.std(0)).mean()


def target_tokens(_inputs: Any, targets: Tensor) -> Tensor:
    return (targets != -100).sum()


def summed_tokens(outputs: Tensor, targets: Tensor, count: Tensor | None = None) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="sum") / (
        target_tokens(None, targets) if count is None else count
    )


def two_counts(_inputs: Any, targets: tuple[Tensor, Tensor]) -> dict[str, Any]:
    return {"tokens": (targets[0] != -100).sum(), "rows": len(targets[1])}


def two_terms(outputs: Any, targets: tuple[Tensor, Tensor], counts: Any = None) -> Tensor:
    counts = two_counts(None, targets) if counts is None else counts
    token = F.cross_entropy(outputs[0], targets[0], reduction="sum") / counts["tokens"]
    return token + 0.3 * (outputs[1] - targets[1]).square().sum() / counts["rows"]


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lm, self.row = models.Tied(), nn.Linear(V, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm(ids)
        return logits, self.row(logits.mean(2)).squeeze(1)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Two(), nn.Linear(2, C)

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(image), self.right(text)


class Chunks(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.chunk(3, 1)


class BothWays(nn.Module):
    """Batch first, and a final state whose first axis holds layers and directions."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.last = nn.GRU(D, H, 2, bidirectional=True, batch_first=True), nn.Linear(2 * H, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.core(x)[1][-2:].transpose(0, 1).flatten(1))


def of(part: Callable[[Any], Any], loss: Any) -> Any:
    """A mean over samples, of one part of the outputs."""
    return lambda: lambda outputs, targets: loss(part(outputs), targets)


def plain(function: Any) -> Any:
    return lambda: function


ce, mse = plain(F.cross_entropy), nn.MSELoss
WEIGHTS = torch.tensor([0.2, 3.0, 1.0], dtype=torch.float64)

CASES = [
    Case("linear", lambda: nn.Linear(D, C), classes, nn.CrossEntropyLoss),
    Case("perceptron", Two, numbers, mse),
    Case("deep", network(*[lambda: nn.Linear(H, H), nn.GELU] * 6), numbers, nn.SmoothL1Loss),
    Case("one number a sample", lambda: nn.Sequential(Two(), nn.Linear(C, 1), nn.Flatten(0)),
         lambda: (features(), torch.randn(N)), nn.HuberLoss),
    Case("tied weights, ignored tokens", models.Tied, tokens, nn.CrossEntropyLoss),
    Case("tied weights, counted tokens", models.Tied, tokens, plain(summed_tokens), target_tokens),
    Case("two terms, two denominators", TwoHeads, lambda: (tokens()[0], (tokens()[1], torch.randn(N))),
         plain(two_terms), two_counts),
    Case("sum", Two, numbers, partial(nn.MSELoss, reduction="sum")),
    Case("stated sum", Two, numbers, plain(lambda o, t: (o - t).abs().sum()), "sum"),
    Case("class weights", Two, classes, lambda: nn.CrossEntropyLoss(WEIGHTS.clone(), label_smoothing=0.1)),
    Case("class probabilities", Two, lambda: (features(), torch.rand(N, C).softmax(1)), nn.CrossEntropyLoss),
    Case("batchmean", lambda: nn.Sequential(Two(), nn.LogSoftmax(1)),
         lambda: (features(), torch.rand(N, C).softmax(1)), partial(nn.KLDivLoss, reduction="batchmean")),
    Case("positive weights", Two, lambda: (features(), torch.rand(N, C).round()),
         lambda: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS.clone())),
    Case("several outputs into one loss", lambda: nn.Sequential(nn.Linear(D, 9), Chunks()), lambda: (features(), None),
         nn.TripletMarginLoss, whole=lambda o, _: F.triplet_margin_loss(*o)),
    Case("loss with weights of its own", Two, classes, models.ArcHead, "mean"),
    Case("frozen middle", models.Frozen, numbers, mse),
    Case("unused parameters and outputs", models.Unused, classes, of(itemgetter(0), F.cross_entropy), "mean"),
    Case("experts, some without samples", models.Experts,
         lambda: ((features(), torch.tensor([0, 1, 1, 0, 3, 0, 1, 0, 0, 1])), torch.randn(N, C)), mse),
    Case("teacher", models.Teacher, classes, nn.CrossEntropyLoss),
    Case("dropout", network(lambda: nn.Dropout(0.4), lambda: nn.Linear(H, H), lambda: nn.AlphaDropout(0.3)), numbers,
         mse, random=True),
    Case("dropout in place", network(lambda: nn.Linear(H, H), lambda: nn.Dropout(0.4, inplace=True), nn.Sigmoid),
         numbers, mse, random=True),
    Case("noise on the input", lambda: Two(lambda h: h + torch.randn_like(h)), classes, ce, random=True),
    Case("lstm", lambda: models.Recurrent(nn.LSTM, num_layers=2), series, ce),
    Case("lstm with dropout", lambda: models.Recurrent(nn.LSTM, num_layers=2, dropout=0.4), series, ce, random=True),
    Case("gru, both directions", BothWays, series, ce),
    Case("rnn", lambda: models.Recurrent(nn.RNN), series, ce),
    Case("learned initial state", models.LearnedStart, series, ce),
    Case("attention with padding", models.Attention,
         lambda: ({"x": torch.randn(N, T, D), "padding": torch.arange(T) > torch.arange(N)[:, None]},
                  torch.randint(0, C, (N,))), of(itemgetter("logits"), F.cross_entropy), "mean"),
    Case("transformer with dropout",
         lambda: nn.Sequential(nn.TransformerEncoderLayer(D, 2, 8, 0.2, batch_first=True), nn.Flatten(),
                               nn.Linear(T * D, C)), series, ce, random=True),
    Case("counter and moving average", models.Counter, numbers, mse),
    Case("functional call", models.Functional, numbers, mse),
    Case("weight norm", network(lambda: parametrizations.weight_norm(nn.Linear(H, H)), nn.Tanh), numbers, mse),
    Case("spectral norm", network(lambda: parametrizations.spectral_norm(nn.Linear(H, H)), nn.Tanh), numbers, mse),
    Case("named tuple out", lambda: models.Structured("named tuple"), classes,
         of(attrgetter("logits"), F.cross_entropy), "mean"),
    Case("dataclass out", lambda: models.Structured("dataclass"), classes, of(attrgetter("logits"), F.cross_entropy),
         "mean"),
    Case("nested out", lambda: models.Structured("nested"), classes, of(lambda o: o["a"][0][0], F.cross_entropy),
         "mean"),
    Case("mixed dtypes", models.MixedDtypes,
         lambda: ((torch.randint(0, V, (N, T)), torch.rand(N, T) > 0.3, torch.rand(N, 1)), torch.randint(0, C, (N,))),
         ce, tolerance=2e-6),
    Case("ragged rows", models.Ragged,
         lambda: (({"rows": sequences(), "names": list("abcdefghij")},), torch.randint(0, C, (N,))), ce,
         rows=listed_rows),
    Case("packed sequence", models.Packed,
         lambda: (pack_sequence(sequences(), enforce_sorted=False), torch.randn(N, C)), mse, rows=packed_rows),
    Case("jagged tensor", models.Jagged, lambda: (jagged(), torch.randn(N, C)), mse, rows=jagged_rows),
    Case("in-place operators", models.InPlace, numbers, mse),
    Case("several inputs", models.Several,
         lambda: ((features(), torch.randn(N, 2), torch.tensor(0.7)), torch.randn(N, C)), mse),
    Case("several named inputs", models.Several,
         lambda: ({"image": features(), "text": torch.randn(N, 2), "temperature": torch.tensor(0.7), "note": "a",
                   "skip": None}, torch.randn(N, C)), mse),
    Case("hooks", models.Hooked, numbers, mse),
    Case("parameters in lists", models.ByHand, numbers, mse),
    Case("one tower twice", models.Siamese, lambda: ((features(), features()), torch.randn(N)), mse),
    Case("complex weights", models.Spectrum, numbers, mse),
    Case("own backward", lambda: Two(models.Cube.apply), numbers, mse),
    Case("derivative in the forward", models.Force, lambda: (features(), torch.randn(N, D)), mse),
    Case("recomputes already", models.Checkpointed, numbers, mse),
    Case("cache in the forward", models.Cached, numbers, mse),
    Case("sparse gradients", lambda: nn.Sequential(nn.Embedding(V, H, sparse=True), nn.Flatten(), nn.Linear(T * H, C)),
         lambda: (torch.randint(0, V, (N, T)), torch.randn(N, C)), mse),
    Case("weights shortened in the forward",
         lambda: nn.Sequential(nn.Embedding(V, H, max_norm=1.0), nn.Flatten(), nn.Linear(T * H, C)),
         lambda: (torch.randint(0, V, (N, T)), torch.randn(N, C)), mse),
    Case("bag of embeddings", lambda: nn.Sequential(nn.EmbeddingBag(V, H, mode="max"), nn.Linear(H, C)),
         lambda: (torch.randint(0, V, (N, T)), torch.randn(N, C)), mse),
    Case("convolution, group norm", convolution(lambda: nn.GroupNorm(2, 4)), images, ce),
    Case("convolution, instance norm", convolution(lambda: nn.InstanceNorm2d(4, affine=True)), images, ce),
    Case("frozen batch norm", convolution(frozen_norm), images, ce),
    Case("layer norm and softplus", network(lambda: nn.LayerNorm(H), nn.Softplus), classes, ce),
    Case("contrastive", Towers, lambda: ((features(), torch.randn(N, 2)), None), plain(info_nce), None),
    Case("ranking", Two, lambda: (features(), torch.randn(N)), plain(ranking), None),
    Case("spread of the batch", Two, classes, plain(spread_out), None),
    Case("own loss", lambda: models.OwnLoss(False), own_tokens, plain(None), ways=("sequential",)),
    Case("own loss, handed its denominator", lambda: models.OwnLoss(True), own_tokens, plain(None),
         ways=("sequential",)),
]  # fmt: skip


BY_NAME = {case.name: case for case in CASES}
