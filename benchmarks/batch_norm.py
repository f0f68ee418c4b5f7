"""Batch norm over the whole batch: how far from it each way is, what the device holds at the worst moment, and time."""

from __future__ import annotations

import contextlib
import copy
import statistics
import sys
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor, nn

import bigbatch
from bigbatch.core.batch import Batch
from bigbatch.core.batch_norm import arguments_of
from bigbatch.core.live import Live
from bigbatch.engines import offload

from .pairs import in_fresh_processes, paired, write

TABLE = Path(__file__).with_suffix(".md")
TESTS = Path(__file__).parents[1] / "tests"  # the models are those that the tests hold to the whole batch
HEAD = """# Batch norm over the whole batch: how far off is the gradient?

Made by `python -m benchmarks.batch_norm`, on the CPU in float64. Each model's gradient by micro-batches is compared
with that of one plain forward and backward over the whole batch: the length of their difference, relative to the
length of the whole batch's. "bigbatch" is `Accumulator` with `batch_norm="exact"` (`MicroBatched` where the loss ties
samples together); "by hand" is the usual loop, which adds up every micro-batch's loss by its share of the samples.
"""


# --- Errors


class Calls(torch.overrides.TorchFunctionMode):
    """Counts calls of batch norm that normalise by the samples at hand."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += arguments_of(func, args, kwargs or {}) is not None
        return func(*args, **(kwargs or {}))


def row(case: Any, size: int) -> tuple[str, int, float, float]:
    """Name, batch norms in one forward, error of bigbatch, error of accumulation by hand."""
    import laws
    from architectures import in_double
    from norm_models import errors

    with in_double():
        model, (inputs, _) = laws.made(case).model, laws.batch_of(case)  # the first time, making one runs it once
        with Calls() as calls, torch.no_grad():
            laws.called(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return case.name, calls.count, *errors(case, size)


def rows() -> dict[str, list[tuple[str, int, float, float]]]:
    """Title of a table -> its rows, the largest error by hand first."""
    sys.path.insert(0, str(TESTS))
    import norm_architectures
    import norm_models

    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    exact = [case for case in norm_models.CASES if not case.random and case.tolerance < 1e-9]
    tables = {
        "Architectures of transformers, small and with random weights; 5 samples in micro-batches of 3 and 2": [
            row(case, 3) for case in norm_architectures.CASES.values()
        ],
        "Small models, each with another use of batch norm; 10 samples in micro-batches of 3, 3, 2 and 2": [
            row(case, 3) for case in exact
        ],
    }
    return {title: sorted(lines, key=lambda line: (-line[3], line[0])) for title, lines in tables.items()}


def errors_table() -> None:
    tables = rows()
    text = HEAD
    for title, lines in tables.items():
        text += f"\n## {title}\n\n{summary(lines)}\n\n| model | batch norms | bigbatch | by hand |\n|---|--:|--:|--:|\n"
        text += "".join(f"| {name} | {count} | {ours:.0e} | {percent(plain)} |\n" for name, count, ours, plain in lines)
    TABLE.write_text(text)
    figures: dict[str, Any] = {}
    for kind, lines in zip(("architectures", "small_models"), tables.values(), strict=True):
        figures[kind] = len(lines)
        for way, errors in (("bigbatch", [line[2] for line in lines]), ("by_hand", [line[3] for line in lines])):
            figures |= {
                f"{kind}_{way}_{of.__name__}": float(f"{of(errors):.3g}") for of in (min, statistics.median, max)
            }
    write("batch_norm_errors", "length of the difference to the whole batch's gradient, relative, in float64", figures)


def summary(lines: list[tuple[str, int, float, float]]) -> str:
    ours, plain = [line[2] for line in lines], [line[3] for line in lines]
    return (
        f"{len(lines)} models. bigbatch: median {statistics.median(ours):.0e}, worst {max(ours):.0e}. By hand: median "
        f"{percent(statistics.median(plain))}, from {percent(min(plain))} to {percent(max(plain))}."
    )


def percent(error: float) -> str:
    return f"{error:.0e}" if error < 1e-6 else f"{100 * error:,.3g} %" if error < 10 else f"{100 * error:,.0f} %"


# --- Memory and time


class ResNet(nn.Module):
    """ResNet-18 for ten classes, with random weights."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
        config = transformers.ResNetConfig(layer_type="basic", num_labels=10, **sizes)
        self.body = transformers.ResNetForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.body(images).logits
        return logits


