"""Counted peak of live bytes: both doors at 16 micro-batches against one micro-batch's own forward and backward."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import bigbatch
from bigbatch.core.live import Live

from .pairs import write

MICRO_BATCHES, MICRO_BATCH_SIZE, WIDTH, LAYERS, CLASSES = 16, 1024, 128, 24, 16


def peak(step: Callable[[nn.Module], object], model: nn.Module) -> int:
    model = copy.deepcopy(model)
    with Live() as live:
        step(model)
    return live.peak_bytes


def figures(activations: str = "recompute") -> dict[str, float]:
    """Peaks in bytes; gradients are allocated inside every step, so they are part of each."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))
    inputs = torch.randn(MICRO_BATCHES * MICRO_BATCH_SIZE, WIDTH)
    targets = torch.randint(0, CLASSES, (len(inputs),))
    loss_fn = nn.CrossEntropyLoss()

    def whole(model: nn.Module) -> None:
        loss_fn(model(inputs), targets).backward()

    def one_micro_batch(model: nn.Module) -> None:
        loss_fn(model(inputs[:MICRO_BATCH_SIZE]), targets[:MICRO_BATCH_SIZE]).backward()

    def door_1(model: nn.Module) -> Tensor:
        return bigbatch.Accumulator(model, loss_fn, micro_batch_size=MICRO_BATCH_SIZE).backward(inputs, targets)

    def door_2(model: nn.Module) -> None:
        wrapped = bigbatch.MicroBatched(model, MICRO_BATCH_SIZE, activations=activations)
        loss_fn(wrapped(inputs), targets).backward()

    outputs = len(inputs) * CLASSES * 4
    floor = peak(one_micro_batch, model) + outputs
    return {
        "whole_batch_bytes": peak(whole, model),
        "one_micro_batch_and_outputs_bytes": floor,
        "accumulator_bytes": peak(door_1, model),
        "micro_batched_bytes": peak(door_2, model),
        "accumulator_ratio": round(peak(door_1, model) / floor, 4),
        "micro_batched_ratio": round(peak(door_2, model) / floor, 4),
    }


def main() -> None:
    what = "live bytes at 16 micro-batches against one micro-batch's own forward and backward plus the batch's outputs"
    write("memory_doors", what, figures())


if __name__ == "__main__":
    main()
