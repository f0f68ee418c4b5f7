"""The ladder: every way to run a batch on a card, what each needs, and the cheapest that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from bigbatch.engines.blocks import repeated_blocks
from bigbatch.planner.fixed import Fixed
from bigbatch.planner.optimizers import Variant, variants
from bigbatch.planner.predict import Peak, Prediction, predicted, side_by_side
from bigbatch.planner.records import Rung, Way
from bigbatch.planner.scratch import Scratch
from bigbatch.planner.trace import Job

FLUCTUATION = 0.05  # of what comes and goes: the allocator's rounding, and what a prediction may miss
CUDA_CONTEXT = 512 * 2**20  # the driver's context with its kernels, and cuBLAS's work space; measured on no card here
LINK_BYTES_PER_S, FLOPS_PER_S = 12e9, 20e12  # what offloading is weighed by: PCIe 3.0 x16, half of a middling card


@dataclass(frozen=True)
class Room:
    """What is there.

    Attributes:
        batch_size: samples of a batch.
        memory_bytes: of the card.
        on_cuda: whether the plan is for a card, beside which there is a host.
    """

    batch_size: int
    memory_bytes: int
    on_cuda: bool

    def margin(self, peak: Peak, fixed: Fixed) -> int:
        """Bytes to be left free for the allocator and for work space that no prediction sees."""
        moving = max(0, peak.bytes - fixed.parameters - fixed.buffers - fixed.state)
        return round(FLUCTUATION * moving) + (CUDA_CONTEXT if self.on_cuda else 0)

    def fits(self, peak: Peak, fixed: Fixed) -> bool:
        return peak.bytes + self.margin(peak, fixed) <= self.memory_bytes


@dataclass(frozen=True)
class Step:
    """A rung before anybody has asked how large its micro-batches may be."""

    name: str
    prediction: Prediction
    variant: Variant
    door: str
    whole: bool = False

    def with_variant(self, variant: Variant) -> Step:
        """The same way with another optimizer."""
        name = variant.name if self.name == "micro-batches" else f"{self.name}, {variant.name}"
        return replace(self, name=name, variant=variant, prediction=replace(self.prediction, fixed=variant.fixed))

    def sizes(self, batch_size: int) -> list[int]:
        """The sizes to choose from, from large to small; all engines but the sequential one need two micro-batches."""
        if self.whole:
            return [batch_size]
        sizes = sizes_of(batch_size)
        return sizes if self.prediction.way.engine == "sequential" else sizes[1:] or sizes

    def at(self, batch_size: int, micro_batch_size: int) -> Peak:
        return self.prediction.at(micro_batch_size, math.ceil(batch_size / micro_batch_size))


def sizes_of(batch_size: int) -> list[int]:
    """The sizes of the largest micro-batch that even pieces can have, from large to small.

    >>> sizes_of(10)
    [10, 5, 4, 3, 2, 1]
    """
    return sorted({math.ceil(batch_size / count) for count in range(1, batch_size + 1)}, reverse=True)


def largest(step: Step, room: Room) -> int | None:
    """The largest micro-batch that fits; None where not even one sample does."""
    fixed, sizes = step.prediction.fixed, step.sizes(room.batch_size)
    return next((size for size in sizes if room.fits(step.at(room.batch_size, size), fixed)), None)


def steps(job: Job, room: Room, base: Way, door: str, scratch: Scratch) -> Iterator[Step]:
    """The ways from cheap to dear that apply to a job; `base` is plain accumulation in the precision asked for.

    Ways that move the weights otherwise than the whole batch would are left out where one fits that does not.
    """
    given, *leaner = variants(job, room.on_cuda)

    def step(name: str, way: Way, variant: Variant = given, whole: bool = False) -> Step:
        return Step(name, predicted(job, way, variant.fixed, scratch), variant, door, whole)

    exact: list[Step] = []
    for each in exactly(base, step, repeated_blocks(job.inner), leaner, room.on_cuda):
        exact.append(each)
        yield each
    if any(largest(each, room) for each in exact):
        return
    blocks = exact[-1].prediction.way.checkpoint
    if base.autocast is None:
        low, name = replace(base, autocast=torch.bfloat16), "bf16 autocast"
        yield together_on_cpu(step(name, alone(low)), low) if meet_on_cpu(base, room.on_cuda) else step(name, low)
        if blocks:
            yield step("bf16 autocast, checkpointed blocks", replace(base, autocast=torch.bfloat16, checkpoint=True))
    for variant in leaner:
        if variant.changes_numerics:
            yield exact[-1].with_variant(variant)


def exactly(
    base: Way, step: Callable[..., Step], blocks: Sequence[Any], leaner: Sequence[Variant], on_cuda: bool
) -> Iterator[Step]:
    """The ways whose update is the whole batch's."""
    whole = step("whole batch at once", alone(base), whole=True)
    yield whole
    if meet_on_cpu(base, on_cuda):
        plain = together_on_cpu(replace(whole, name="micro-batches", whole=False), base)
    else:
        same = replace(whole, name="micro-batches", whole=False)
        plain = same if base == alone(base) else step("micro-batches", base)
    yield plain
    yield from (plain.with_variant(variant) for variant in leaner if not variant.changes_numerics)
    if on_cuda and base.activations != "offload":
        yield step("offloaded activations", replace(base, activations="offload"))
    if blocks and base.engine != "lockstep":
        yield step("checkpointed blocks", replace(base, checkpoint=True))


