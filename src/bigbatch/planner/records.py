"""What a plan says: a rung of the ladder for every way to run the batch, and the one that is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Way:
    """How a batch is run.

    Attributes:
        engine: "sequential" for a loss that adds up, "joined" for any other, "lockstep" for batch norm.
        activations: what becomes of them until the backward: "keep", "offload", or ("joined" alone) "recompute".
        checkpoint: whether repeated blocks run forward again in the backward.
        autocast: the dtype of autocast, or None.
    """

    engine: str = "sequential"
    activations: str = "keep"
    checkpoint: bool = False
    autocast: torch.dtype | None = None


@dataclass(frozen=True)
class Rung:
    """One way to run the batch, and what it needs.

    Attributes:
        name: what it is called.
        way: how the batch is run.
        optimizer: the class that it takes.
        micro_batch_size: the largest that fits; None where not even one sample does.
        peak_bytes: the most bytes on the device at once, at that size (with one sample where none fits).
        kinds: those bytes by kind.
        host_bytes: what waits on the host.
        extra_forwards: forwards of a sample beyond the one that it needs.
        relative_time: of an update; 1.0 is plain accumulation, None is not known.
        changes_numerics: whether weights move otherwise than in the whole batch's update.
        switch: how it is switched on.
        note: what else is to be known.
    """

    name: str
    way: Way
    optimizer: str
    micro_batch_size: int | None
    peak_bytes: int
    kinds: Mapping[str, int]
    host_bytes: int
    extra_forwards: float
    relative_time: float | None
    changes_numerics: bool
    switch: str
    note: str = ""


@dataclass(frozen=True)
class Plan:
    """Whether a batch fits, what it costs, and what to turn on.

    Attributes:
        batch_size: samples of an update.
        memory_bytes: of the card.
        margin_bytes: to be left free for the allocator and for work space; has to fit too.
        card: what it is called, or None.
        rungs: from cheap to dear.
        chosen: the place of the recommended rung; None where nothing fits.
        fixed: bytes that no micro-batch size changes, by kind.
        largest_batch: samples of the largest batch on the recommended rung; None where any size fits.
        largest_length: of one sample on the recommended rung; None where samples have no length.
        how: "fake tensors", or "measured" and why.
        course: micro-batch sizes and bytes by kind.
        job: what the plan was made for.
    """

    batch_size: int
    memory_bytes: int
    margin_bytes: int
    card: str | None
    rungs: tuple[Rung, ...]
    chosen: int | None
    fixed: Mapping[str, int]
    largest_batch: int | None
    largest_length: int | None
    how: str
    course: tuple[tuple[int, Mapping[str, int]], ...]
    job: Any = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.chosen is not None

    def apply(self) -> Any:
        """The door that the recommended rung asks for, see `planner.apply`."""
        from bigbatch.planner.apply import apply

        return apply(self)
