"""Runs a batch at the size that the tuner chooses, and the same batch again, smaller, where memory runs out.

Here decisions meet the device: this is the only file that asks it for bytes and seconds. What to do next is decided in
`tune.py`, from what is measured here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from bigbatch.core.gradients import is_to_be_tried_again
from bigbatch.core.live import Live
from bigbatch.core.models import generators_of
from bigbatch.core.rng import snapshot
from bigbatch.core.split import check_size
from bigbatch.errors import MicroBatchTooLarge, OptionError
from bigbatch.fit.budget import budget_bytes
from bigbatch.fit.need import Need, Place, bytes_of
from bigbatch.fit.oom import free_cached, is_out_of_memory, let_go
from bigbatch.fit.tune import Tuner

Answer = TypeVar("Answer")
MOMENTS = 2  # what the first step of Adam allocates for every trained number; fewer for most other optimizers
PENDING = 16  # windows whose end the device has not reached yet, and that are asked again at the next one
COUNTED = 2  # windows in which the CPU counts its bytes; two sizes tell a fixed part from a part for each sample


@dataclass
class Sizer:
    """The automatic micro-batch size of one door.

    Attributes:
        memory: the budget as the user stated it, see `budget_bytes`.
        tuner: all that is known so far; its record is the state that a checkpoint keeps.
    """

    memory: int | str | float | None
    tuner: Tuner = field(default_factory=Tuner)
    first_versions: list[int] | None = None
    pending: list[Callable[[], bool]] = field(default_factory=list)

    def run(self, attempt: Callable[[int], Answer], need: Need) -> tuple[Answer, int]:
        """What `attempt(micro_batch_size)` returns, and how many tries ran out of memory before.

        Args:
            attempt: runs the batch; after an error it has left everything as it was, but for random numbers.
            need: what the batch asks of the device.

        Raises:
            MicroBatchTooLarge: one sample does not fit.
        """
        if not need.samples:
            return attempt(1), 0
        size = self.size_for(need)
        put_back = snapshot(generators_of(need.place.inner))
        retries = 0
        while True:
            try:
                return self._timed(attempt, size, need), retries
            except BaseException as error:
                if not (is_out_of_memory(error) and is_to_be_tried_again(error)):
                    raise
                let_go(error)
            put_back()
            free_cached(need.place.device or torch.device("cpu"))
            retries += 1
            size = self.smaller(size, need)

    def size_for(self, need: Need) -> int:
        """The size that the next batch begins with."""
        self._settle_pending()
        return need.samples if need.whole_only else self._chosen(need)

    def smaller(self, size: int, need: Need) -> int:
        """The next size after one that ran out of memory."""
        if size == 1:
            raise MicroBatchTooLarge(
                f"a batch of {need.samples} samples was asked for in micro-batches that fit",
                f"memory ran out with one sample at a time ({need.cost:.0f} elements in its largest field)",
                "free memory, make the model or the sample smaller, or give it a larger budget (memory=...)",
            )
        self.tuner = self.tuner.failed(size, need.cost)
        return min(self._chosen(need), size - 1)

    def state_dict(self) -> dict[str, Any]:
        self._settle_pending()
        return self.tuner.to_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tuner = Tuner.from_dict(state)

    def __getstate__(self) -> dict[str, Any]:
        """For copy and pickle: measurements that wait for a device stay behind."""
        return {**vars(self), "pending": []}

    def _chosen(self, need: Need) -> int:
        return self.tuner.choose(need.samples, need.cost, self._free(need.place))

    def _timed(self, attempt: Callable[[int], Answer], size: int, need: Need) -> Answer:
        reserve = self._reserve(need.place)
        if need.place.on_cuda():  # pragma: no cover - needs CUDA
            return self._timed_on_cuda(attempt, size, need, reserve)
        counting = self.memory is not None and sum(item.peak_bytes is not None for item in self.tuner.seen) < COUNTED
        counter: AbstractContextManager[Any] = Live() if counting else nullcontext()
        start = time.perf_counter()
        with counter as live:
            answer = attempt(size)
        peak = live.peak_bytes + reserve if counting else None
        self.tuner = self.tuner.measured(size, need.cost, time.perf_counter() - start, need.samples, peak)
        return answer

    def _timed_on_cuda(
        self, attempt: Callable[[int], Answer], size: int, need: Need, reserve: int
    ) -> Answer:  # pragma: no cover - needs CUDA
        """Time is read off events at a later window, so that this one does not wait for the device."""
        device = need.place.device
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        answer = attempt(size)
        end.record()
        peak = torch.cuda.max_memory_allocated(device) - before + reserve

        def measured() -> bool:
            ready = bool(end.query())  # type: ignore[no-untyped-call]
            if ready:
                seconds = start.elapsed_time(end) / 1e3
                self.tuner = self.tuner.measured(size, need.cost, seconds, need.samples, peak)
            return ready

        self.pending.append(measured)
        return answer

    def _settle_pending(self) -> None:
        self.pending = [measured for measured in self.pending if not measured()][-PENDING:]

    def _free(self, place: Place) -> int | None:
        """Bytes that a window may use beside what is there; None where no limit is known."""
        budget = budget_bytes(self.memory, place.device)
        if budget is None:
            return None
        if not self.tuner.fixed_bytes:
            gradients = bytes_of([parameter for parameter in place.trained() if parameter.grad is None])
            self.tuner = replace(self.tuner, fixed_bytes=float(gradients + self._reserve(place)))
        if self.memory is None:
            return budget
        there = torch.cuda.memory_allocated(place.device) if place.on_cuda() else place.weight_bytes()
        return max(0, budget - there)

    def _reserve(self, place: Place) -> int:
        """Bytes for the optimizer's state, until the weights have moved for the first time (on the CPU always: there
        nobody counts what the optimizer holds)."""
        if self.memory is None and not place.on_cuda():
            return 0
        trained = place.trained()
        versions = [parameter._version for parameter in trained]
        if self.first_versions is None:
            self.first_versions = versions
        stepped = place.on_cuda() and versions != self.first_versions
        return 0 if stepped else MOMENTS * bytes_of(trained)


class Shown:
    """Outputs for the user's metrics, handed on when the batch is through: a try that failed is not shown."""

    def __init__(self, on_outputs: Callable[[Any, Any], object] | None) -> None:
        self.on_outputs = on_outputs
        self.kept: list[tuple[Any, Any]] = []

    def again(self) -> Callable[[Any, Any], object] | None:
        """What a new try calls; it forgets what the last one showed."""
        self.kept = []
        return None if self.on_outputs is None else lambda *shown: self.kept.append(shown)

    def hand_on(self) -> None:
        for outputs, targets in self.kept:
            if self.on_outputs is not None:
                self.on_outputs(outputs, targets)


def check_auto(micro_batch_size: Any, memory: Any) -> None:
    """A size is "auto", a number or None; a budget goes with "auto"."""
    if micro_batch_size == "auto":
        if memory is not None:
            budget_bytes(memory)
        return
    check_size(micro_batch_size)
    if memory is not None:
        raise OptionError(
            f"memory={memory!r} was asked for with micro_batch_size={micro_batch_size!r}",
            "a budget only guides the automatic size",
            'leave micro_batch_size out, or pass "auto"',
        )
