"""Runs a batch at the size that the tuner chooses, and the same batch again, smaller, where memory runs out.

Here decisions meet the device: this is the only file that asks it for bytes and seconds. What to do next is decided in
`tune.py`, from what is measured here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from bigbatch.core.gradients import is_to_be_tried_again
from bigbatch.core.models import generators_of
from bigbatch.core.rng import preserved_rng, snapshot
from bigbatch.core.split import check_size
from bigbatch.errors import MicroBatchTooLarge, OptionError
from bigbatch.fit.budget import budget_bytes
from bigbatch.fit.curve import UNSEEN, foreseen, planned
from bigbatch.fit.meter import Meter, course_of
from bigbatch.fit.need import Need, Place, bytes_of
from bigbatch.fit.oom import free_cached, is_out_of_memory, let_go
from bigbatch.fit.tune import Tuner

Answer = TypeVar("Answer")
MOMENTS = 2  # what the first step of Adam allocates for every trained number; fewer for most other optimizers
PENDING = 16  # windows whose end the device has not reached yet, and that are asked again at the next one
COUNTED = 2  # sizes at which bytes are counted, operator by operator; two tell a fixed part from a part for each sample


@dataclass(frozen=True)
class Ran:
    """A batch that went through: at which size, after how many tries that did not fit, and what was measured."""

    size: int
    cost: float
    samples: int
    retries: int
    meter: Meter


@dataclass
class Sizer:
    """The automatic micro-batch size of one door.

    Attributes:
        memory: the budget as the user stated it, see `budget_bytes`.
        tuner: all that is known so far; its record is the state that a checkpoint keeps.
        unfinished: a batch whose backward has begun outside of here; if it never ends, its size has failed.
        predict: `predict(micro_batch_size)`, bytes of a batch beside weights and optimizer state, where a plan tells.
    """

    memory: int | str | float | None
    tuner: Tuner = field(default_factory=Tuner)
    first_versions: list[int] | None = None
    pending: list[Callable[[], bool]] = field(default_factory=list)
    unfinished: Ran | None = None
    predict: Callable[[int], float] | None = None

    def run(self, attempt: Callable[[int], Answer], need: Need) -> tuple[Answer, int]:
        """What `attempt(micro_batch_size)` returns, and how many tries ran out of memory before.

        Args:
            attempt: runs the batch; after an error it has left everything as it was, but for random numbers.
            need: what the batch asks of the device.

        Raises:
            MicroBatchTooLarge: one sample does not fit.
        """
        answer, ran = self.begin(attempt, need)
        self.learn(ran)
        return answer, ran.retries

    def begin(self, attempt: Callable[[int], Answer], need: Need) -> tuple[Answer, Ran]:
        """The same for a batch whose backward comes later: `learn` is for the caller, when all of it is measured."""
        size = self.size_for(need)
        put_back = snapshot(generators_of(need.place.inner))
        retries = 0
        while True:
            meter = Meter(need.place.device, self._counts(need.place))
            try:
                with meter:
                    answer = attempt(size)
                return answer, Ran(size, need.cost, need.samples, retries, meter)
            except BaseException as error:
                if not (is_out_of_memory(error) and is_to_be_tried_again(error)):
                    raise
                let_go(error)
            put_back()
            free_cached(need.place.device or torch.device("cpu"))
            retries += 1
            size = self.smaller(size, need)

    def learn(self, ran: Ran) -> None:
        """Takes in what was measured, now or as soon as the device has come to the end of it."""

        def measured() -> bool:
            seconds = ran.meter.seconds()
            if seconds is not None:
                self.tuner = self.tuner.measured(ran.size, ran.cost, seconds, ran.samples, ran.meter.peak_bytes)
            return seconds is not None

        if ran.samples:
            self.pending.append(measured)
            if ran.meter.device is None:
                self._settle_pending()

    def size_for(self, need: Need) -> int:
        """The size that the next batch begins with."""
        self._settle_pending()
        if self.unfinished is not None:
            self.tuner = self.tuner.failed(self.unfinished.size, self.unfinished.cost)
            self.unfinished = None
        if not need.samples:
            return 1
        self._foresee(need)
        return self._chosen(need)

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
        return {**vars(self), "pending": [], "unfinished": None}

    def _chosen(self, need: Need) -> int:
        return self.tuner.choose(need.samples, need.cost, self._free(need.place))

    def _settle_pending(self) -> None:
        self.pending = [measured for measured in self.pending if not measured()][-PENDING:]

    def _counts(self, place: Place) -> bool:
        """Whether bytes are to be counted one operator after the other: where they are bounded, at the first sizes."""
        bounded = self.memory is not None or place.on_cuda()
        return bounded and sum(item.peak_bytes is not None for item in self.tuner.seen) < COUNTED

    def _foresee(self, need: Need) -> None:
        """A prediction from a plan, or from one sample and from two, where nothing has run and a budget is known."""
        tuner, place = self.tuner, need.place
        if need.probe is None or need.samples < 3 or tuner.seen or tuner.failures or tuner.sample_bytes:
            return
        room = self._free(place)
        if room is None:
            return
        if self.predict is not None:
            each, fixed = planned(self.predict, need.samples, room)
            self.tuner = replace(tuner, sample_bytes=each, fixed_bytes=fixed, at_cost=need.cost)
            return
        gradients = [bytes_of([parameter]) for parameter in place.trained()]
        found: list[tuple[tuple[int, int], list[int]]] = []
        for size in (1, 2):
            with preserved_rng(generators_of(place.inner)):
                course = course_of(partial(need.probe, size), place.device)
            if course is None:
                break
            found.append(course)
            if 2 * max(course[1]) - sum(gradients) > room:  # two would not fit, as far as one can tell
                break
        if found:
            ((few, held), small), ((many, _), large) = found[0], found[-1]
            each, fixed = foreseen(small, large, (few, many), room - held, gradients)
            self.tuner = replace(self.tuner, sample_bytes=UNSEEN * each, fixed_bytes=fixed + held, at_cost=need.cost)

    def _free(self, place: Place) -> int | None:
        """Bytes that a window may use beside what is there and what the optimizer will need; None without a limit."""
        budget = budget_bytes(self.memory, place.device)
        if budget is None:
            return None
        if not self.tuner.fixed_bytes:
            gradients = bytes_of([parameter for parameter in place.trained() if parameter.grad is None])
            self.tuner = replace(self.tuner, fixed_bytes=float(gradients))
        if self.memory is not None:
            budget -= torch.cuda.memory_allocated(place.device) if place.on_cuda() else place.weight_bytes()
        return max(0, budget - self._reserve(place))

    def _reserve(self, place: Place) -> int:
        """Bytes for the optimizer's state, until the weights have moved for the first time (on the CPU always: there
        nobody counts what the optimizer holds)."""
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