class HostMemory:
    """Counts what waits on the host, in memory that PyTorch knows nothing of."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0

    def take(self, tensor: Tensor) -> OnHost:
        copied = OnHost(tensor.numpy().copy(order="K"))
        weakref.finalize(copied, self._add, -copied.array.nbytes)
        self._add(copied.array.nbytes)
        return copied

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class OnHost:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:
        """A new tensor, which is counted."""
        return torch.from_numpy(self.array).clone()


@contextlib.contextmanager
def device_beside_host() -> Iterator[HostMemory]:
    """The CPU plays the device: micro-batches are copied to it as they are asked for, and what is offloaded leaves."""
    host = HostMemory()

    def there(self: Batch) -> Iterator[Any]:
        return (piece._replace(inputs=piece.inputs.clone(), targets=piece.targets.clone()) for piece in self.pieces)

    with (
        mock.patch.object(offload, "is_on_host", lambda tensor: False),
        mock.patch.object(offload, "to_host", host.take),
        mock.patch.object(Batch, "there", there),
    ):
        yield host


def peaks(micro_batches: int, samples: int, side: int) -> dict[str, Any]:
    """Bytes with weights, gradients and inputs; `micro_batches` of one is the plain whole batch."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(samples, 3, side, side), torch.randint(0, 10, (samples,))
    loss_fn, plain = nn.CrossEntropyLoss(), ResNet()
    forward_bytes: list[int] = []
    with Live() as live, device_beside_host() as host:
        model = copy.deepcopy(plain)

        def backward_begins(grad: Tensor) -> None:
            if not forward_bytes:
                forward_bytes.append(live.peak_bytes)
                live.reset_peak()

        model.register_forward_hook(lambda module, given, logits: logits.register_hook(backward_begins) and None)
        if micro_batches == 1:
            loss_fn(model(inputs.clone()), targets.clone()).backward()
        else:
            door = bigbatch.Accumulator(model, loss_fn, micro_batch_size=samples // micro_batches)
            door.backward(inputs, targets)
    return {
        "bytes": max(*forward_bytes, live.peak_bytes),
        "forward_bytes": forward_bytes[0],
        "backward_bytes": live.peak_bytes,
        "host_bytes": host.peak_bytes,
    }


def memory() -> None:
    """The smaller of the two batches is there to show that weights and gradients are no part of what is saved."""
    weights = sum(parameter.nbytes for parameter in ResNet().parameters())
    for samples, side, sizes in ((256, 96, (4, 16, 64)), (64, 64, (16,))):
        found = {size: peaks(size, samples, side) for size in (1, *sizes)}
        figures: dict[str, Any] = {"weights_and_gradients_bytes": 2 * weights, "whole_batch_bytes": found[1]["bytes"]}
        for size in sizes:
            figures[f"ratio_{size}"] = round(found[size]["bytes"] / found[1]["bytes"], 4)
            figures |= {f"{name}_{size}": value for name, value in found[size].items()}
        write(
            f"batch_norm_memory_{samples}",
            f"live bytes of one forward and backward of a ResNet-18 on {samples} images of {side} x {side}, with "
            f"weights, gradients and inputs, by {', '.join(map(str, sizes))} micro-batches against the whole batch; "
            "counted on the CPU, which plays the device: what is offloaded lies in memory that is counted apart "
            "(host_bytes)",
            figures,
        )


MICRO_BATCHES, MICRO_BATCH_SIZE, PAIRS = 16, 16, 2


def ratio(against: str) -> float:
    """The median ratio of one run against "whole" or "plain", for images of the side that follows, as in "plain 64"."""
    other, side = against.split()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads on a shared machine measure the neighbours
    model, loss_fn = ResNet(), nn.CrossEntropyLoss()
    samples = MICRO_BATCHES * MICRO_BATCH_SIZE
    inputs, targets = torch.randn(samples, 3, int(side), int(side)), torch.randint(0, 10, (samples,))
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=MICRO_BATCH_SIZE)

    def ours() -> None:
        accumulator.backward(inputs, targets)
        model.zero_grad()

    def whole() -> None:
        loss_fn(model(inputs), targets).backward()
        model.zero_grad()

    def plain() -> None:
        for images, labels in zip(inputs.split(MICRO_BATCH_SIZE), targets.split(MICRO_BATCH_SIZE), strict=True):
            loss_fn(model(images), labels).backward(gradient=torch.tensor(1 / MICRO_BATCHES))
        model.zero_grad()

    return statistics.median(paired(ours, {"whole": whole, "plain": plain}[other], PAIRS))


def speed() -> None:
    """The smaller pictures show what micro-batches cost that are too small to keep a core busy."""
    for side in (96, 64):
        figures: dict[str, Any] = {}
        for other in ("whole", "plain"):
            runs = in_fresh_processes(ratio, f"{other} {side}", runs=3)
            figures[other] = round(statistics.median(runs), 3)
            figures[f"{other}_runs"] = [round(run, 3) for run in runs]
        write(
            f"batch_norm_speed_{side}",
            f"Accumulator(batch_norm='exact') / the whole batch, and / plain accumulation, whose gradient is another "
            f"one: ResNet-18, {MICRO_BATCHES} micro-batches of {MICRO_BATCH_SIZE} images of {side} x {side}, float32, "
            "one thread, zero_grad",
            figures,
        )


def main() -> None:
    errors_table()
    memory()
    speed()


if __name__ == "__main__":
    main()
