"""What a run writes while it goes: one line of metrics.csv for each update, and the same for TensorBoard."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Update:
    """One update of the weights.

    Attributes:
        step: updates so far, this one included.
        epoch: passes over the data, this one included.
        samples: samples of its batch.
        loss: loss of the whole batch, before the update.
        lr: the learning rate that the update used.
        micro_batches: micro-batches that were run.
        micro_batch_size: samples of the largest of them.
        retries: tries that ran out of memory.
        peak_bytes: the most memory held at once; on the CPU it is counted on the first update alone, because counting
            is slow, and is None on all others.
        samples_per_s: samples of the batch by the wall time of the update.
    """

    step: int
    epoch: int
    samples: int
    loss: float
    lr: float
    micro_batches: int
    micro_batch_size: int
    retries: int
    peak_bytes: int | None
    samples_per_s: float


Record = Callable[[Update], None]


@contextmanager
def recorded(folder: Path, track: Callable[[Mapping[str, Any], int], None]) -> Iterator[Record]:
    """Gives a function that writes updates; every line is on the disk at once, so that an end by force loses none.

    Args:
        folder: where metrics.csv is written.
        track: `track(values, step)` hands the same figures to a tracker such as TensorBoard.
    """
    with (folder / "metrics.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow([field.name for field in fields(Update)])

        def record(update: Update) -> None:
            row = asdict(update)
            writer.writerow(["" if value is None else value for value in row.values()])
            file.flush()
            track({name: value for name, value in row.items() if name != "step" and value is not None}, update.step)

        yield record
