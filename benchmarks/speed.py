"""`Accumulator` against the hand-written loop in time: a tiny network, one for small pictures, one of 10 ms."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

import bigbatch

from .pairs import in_fresh_processes, paired, write

MICRO_BATCHES, MICRO_BATCH_SIZE = 8, 32


def perceptron(*widths: int) -> tuple[nn.Module, Tensor]:
    layers = [m for into, out in zip(widths, widths[1:], strict=False) for m in (nn.Linear(into, out), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(MICRO_BATCHES * MICRO_BATCH_SIZE, widths[0])


def ten_milliseconds() -> tuple[nn.Module, Tensor]:
    """Layers are added until forward and backward of one micro-batch take 10 ms here."""
    width, layers = 512, 2
    while True:
        model = nn.Sequential(
            *[m for _ in range(layers) for m in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 10)
        )
        rows = torch.randn(MICRO_BATCH_SIZE, width)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            model(rows).sum().backward()
            times.append(time.perf_counter() - start)
        if statistics.median(times) >= 0.010:
            return model, torch.randn(MICRO_BATCHES * MICRO_BATCH_SIZE, width)
        layers += 2


NETWORKS = {
    "speed_tiny": (lambda: perceptron(64, 128, 128, 10), 100, 5),
    "speed_small": (lambda: perceptron(784, 256, 128, 10), 100, 3),
    "speed_10ms": (ten_milliseconds, 40, 1),
}


def ratio(name: str) -> float:
    """The median ratio of one run."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads on a shared machine measure the neighbours
    build, pairs, inner = NETWORKS[name]
    model, inputs = build()
    targets = torch.randint(0, 10, (len(inputs),))
    loss_fn = nn.CrossEntropyLoss()
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=MICRO_BATCH_SIZE)

    def ours() -> Tensor:
        loss = accumulator.backward(inputs, targets)
        model.zero_grad()
        return loss

    def by_hand() -> Tensor:
        total = torch.zeros(())
        for rows, labels in zip(inputs.split(MICRO_BATCH_SIZE), targets.split(MICRO_BATCH_SIZE), strict=True):
            loss = loss_fn(model(rows), labels) / MICRO_BATCHES
            loss.backward()
            total += loss.detach()
        model.zero_grad()
        return total

    assert torch.allclose(ours(), by_hand())
    return statistics.median(paired(ours, by_hand, pairs, inner))


def main() -> None:
    for name in NETWORKS:
        runs = in_fresh_processes(ratio, name)
        write(
            name,
            "time of Accumulator.backward / time of the hand-written loop, 8 micro-batches of 32, with zero_grad",
            {"ratio": round(statistics.median(runs), 4), "runs": [round(run, 4) for run in runs]},
        )


if __name__ == "__main__":
    main()
