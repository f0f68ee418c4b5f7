"""Peak memory as the planner predicts it against what the allocator gave, and what a plan itself takes."""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from .pairs import write

PAGE = Path(__file__).with_suffix(".md")
TESTS = Path(__file__).parents[1] / "tests"  # the models are those of the tests, too
UNDER = 0.05  # a prediction that is lower by more than this has missed


# --- Errors


def found() -> Iterator[Any]:
    """One `Compared` for every model, way, optimizer and micro-batch size."""
    sys.path.insert(0, str(TESTS))
    from plan_models import CASES
    from plan_peaks import compared, ways_of

    torch.manual_seed(0)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for case in CASES:
        for name, way in ways_of(case).items():
            yield from compared(case, name, way, case.sizes)


def table(rows: Sequence[Any]) -> str:
    """One line a model and way; the columns are optimizers and, in each, micro-batch sizes from small to large."""
    optimizers = list(dict.fromkeys(row.optimizer for row in rows))
    text = "| kind | model | way | micro-batch sizes |" + "".join(f" {name} |" for name in optimizers)
    text += " counted, MB |\n|---|---|---|---|" + "--:|" * (len(optimizers) + 1) + "\n"
    for kind, model, way in dict.fromkeys((row.kind, row.model, row.way) for row in rows):
        line = [row for row in rows if (row.model, row.way) == (model, way)]
        sizes = ", ".join(str(size) for size in dict.fromkeys(row.size for row in line))
        errors = " | ".join(
            ", ".join(percent(row.error) for row in line if row.optimizer == name) for name in optimizers
        )
        least, most = (of(row.counted for row in line) / 1e6 for of in (min, max))
        text += f"| {kind} | {model} | {way} | {sizes} | {errors} | {least:.2f} to {most:.2f} |\n"
    return text


def percent(error: float) -> str:
    return f"{100 * error:+.1f} %"


def summary(rows: Sequence[Any]) -> dict[str, Any]:
    errors = [row.error for row in rows]
    sizes = sorted(map(abs, errors))
    return {
        "models": len({row.model for row in rows}),
        "settings": len(rows),
        "median_error": round(statistics.median(sizes), 5),
        "percentile_95_error": round(statistics.quantiles(sizes, n=20)[-1], 5),
        "largest_under_prediction": round(-min(0.0, *errors), 5),
        "largest_over_prediction": round(max(0.0, *errors), 5),
        "under_by_more_than_5_percent": sum(error < -UNDER for error in errors),
        "settings_that_fit_what_they_are_accepted_for": sum(row.counted <= row.accepted for row in rows),
    }


# --- What a plan takes


class Logits(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).logits


def causal(model: nn.Module, vocabulary: int, tokens: int) -> tuple[nn.Module, Any, Any, Any]:
    ids = torch.randint(0, vocabulary, (1, tokens))
    return model, None, {"input_ids": ids, "labels": ids}, None


def gpt2_small() -> tuple[nn.Module, Any, Any, Any]:
    return causal(transformers.GPT2LMHeadModel(transformers.GPT2Config()), 50257, 1024)


def resnet_50() -> tuple[nn.Module, Any, Any, Any]:
    model = Logits(transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000)))
    return model, nn.CrossEntropyLoss(), torch.randn(2, 3, 224, 224), torch.randint(0, 1000, (2,))


def llama_7b() -> tuple[nn.Module, Any, Any, Any]:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig())
    return causal(model, 32000, 2048)


class Shape(NamedTuple):
    make: Callable[[], tuple[nn.Module, Any, Any, Any]]
    sample: str
    batch_size: int
    memory: str


SHAPES = {
    "GPT-2 small": Shape(gpt2_small, "1024 tokens", 512, "24GiB"),
    "ResNet-50": Shape(resnet_50, "224 x 224 pixels", 256, "8GiB"),
    "Llama, 7 billion parameters, on the meta device": Shape(llama_7b, "2048 tokens", 64, "80GiB"),
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def cost(name: str) -> dict[str, Any]:
    """Seconds of a plan, and the most that it held beside the model, seen from outside: no less than it took."""
    from bigbatch.planner import plan

    torch.set_num_threads(1)
    shape = SHAPES[name]
    model, loss_fn, inputs, targets = shape.make()
    options: dict[str, Any] = {"batch_size": shape.batch_size, "memory": shape.memory, "optimizer": torch.optim.AdamW}
    before, start = resident_bytes(), time.perf_counter()
    made = plan(model, loss_fn, inputs, targets, **options)
    seconds = time.perf_counter() - start
    extra = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    return {"seconds": round(seconds, 2), "extra_bytes": extra, "how": made.how, "fits": made.fits}


def costs() -> dict[str, dict[str, Any]]:
    """Each shape in a process of its own, as its first plan, with the imports of the first run."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        taken = dict(zip(SHAPES, pool.map(cost, SHAPES), strict=True))
    what = "seconds of a plan in a fresh process, one thread, and resident bytes at its worst moment beside the model"
    figures = {f"{name}, {figure}": value for name, one in taken.items() for figure, value in one.items()}
    write("plan_cost", what, figures)
    return taken


# --- The page

HEAD = """# Peak memory: predicted against counted

`python -m benchmarks.plan` makes this page, on the CPU, in float32, with one thread. Counted are the bytes that the
allocator gave under `torch.profiler`, at the worst moment of two updates of 3 micro-batches with all optimizer state,
beside weights, buffers and the batch, which were there before. Predicted is what the planner says after windows
of a few samples a micro-batch under fake tensors. Weights are random, and the models small.

"plain" is `Accumulator` (with batch norm over the whole batch where a model has it), "checkpointed" the same with
`checkpoint=True`, "recompute" is `MicroBatched` with the loss on joined outputs. A way is left out where it does not
apply: no repeated blocks, a model that returns its own loss, batch norm, a loss that does not add up.
"""


def page(figures: Mapping[str, Any], lines: str, taken: Mapping[str, Mapping[str, Any]]) -> str:
    text = f"""{HEAD}
{figures["models"]} models, {figures["settings"]} settings:

- error without its sign: median {100 * figures["median_error"]:.2f} %, 95th percentile \
{100 * figures["percentile_95_error"]:.2f} %
- largest under-prediction {100 * figures["largest_under_prediction"]:.1f} %, largest over-prediction \
{100 * figures["largest_over_prediction"]:.1f} %
- under by more than 5 %: {figures["under_by_more_than_5_percent"]} settings
- inside the least memory that the planner accepts them for, its prediction with the margin: \
{figures["settings_that_fit_what_they_are_accepted_for"]} settings

{lines}
## What a plan takes

AdamW, every rung of the ladder. Memory is the most that the process held, less what it held with the model built.

| model | sample | batch | card | seconds | MB beside the model |
|---|---|--:|--:|--:|--:|
"""
    for name, one in taken.items():
        shape = SHAPES[name]
        text += f"| {name} | {shape.sample} | {shape.batch_size} | {shape.memory} "
        text += f"| {one['seconds']:.1f} | {one['extra_bytes'] / 1e6:.0f} |\n"
    return text


def main() -> None:
    taken = costs()
    rows = list(found())
    figures = summary(rows)
    what = "predicted peak against what the allocator gave: two updates of 3 micro-batches on the CPU, relative"
    write("plan_errors", what, {**figures, "rows": [row._asdict() for row in rows]})
    PAGE.write_text(page(figures, table(rows), taken))


if __name__ == "__main__":
    main()
