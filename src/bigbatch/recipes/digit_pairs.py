"""Pairs of digits: two distorted views of a picture must find each other among all views of the batch (door 2).

No label is used to learn. The loss compares every first view with every second view of the batch, so it does not add
up over micro-batches: their outputs are joined and the loss is taken once, on the whole batch.
Source: van den Oord, Li and Vinyals, "Representation Learning with Contrastive Predictive Coding", 2018 (the loss);
Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021 (the learned temperature).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from bigbatch.recipes.digits import optimizer, pictures, scheduler
from bigbatch.terms import Recipe

FEW = 5  # labelled pictures of each digit that the sparing probe may see
DRAWS = 20  # of such pictures; one draw alone is luck


def distorted(images: Tensor) -> Tensor:
    """Views of images (samples, 1, 8, 8): turned, stretched, leaning, moved, paler or darker, noisy.

    >>> distorted(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 1, 8, 8])
    """
    samples = len(images)
    angle = (torch.rand(samples) - 0.5) * 0.6
    lean = (torch.rand(samples) - 0.5) * 0.4
    wide, high = 1 + (torch.rand(2, samples) - 0.5) * 0.4
    right, down = (torch.rand(2, samples) - 0.5) * 0.6
    across = torch.stack([angle.cos() * wide, lean - angle.sin() * high, right], 1)
    along = torch.stack([angle.sin() * wide, angle.cos() * high, down], 1)
    grid = functional.affine_grid(torch.stack([across, along], 1), list(images.shape), align_corners=False)
    moved = functional.grid_sample(images, grid, padding_mode="border", align_corners=False)
    strength = 0.7 + 0.6 * torch.rand(samples, 1, 1, 1)
    return moved * strength + 0.1 * torch.randn(images.shape)


def collate(samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Two views of each picture (batch, 2, 1, 8, 8), and the digits (batch,), which the loss does not read."""
    images, digits = map(torch.stack, zip(*samples, strict=True))
    return torch.stack([distorted(images), distorted(images)], 1), digits


class Encoder(nn.Module):
    """Pairs of views (batch, 2, 1, 8, 8) to pairs of directions (batch, 2, 32), scaled by the root of the sharpness.

    The sharpness (one over the temperature) is learned. Each of two directions carries its root, so that their product
    carries it once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.GroupNorm(4, 32),
            nn.GELU(),
            nn.Conv2d(32, 64, 3, padding=1, stride=2),
            nn.GroupNorm(4, 64),
            nn.GELU(),
            nn.Flatten(),
            nn.Linear(64 * 4 * 4, 128),
        )
        self.direction = nn.Sequential(nn.GELU(), nn.Linear(128, 32))
        self.log_sharpness = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, views: Tensor) -> Tensor:
        directions = self.direction(self.features(views.flatten(0, 1))).unflatten(0, (-1, 2))
        root = (self.log_sharpness.clamp(max=math.log(100.0)) / 2).exp()
        return functional.normalize(directions, dim=-1) * root


def info_nce(directions: Tensor, digits: Tensor | None = None) -> Tensor:
    """Mean surprise, in nats, of finding each view's partner among all views of the other side.

    Args:
        directions: (batch, 2, features); the product of two of them is their score.
        digits: not read; the partners' places are all that is learnt from.

    >>> info_nce(torch.zeros(4, 2, 8))  # no view stands out: log 4
    tensor(1.3863)
    """
    scores = directions[:, 0] @ directions[:, 1].T
    partners = torch.arange(len(scores), device=scores.device)
    return (functional.cross_entropy(scores, partners) + functional.cross_entropy(scores.T, partners)) / 2


def probe(train: Tensor, train_digits: Tensor, held_out: Tensor, held_out_digits: Tensor) -> float:
    """Share of held-out digits that a linear map of the features names rightly, fitted by ridge regression.

    Args:
        train, held_out: features (samples, features); they are centred and scaled as the training features are.
        train_digits, held_out_digits: the digits (samples,), read by the probe alone.
    """
    mean, spread = train.double().mean(0), train.double().std(0) + 1e-6
    known, asked = (((part.double() - mean) / spread) for part in (train, held_out))
    goal = functional.one_hot(train_digits, 10).double()
    weights = torch.linalg.solve(known.T @ known + torch.eye(known.shape[1]).double(), known.T @ (goal - goal.mean(0)))
    named = (asked @ weights + goal.mean(0)).argmax(1)
    return float((named == held_out_digits).double().mean())


def few_label_accuracy(train: Tensor, train_digits: Tensor, held_out: Tensor, held_out_digits: Tensor) -> float:
    """The mean of `probe` over `DRAWS` draws of `FEW` labelled pictures of each digit."""
    luck = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(DRAWS):
        order = torch.randperm(len(train_digits), generator=luck)
        drawn = torch.cat([order[train_digits[order] == digit][:FEW] for digit in range(10)])
        total += probe(train[drawn], train_digits[drawn], held_out, held_out_digits)
    return total / DRAWS


@torch.no_grad()
def metrics(model: nn.Module, eval_data: TensorDataset) -> Mapping[str, float]:
    """Linear probes of the directions and, beside them, of the bare pixels: with all labels, and with a few.

    Guessing names one digit in ten rightly. All labels say little here: a linear map of the pixels does well too.
    """
    device = next(model.parameters()).device
    (images, digits), (asked, asked_digits) = pictures()[0].tensors, eval_data.tensors
    result: dict[str, float] = {}
    for name, seen in {"probe": lambda views: _directions(model, views.to(device)), "pixel": _pixels}.items():
        known, unknown = seen(images), seen(asked)
        result[f"{name}_accuracy"] = probe(known, digits, unknown, asked_digits)
        result[f"{name}_accuracy_few_labels"] = few_label_accuracy(known, digits, unknown, asked_digits)
    return result


def _directions(model: nn.Module, images: Tensor) -> Tensor:
    directions: Tensor = model(torch.stack([images, images], 1))
    return directions[:, 0].float().cpu()


def _pixels(images: Tensor) -> Tensor:
    return images.flatten(1)


def recipe() -> Recipe:
    """The job `bigbatch train digit-pairs`."""
    train, held_out = pictures()
    return Recipe(
        name="digit-pairs",
        model=Encoder(),
        loss_fn=info_nce,
        train_data=train,
        eval_data=held_out,
        optimizer=optimizer,
        scheduler=scheduler,
        metrics=metrics,
        collate=collate,
        activations="recompute",
        defaults={"batch_size": 500, "micro_batch_size": 64, "epochs": 40, "lr": 3e-3, "precision": "fp32", "seed": 0},
    )
