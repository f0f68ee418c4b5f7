"""Will it fit, what does it cost, and what to turn on: one step under fake tensors answers for every batch and card."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.batch_norm import by_batch
from bigbatch.errors import OptionError
from bigbatch.fit.budget import budget_bytes
from bigbatch.planner.apply import Asked
from bigbatch.planner.ladder import Room, Step, chosen_of, largest_count, rung_of, steps
from bigbatch.planner.lengths import largest_length
from bigbatch.planner.predict import device_of, job_of
from bigbatch.planner.records import Plan, Way
from bigbatch.planner.scratch import Scratch
from bigbatch.planner.shards import SHARDING, sharded
from bigbatch.planner.trace import Job

AUTOCAST = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
POINTS = 24  # micro-batch sizes in the picture


def plan(
    model: Callable[..., Any],
    loss_fn: Callable[..., Tensor] | None,
    inputs: Any,
    targets: Any = None,
    *,
    batch_size: int,
    memory: int | str | float | None,
    optimizer: Any = None,
    precision: str = "fp32",
    reduction: str | Callable[..., Any] = "auto",
    split: Any = None,
    device: str | torch.device | None = None,
    card: str | None = None,
    ranks: int = 1,
    sharding: str | None = None,
) -> Plan:
    """Predicts the memory of an update for every way to run it, and recommends the cheapest that fits.

    One step at two small sizes runs under `FakeTensorMode` on the model itself: no weight is copied, the model may be
    on the "meta" device, and nothing is computed but a few operators on zeros, for their scratch space. What each
    moment of the step holds is a line in the micro-batch size.

    Args:
        model: a module, or a function that returns the loss.
        loss_fn: as in `Accumulator`; None where the model returns its own loss.
        inputs: some samples, one at least; their values do not matter, their shapes do.
        targets: what belongs to them.
        batch_size: samples that make one update, over all ranks.
        memory: of the card: bytes, "8GiB", or a fraction of the device as a float.
        optimizer: an optimizer, or a function of the parameters that makes one (`torch.optim.AdamW`); None leaves
            optimizer state out.
        precision: "fp32", "bf16" or "fp16": the autocast that the update runs under.
        reduction: as in `Accumulator`.
        split: as in `Accumulator`.
        device: what the plan is for, "cpu" or "cuda"; None takes the model's, and CUDA for one on "meta".
        card: what the card is called, for the table.
        ranks: processes that share the batch.
        sharding: what they share beside it: None, "optimizer", "gradients" (and optimizer) or "full".

    Raises:
        OptionError: an option that makes no sense.

    >>> model = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(8)])
    >>> found = plan(model, torch.nn.MSELoss(), torch.zeros(1, 512), torch.zeros(1, 512), batch_size=16384,
    ...     memory="200MB", optimizer=torch.optim.SGD)
    >>> found.fits, found.rungs[0].micro_batch_size, found.rungs[found.chosen].name
    (True, None, 'micro-batches')
    """
    check(batch_size, precision, ranks, sharding)
    job = job_of(model, loss_fn, inputs, targets, optimizer, reduction, split)
    target = target_of(job, device)
    room = Room(math.ceil(batch_size / ranks), budget(memory, target), target == "cuda")
    scratch = scratch_for(job, target)
    base, door = base_of(job, AUTOCAST[precision], room.on_cuda)
    found = list(steps(job, room, base, door, scratch))
    if ranks > 1:
        found += [sharded(step, job, ranks, sharding or "full") for step in found[1:2]]
    rungs = tuple(rung_of(step, found[0].prediction, room) for step in found)
    chosen = chosen_of(rungs)
    at = found[1 if chosen is None else chosen]
    size = rungs[chosen].micro_batch_size if chosen is not None else None
    return Plan(
        batch_size=batch_size,
        memory_bytes=room.memory_bytes,
        margin_bytes=room.margin(at.at(room.batch_size, size or 1), at.prediction.fixed),
        card=card,
        rungs=rungs,
        chosen=chosen,
        fixed=at.prediction.fixed.to_dict(),
        largest_batch=largest_batch(at, room),
        largest_length=largest_length(job, at.prediction, room, scratch),
        how=at.prediction.how,
        course=course_of(at, room),
        job=Asked(model, loss_fn, {"reduction": reduction, "split": split}, [step.variant.make for step in found]),
    )


def check(batch_size: int, precision: str, ranks: int, sharding: str | None) -> None:
    """Refuses options that make no sense."""
    for name, number in (("batch_size", batch_size), ("ranks", ranks)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise OptionError(f"{name}={number!r} was asked for", "no whole number of at least 1", "pass one")
    if precision not in AUTOCAST:
        known = ", ".join(AUTOCAST)
        raise OptionError(f"precision={precision!r} was asked for", f"known are {known}", "pass one of them")
    if sharding is not None and sharding not in SHARDING:
        known = ", ".join(SHARDING)
        raise OptionError(f"sharding={sharding!r} was asked for", f"known are {known}", "pass one of them, or None")


def target_of(job: Job, device: str | torch.device | None) -> str:
    """The kind of device that is planned for."""
    own = device_of(job).type
    kind = torch.device(device).type if device is not None else "cuda" if own == "meta" else own
    if kind not in ("cpu", "cuda"):
        raise OptionError(f"device={device!r} was asked for", "plans are made for cpu and cuda", "pass one of them")
    return kind


def budget(memory: int | str | float | None, target: str) -> int:
    """The bytes that are there."""
    there = torch.device(target)
    known = target == "cpu" or torch.cuda.is_available()
    amount = budget_bytes(memory)  # refuses what is no amount of memory
    found = budget_bytes(memory, there) if known else None if isinstance(memory, float) else amount
    if found is None:
        do = 'pass bytes, text such as "8GiB", or a fraction of the device'
        raise OptionError(f"memory={memory!r} was asked for", "no limit that could be kept", do)
    return found


def scratch_for(job: Job, target: str) -> Scratch:
    """Operators tell what they take for themselves only on the kind of device that is planned for."""
    own = device_of(job)
    return Scratch(own if own.type == target else None)


def base_of(job: Job, autocast: torch.dtype | None, on_cuda: bool) -> tuple[Way, str]:
    """Plain accumulation for this loss and model, and the door that runs it."""
    if any(map(by_batch, job.inner)):
        way = Way("lockstep", "offload" if on_cuda else "keep", False, autocast)
        return way, "Accumulator" if job.adds_up else "MicroBatched"
    if job.adds_up:
        return Way("sequential", "keep", False, autocast), "Accumulator"
    return Way("joined", "recompute", False, autocast), "MicroBatched"


def largest_batch(step: Step, room: Room) -> int | None:
    """The largest batch in the smallest micro-batches; None where any fits (a batch waits on the host)."""
    if step.whole:
        return largest_count(lambda samples: room.fits(step.at(samples, samples), step.prediction.fixed))
    return largest_count(lambda samples: room.fits(step.at(samples, 1), step.prediction.fixed))


def course_of(step: Step, room: Room) -> tuple[tuple[int, Mapping[str, int]], ...]:
    """Bytes by kind at some micro-batch sizes, from small to large."""
    sizes = replace(step, whole=False).sizes(room.batch_size)[::-1]
    few = sorted({sizes[round(k * (len(sizes) - 1) / (POINTS - 1))] for k in range(POINTS)})
    return tuple((size, step.at(room.batch_size, size).kinds) for size in few)
