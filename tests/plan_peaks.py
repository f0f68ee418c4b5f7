"""Peak memory of two real updates of a model, as the allocator counts it and as the planner predicts it.

`counted` runs a model in one way by the public surface; `compared` puts the prediction beside it.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import bigbatch
from bigbatch.core.batch_norm import by_batch
from bigbatch.core.models import call, inner_modules
from bigbatch.engines.blocks import places_of
from bigbatch.engines.turns import Turns
from bigbatch.errors import ModelError
from bigbatch.planner.ladder import Room
from bigbatch.planner.predict import Prediction, fixed_of, job_of, predicted
from bigbatch.planner.records import Way
from bigbatch.planner.scratch import peak_of
from plan_models import Case

MICRO_BATCHES, UPDATES = 3, 2
EXISTED = ("parameters", "buffers", "inputs")  # before counting began
Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def sgd(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3)


OPTIMIZERS: dict[str, Optimizer] = {"AdamW": torch.optim.AdamW, "SGD": sgd}


def ways_of(case: Case) -> dict[str, Way]:
    """The ways that apply to a model, by name."""
    inner = inner_modules([case.make()])
    if any(map(by_batch, inner)):
        return {"plain": Way(engine="lockstep")}
    found = {}
    if case.adds_up:
        found["plain"] = Way(engine="sequential")
        if can_be_checkpointed(inner):
            found["checkpointed"] = Way(engine="sequential", checkpoint=True)
    if case.loss_fn is not None:
        found["recompute"] = Way(engine="joined", activations="recompute")
    return found


def can_be_checkpointed(inner: list[nn.Module]) -> bool:
    try:
        places_of(inner)
    except ModelError:
        return False
    return True


# --- Counted


def update_of(model: nn.Module, case: Case, way: Way, size: int) -> Callable[[Any, Any], object]:
    """What leaves the gradient of a batch in `.grad`, by the public surface."""
    if way.engine == "joined":
        wrapped, loss_fn = bigbatch.MicroBatched(model, size, activations=way.activations), case.loss_fn
        assert loss_fn is not None
        return lambda inputs, targets: loss_fn(call(wrapped, inputs), targets).backward()
    options: dict[str, Any] = {"checkpoint": True} if way.checkpoint else {}
    if case.loss_fn is None:
        options["reduction"] = "mean"
    return bigbatch.Accumulator(model, case.loss_fn, micro_batch_size=size, **options).backward


def updates(model: nn.Module, case: Case, way: Way, size: int, make: Optimizer, batch: Any) -> None:
    optimizer = make(parameter for parameter in model.parameters() if parameter.requires_grad)
    update = update_of(model, case, way, size)
    for _ in range(UPDATES):
        update(*batch)
        optimizer.step()
        optimizer.zero_grad()


def counted(case: Case, way: Way, size: int, optimizer: str) -> int:
    """Bytes that the CPU's allocator had given away at the worst moment of two updates, for all but what was there."""
    model, batch = case.make(), case.batch(size * MICRO_BATCHES)
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record, counted_in_threads():
        updates(model, case, way, size, OPTIMIZERS[optimizer], batch)
    return peak_of(record)


@contextmanager
def counted_in_threads() -> Iterator[None]:
    """The profiler follows one thread; here it follows the threads of batch norm's micro-batches, too."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    current = library._ZN3c1020ThreadLocalDebugInfo7currentEv
    put = library._ZN3c1020ThreadLocalDebugInfo22_forceCurrentDebugInfoESt10shared_ptrIS0_E
    for function in (current, put):
        function.restype, function.argtypes = None, [ctypes.c_void_p]
    start, work = Turns._start, Turns._work
    handed: dict[int, Any] = {}

    def started(self: Turns, k: int) -> int:
        handed[k] = (ctypes.c_void_p * 2)()  # a shared pointer to what the thread at hand reports to
        current(handed[k])
        return start(self, k)

    def worked(self: Turns, k: int) -> None:
        put(handed[k])
        try:
            work(self, k)
        finally:
            put((ctypes.c_void_p * 2)())

    with mock.patch.object(Turns, "_start", started), mock.patch.object(Turns, "_work", worked):
        yield


# --- Predicted


def predictions_of(case: Case, way: Way, optimizers: Iterable[str] = OPTIMIZERS) -> dict[str, Prediction]:
    """One prediction for each optimizer, from one trace."""
    job = job_of(case.make(), case.loss_fn, *case.batch(4))
    fixed = {name: fixed_of(replace(job, optimizer=OPTIMIZERS[name])) for name in optimizers}
    prediction = predicted(job, way)
    return {name: replace(prediction, fixed=fixed[name]) for name in fixed}


class Compared(NamedTuple):
    """Bytes of a setting beside what was there before; `accepted` is the least room that the planner runs it in."""

    kind: str
    model: str
    way: str
    optimizer: str
    size: int
    counted: int
    predicted: int
    accepted: int

    @property
    def error(self) -> float:
        """Relative to what was counted; below zero where the prediction is too low."""
        return self.predicted / self.counted - 1


def compared(
    case: Case, name: str, way: Way, sizes: Iterable[int], optimizers: Iterable[str] = OPTIMIZERS
) -> Iterator[Compared]:
    """Prediction and count, one for each optimizer and size."""
    updates(
        case.make(), case, way, case.sizes[0], sgd, case.batch(case.sizes[0])
    )  # what kernels keep from a first call
    for optimizer, prediction in predictions_of(case, way, optimizers).items():
        for size in sizes:
            peak = prediction.at(size, MICRO_BATCHES)
            there = sum(peak.kinds.get(kind, 0) for kind in EXISTED)
            margin = Room(size * MICRO_BATCHES, 0, on_cuda=False).margin(peak, prediction.fixed)
            own = peak.bytes - there
            yield Compared(
                case.kind, case.name, name, optimizer, size, counted(case, way, size, optimizer), own, own + margin
            )
