"""A process of its own in which the CPU allocator really refuses: one window under a limit of the address space."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAMPLES, WIDTH, LAYERS = 65536, 64, 6


class Deep(nn.Module):
    """Every layer keeps 32 MiB for 65536 samples in float64, three times over."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = x.repeat_interleave(WIDTH // x.size(1), dim=1)
        for layer in self.layers:
            x = layer(x).tanh()
        return x.mean(1)


class Wide(Deep):
    """One sample becomes 512 MiB."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layers[0](x.repeat_interleave(WIDTH, dim=1).repeat(1 << 20, 1)).mean().expand(len(x))


def job(kind: str, samples: int) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    model = (Wide if kind == "wide" else Deep)().double()
    return model, torch.randn(samples, 1, dtype=torch.float64), torch.randn(samples, dtype=torch.float64)


def limited(more: int) -> None:
    """From here on the process may take so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, resource.RLIM_INFINITY))


def main(kind: str, door: str, more: str, out: str) -> None:
    from bigbatch import Accumulator, MicroBatched
    from bigbatch.errors import MicroBatchTooLarge
    from bigbatch.fit.tune import FIRST_WAIT

    torch.set_num_threads(1)
    loss_fn = nn.MSELoss()

    def step(model: nn.Module, inputs: Tensor, wanted: Tensor) -> dict[str, Any]:
        if door == "2":
            wrapped = MicroBatched(model)
            loss_fn(wrapped(inputs), wanted).backward()
            return {"failed": (wrapped._door.sizer.tuner.wait // FIRST_WAIT).bit_length() - 1}  # each doubles the wait
        accumulator = Accumulator(model, loss_fn)
        accumulator.backward(inputs, wanted)
        return {"failed": accumulator.report.retries, "size": accumulator.report.micro_batch_size}

    step(*job("deep", 8))  # what PyTorch loads and starts at the first step is there before the limit
    model, inputs, wanted = job(kind, 2 if kind == "wide" else SAMPLES)
    limited(int(more) << 20)
    try:
        facts = step(model, inputs, wanted)
    except MicroBatchTooLarge as error:
        facts = {"error": str(error)}
    facts["calls"] = int(model.calls)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.save(gradients, out)
    print(json.dumps(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
