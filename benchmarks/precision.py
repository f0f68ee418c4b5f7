"""Error of a bfloat16 gradient against float64: one whole batch, plain accumulation, and ours, at 1 ... 1024 pieces."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch

from .pairs import write

MICRO_BATCHES = [2**power for power in range(11)]
MICRO_BATCH_SIZE, INPUTS, WIDTH, CLASSES, SEEDS = 4, 32, 64, 10, 4
PAGE = Path(__file__).parent / "precision.md"


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets)


def gradient(model: nn.Module, step: Callable[[nn.Module], object]) -> Tensor:
    model = copy.deepcopy(model)
    step(model)
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def errors_of(micro_batches: int, seed: int) -> dict[str, float]:
    """‖g - g64‖ / ‖g64‖ of one draw of weights and samples; the float64 model has the same bfloat16 weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = nn.Linear(INPUTS, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, CLASSES)
        model = nn.Sequential(*layers).to(torch.bfloat16)
        inputs = torch.randn(micro_batches * MICRO_BATCH_SIZE, INPUTS).to(torch.bfloat16)
        targets = torch.randint(0, CLASSES, (len(inputs),))

    def whole(model: nn.Module) -> None:
        loss_fn(model(inputs), targets).backward()

    def plain(model: nn.Module) -> None:
        for rows, labels in zip(inputs.split(MICRO_BATCH_SIZE), targets.split(MICRO_BATCH_SIZE), strict=True):
            (loss_fn(model(rows), labels) / micro_batches).backward()

    def ours(grad_dtype: torch.dtype | None) -> Callable[[nn.Module], object]:
        options = {"micro_batch_size": MICRO_BATCH_SIZE, "reduction": "mean", "grad_dtype": grad_dtype}
        return lambda model: bigbatch.Accumulator(model, loss_fn, **options).backward(inputs, targets)

    def door_2(model: nn.Module) -> None:
        loss_fn(bigbatch.MicroBatched(model, MICRO_BATCH_SIZE)(inputs), targets).backward()

    right = gradient(
        copy.deepcopy(model).double(), lambda model: F.cross_entropy(model(inputs.double()), targets).backward()
    )
    ways = {"whole": whole, "plain": plain, "ours": ours(None), "door_2": door_2, "float32": ours(torch.float32)}
    return {name: ((gradient(model, step) - right).norm() / right.norm()).item() for name, step in ways.items()}


def errors(micro_batches: int, seeds: int = SEEDS) -> dict[str, float]:
    """The root mean square over some draws."""
    found = [errors_of(micro_batches, seed) for seed in range(seeds)]
    return {name: math.sqrt(sum(one[name] ** 2 for one in found) / seeds) for name in found[0]}


def main() -> None:
    torch.set_num_threads(1)
    rows = {micro_batches: errors(micro_batches) for micro_batches in MICRO_BATCHES}
    what = f"relative error of a bfloat16 gradient against float64, root mean square of {SEEDS} draws"
    write("precision", what, {"errors": [{"micro_batches": k, **row} for k, row in rows.items()]})
    table = [
        "| micro-batches | whole batch | plain accumulation | ours | ours / whole | ours, `grad_dtype=torch.float32` |",
        "|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {k} | {e['whole']:.2e} | {e['plain']:.2e} | {e['ours']:.2e} | {e['ours'] / e['whole']:.2f} "
            f"| {e['float32']:.2e} |"
            for k, e in rows.items()
        ),
    ]
    PAGE.write_text(HEAD + "\n".join(table) + "\n")


HEAD = f"""# Error of a bfloat16 gradient

A perceptron with bfloat16 weights ({INPUTS}, {WIDTH}, {WIDTH}, {CLASSES}), micro-batches of {MICRO_BATCH_SIZE}
samples. ‖g - g₆₄‖ / ‖g₆₄‖, where g₆₄ is the float64 gradient of the same weights and the whole batch; the root mean
square of {SEEDS} draws. `python -m benchmarks.precision` makes this page.

Three things round. Activations do, in the same way for everybody. Autograd rounds the gradient of every backward to
the parameter's dtype: once for the whole batch, once for each micro-batch, whose errors average out as far as their
gradients agree. And the sum is rounded to bfloat16 for the optimizer, unless `grad_dtype=torch.float32` leaves it.

"""

if __name__ == "__main__":
    main()