def alone(way: Way) -> Way:
    """The whole batch in one piece, whose loss is its own."""
    return replace(way, engine="sequential", activations="keep")


def meet_on_cpu(way: Way, on_cuda: bool) -> bool:
    """Micro-batches that meet hold together what the whole batch holds, where there is no host to offload to."""
    return way.engine == "lockstep" and not on_cuda


def together_on_cpu(step: Step, way: Way) -> Step:
    return replace(step, prediction=side_by_side(step.prediction, way))


def rung_of(step: Step, plain: Prediction, room: Room) -> Rung:
    """A step with the largest micro-batch that fits, or with one sample where none does."""
    size = largest(step, room)
    shown = size or (room.batch_size if step.whole else 1)
    peak = step.at(room.batch_size, shown)
    way, own = step.prediction.way, step.prediction.flops
    extra = 0.0 if not plain.flops else 3 * (own / plain.flops - 1)  # a backward takes twice the forward
    times = math.ceil(room.batch_size / shown) if way.engine == "sequential" else 1  # others wait there all at once
    away = step.prediction.fixed.host
    copied = 2 * (times * (peak.host_bytes - away) + away) / LINK_BYTES_PER_S
    computed = room.batch_size * plain.flops / FLOPS_PER_S
    time = own / plain.flops + (copied / computed if room.on_cuda else 0.0) if plain.flops else None
    return Rung(
        name=step.name,
        way=way,
        optimizer=step.variant.optimizer,
        micro_batch_size=size,
        peak_bytes=peak.bytes,
        kinds=peak.kinds,
        host_bytes=peak.host_bytes,
        extra_forwards=round(extra, 2),
        relative_time=None if time is None else round(time, 2),
        changes_numerics=step.variant.changes_numerics or way.autocast is not plain.way.autocast,
        switch=switch_of(step, size),
    )


def switch_of(step: Step, size: int | None) -> str:
    """How a rung is switched on."""
    way = step.prediction.way
    if step.door == "fully_shard":
        return "fully_shard(...) of torch.distributed.fsdp; bigbatch runs one process for now"
    options = [f"micro_batch_size={size}"] if step.door == "Accumulator" else [str(size)]
    options += [f'activations="{way.activations}"'] if way.activations != "keep" or way.engine != "sequential" else []
    options += ["checkpoint=True"] if way.checkpoint else []
    options += [f"autocast={way.autocast}"] if way.autocast is not None else []
    given = "model, loss_fn" if step.door == "Accumulator" else "model"
    return f"{step.door}({given}, {', '.join(options)})" + step.variant.switch


def chosen_of(rungs: Sequence[Rung]) -> int | None:
    """The cheapest rung that fits: first those that change no numbers, then by time, then the first of the ladder."""
    runs = [k for k, rung in enumerate(rungs) if not rung.switch.startswith("fully_shard")]
    fitting = [k for k in runs if rungs[k].micro_batch_size is not None]
    return min(fitting, key=lambda k: (rungs[k].changes_numerics, rungs[k].relative_time or 1.0, k), default=None)


def largest_count(fits: Callable[[int], bool], most: int = 2**30) -> int | None:
    """The largest number for which a property holds that holds for all smaller ones; None where it never ends.

    >>> largest_count(lambda n: n <= 1000), largest_count(lambda n: True), largest_count(lambda n: False)
    (1000, None, 0)
    """
    high = 1
    while fits(high):
        high *= 2
        if high > most:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
