"""Error of a bfloat16 gradient against float64: one whole batch, plain accumulation, and ours, at 1 ... 1024 pieces."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bigbatch

from .pairs import write

MICRO_BATCHES = [2**power for power in range(11)]
MICRO_BATCH_SIZE, INPUTS, WIDTH, CLASSES, SEEDS = 4, 32, 64, 10, 4
WAYS = ("whole", "plain", "delivered", "unrounded", "ours", "door_2", "float32")
PAGE = Path(__file__).parent / "precision.md"


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.float(), targets)


def gradient(model: nn.Module, step: Callable[[nn.Module], object]) -> Tensor:
    """What the step leaves in `.grad` of a copy, or what it returns as the gradient."""
    model = copy.deepcopy(model)
    found = step(model)
    grads = found if isinstance(found, list) else [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([grad.flatten().double() for grad in grads])


def add(total: Tensor, term: Tensor) -> None:
    total += term


def errors_of(micro_batches: int, seed: int, ways: Sequence[str]) -> dict[str, float]:
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

    def delivered(model: nn.Module) -> list[Tensor]:
        sums = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for parameter, total in zip(model.parameters(), sums, strict=True):
            parameter.register_hook(functools.partial(add, total))
        plain(model)
        return [total.to(torch.bfloat16) for total in sums]

    def unrounded(model: nn.Module) -> list[Tensor]:
        linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
        sums = {layer: [torch.zeros_like(p, dtype=torch.float64) for p in layer.parameters()] for layer in linear}

        def watch(layer: nn.Module, inputs: tuple[Tensor], outputs: Tensor) -> None:
            (weight, bias), rows = sums[layer], inputs[0].detach().double()
            outputs.register_hook(lambda g: add(weight, g.double().T @ rows))
            outputs.register_hook(lambda g: add(bias, g.double().sum(0)))

        for layer in linear:
            layer.register_forward_hook(watch)
        plain(model)
        return [total.to(torch.bfloat16) for layer in linear for total in sums[layer]]

    def ours(grad_dtype: torch.dtype | None) -> Callable[[nn.Module], object]:
        options = {"micro_batch_size": MICRO_BATCH_SIZE, "reduction": "mean", "grad_dtype": grad_dtype}
        return lambda model: bigbatch.Accumulator(model, loss_fn, **options).backward(inputs, targets)

    def door_2(model: nn.Module) -> None:
        loss_fn(bigbatch.MicroBatched(model, MICRO_BATCH_SIZE)(inputs), targets).backward()

    right = gradient(
        copy.deepcopy(model).double(), lambda model: F.cross_entropy(model(inputs.double()), targets).backward()
    )
    steps = dict(zip(WAYS, (whole, plain, delivered, unrounded, ours(None), door_2, ours(torch.float32)), strict=True))
    return {name: ((gradient(model, steps[name]) - right).norm() / right.norm()).item() for name in ways}


def errors(micro_batches: int, seeds: int = SEEDS, ways: Sequence[str] = WAYS) -> dict[str, float]:
    """The root mean square over some draws.

    Args:
        micro_batches: how many the batch is cut into.
        seeds: how many draws.
        ways: "whole", "plain"; "ours" and "door_2" with rounded sums, "float32" with the sums as they are; and two
            sums without any error, rounded once: of what autograd "delivered" for each micro-batch, and of what it
            would deliver "unrounded", from the same activations and their gradients.
    """
    found = [errors_of(micro_batches, seed, ways) for seed in range(seeds)]
    return {name: math.sqrt(sum(one[name] ** 2 for one in found) / seeds) for name in found[0]}


def main() -> None:
    torch.set_num_threads(1)
    rows = {micro_batches: errors(micro_batches) for micro_batches in MICRO_BATCHES}
    what = f"relative error of a bfloat16 gradient against float64, root mean square of {SEEDS} draws"
    write("precision", what, {"errors": [{"micro_batches": k, **row} for k, row in rows.items()]})
    shown = {"whole batch": "whole", "plain accumulation": "plain", "ours": "ours", "exact sum": "delivered"}
    shown |= {"exact sum, unrounded": "unrounded", "ours, `grad_dtype=torch.float32`": "float32"}
    table = [
        f"| micro-batches | {' | '.join(shown)} | ours / whole |",
        "|---:" * (len(shown) + 2) + "|",
        *(
            f"| {k} | {' | '.join(f'{e[name]:.2e}' for name in shown.values())} | {e['ours'] / e['whole']:.2f} |"
            for k, e in rows.items()
        ),
    ]
    PAGE.write_text(HEAD + "\n".join(table) + "\n")


HEAD = f"""# Error of a bfloat16 gradient

A perceptron with bfloat16 weights ({INPUTS}, {WIDTH}, {WIDTH}, {CLASSES}), micro-batches of {MICRO_BATCH_SIZE}
samples. ‖g - g₆₄‖ / ‖g₆₄‖, where g₆₄ is the float64 gradient of the same weights and the whole batch; the root mean
square of {SEEDS} draws. `python -m benchmarks.precision` makes this page.

Three things round. Activations do, in the same way for everybody. Autograd rounds the gradient of every backward to
the parameter's dtype: once for the whole batch, once for each micro-batch. And the sum is rounded to bfloat16 for the
optimizer, unless `grad_dtype=torch.float32` leaves it.

The last two add up in ours, where the whole batch rounds once. No way of summing mends it: "exact sum" adds what
autograd delivers for each micro-batch without any error, rounds once, and is off by as much as ours. What is missing
was lost before: "exact sum, unrounded" makes the weight gradients of the same backwards in float64, rounds their sum
once, and is the whole batch. A kernel that adds each micro-batch's weight gradient to a float32 sum would do so too;
PyTorch has none that autograd calls. The weights of micro-batches play no part: here they are powers of two, which
rounding does not see. An optimizer with float32 weights of its own does without the second rounding: its gradients
are in the column of `grad_dtype=torch.float32`.

"""

if __name__ == "__main__":
    main()
