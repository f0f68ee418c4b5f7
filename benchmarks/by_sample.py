"""Random numbers by sample against PyTorch's own in time: a transformer with dropout, eight micro-batches a step."""

from __future__ import annotations

import statistics
from contextlib import nullcontext

import torch
from torch import nn

from bigbatch.core.by_sample import BySample
from bigbatch.core.sample_axes import Axes, axes_of

from .pairs import in_fresh_processes, paired, write

MICRO_BATCHES, MICRO_BATCH_SIZE, TOKENS, WIDTH, LAYERS = 8, 8, 64, 128, 2


def axes(model: nn.Module, inputs: torch.Tensor) -> Axes:
    looks = []
    for samples in (2, 3):
        with torch.no_grad(), BySample(0, 0, samples) as look:
            model(inputs[:samples])
        looks.append(look.seen)
    return axes_of(looks[0], 2, looks[1], 3)


def ratio(name: str) -> float:
    """The median ratio of one run; `by_sample_again` is plain against plain, the noise of the machine."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads on a shared machine measure the neighbours
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    inputs = torch.randn(MICRO_BATCHES * MICRO_BATCH_SIZE, TOKENS, WIDTH)
    known = axes(model, inputs)

    def step(by_sample: bool) -> None:
        for first in range(0, len(inputs), MICRO_BATCH_SIZE):
            rows = inputs[first : first + MICRO_BATCH_SIZE]
            with BySample(1, first, len(rows), known) if by_sample else nullcontext():
                outputs = model(rows)
            outputs.square().mean().backward()
        model.zero_grad()

    return statistics.median(paired(lambda: step(name == "by_sample"), lambda: step(False), 20))


def main() -> None:
    for name in ("by_sample", "by_sample_again"):
        runs = in_fresh_processes(ratio, name)
        write(
            name,
            f"time of a step whose forwards draw by sample ({name}) / of one that draws as ever: TransformerEncoder, "
            f"{LAYERS} layers of {WIDTH}, dropout 0.1, {MICRO_BATCHES} micro-batches of {MICRO_BATCH_SIZE} x {TOKENS}",
            {"ratio": round(statistics.median(runs), 4), "runs": [round(run, 4) for run in runs]},
        )


if __name__ == "__main__":
    main()
