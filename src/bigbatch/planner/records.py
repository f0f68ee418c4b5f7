"""What a plan says: a rung of the ladder for every way to run the batch, and the one that is recommended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch


def plain(value: Any) -> Any:
    """A value as JSON knows it; a dtype becomes its name. What is no part of a comparison is left out.

    >>> plain(Way(autocast=torch.bfloat16))
    {'engine': 'sequential', 'activations': 'keep', 'checkpoint': False, 'autocast': 'torch.bfloat16'}
    """
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.compare}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, torch.dtype) else value


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
        largest_length: tokens of the longest sample that memory holds on the recommended rung, one at a time; the model
            may take fewer. None where samples have no length.
        how: "fake tensors", or "measured" and why.
        course: micro-batch sizes and bytes by kind.
        job: what the plan was made for.

    >>> from bigbatch import plan
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    >>> found = plan(model, torch.nn.MSELoss(), torch.zeros(1, 64), torch.zeros(1, 1), batch_size=500, memory="200KiB",
    ...     optimizer=torch.optim.SGD)
    >>> found.fits, found.to_dict()["rungs"][found.chosen]["name"]
    (True, 'micro-batches')
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
        """Whether any way fits."""
        return self.chosen is not None

    def __str__(self) -> str:
        from bigbatch.planner.table import text_of

        return text_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The same for machines, ready for JSON; without the job."""
        course = [{"micro_batch_size": size, "kinds": plain(kinds)} for size, kinds in self.course]
        return {**plain(self), "fits": self.fits, "course": course}

    def draw(self, path: str | Path) -> None:
        """Writes a picture of memory by kind against the micro-batch size, as PNG or whatever the name ends with.

        Raises:
            MissingExtra: matplotlib is missing.
        """
        from bigbatch.planner.picture import draw

        draw(self, Path(path))

    def apply(self) -> Any:
        """The door that the recommended rung asks for, see `planner.apply`."""
        from bigbatch.planner.apply import apply

        return apply(self)

    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer that it takes, for the model's parameters, see `planner.apply`."""
        from bigbatch.planner.apply import optimizer

        return optimizer(self)
