"""Handwritten digits: a small convolutional network learns to name scikit-learn's 1797 pictures (door 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from bigbatch.recipes.extras import require
from bigbatch.terms import Recipe

HELD_OUT = 360


def pictures() -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out pictures: images of shape (samples, 1, 8, 8) in [-1, 1] and their digits.

    The cut is the same for every seed, so that runs can be compared.

    >>> train, held_out = pictures()
    >>> len(train), len(held_out), tuple(train[0][0].shape)
    (1437, 360, (1, 8, 8))
    """
    require("sklearn")
    from sklearn.datasets import load_digits  # type: ignore[import-untyped,unused-ignore]

    raw = load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    digits = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))
    train, held_out = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], digits[train]), TensorDataset(images[held_out], digits[held_out])


def network() -> nn.Module:
    """Images (batch, 1, 8, 8) to scores (batch, 10). Group norm: each picture is scaled by itself alone."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2),
        nn.GroupNorm(4, 64),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


@torch.no_grad()
def metrics(model: nn.Module, eval_data: TensorDataset) -> Mapping[str, float]:
    """Share of held-out pictures named rightly, and their mean loss in nats."""
    device = next(model.parameters()).device
    images, digits = (tensor.to(device) for tensor in eval_data.tensors)
    scores = model(images)
    accuracy = (scores.argmax(1) == digits).float().mean().item()
    return {"accuracy": accuracy, "held_out_loss": functional.cross_entropy(scores, digits).item()}


def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW; 1437 pictures are few, so weights are held down."""
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.1)


def scheduler(optimizer: torch.optim.Optimizer, updates: int) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate falls to zero along half a cosine, once for each update."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=max(updates, 1))


def recipe() -> Recipe:
    """The job `bigbatch train digits`; 64 does not divide 500, as happens to real people."""
    train, held_out = pictures()
    return Recipe(
        name="digits",
        model=network(),
        loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1),
        train_data=train,
        eval_data=held_out,
        optimizer=optimizer,
        scheduler=scheduler,
        metrics=metrics,
        defaults={"batch_size": 500, "micro_batch_size": 64, "epochs": 20, "lr": 5e-3, "precision": "fp32", "seed": 0},
    )
