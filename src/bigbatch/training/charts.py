"""A picture of a run: its loss by update, and the memory it held beside what a whole batch would have held."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bigbatch.training.log import Update

MIB = 2**20


def draw(updates: Sequence[Update], whole_peak_bytes: int | None, path: Path) -> None:
    """Writes the picture.

    Args:
        updates: at least one.
        whole_peak_bytes: the peak of one whole batch; None where it is not known.
        path: where the PNG goes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, whatever the user's settings say
    loss, memory = figure.subplots(2, 1, sharex=True)
    steps = [update.step for update in updates]
    loss.plot(steps, [update.loss for update in updates], marker="." if len(steps) < 50 else "")
    loss.set_ylabel("loss of the whole batch")
    loss.set_title("Loss and memory")
    counted = [(update.step, update.peak_bytes) for update in updates if update.peak_bytes is not None]
    if len(counted) == 1:
        memory.axhline(counted[0][1] / MIB, label=f"this run, counted on update {counted[0][0]}")
    else:
        memory.plot([step for step, _ in counted], [peak / MIB for _, peak in counted], label="this run")
    if whole_peak_bytes is not None:
        memory.axhline(whole_peak_bytes / MIB, color="tab:red", linestyle="--", label="one whole batch")
    memory.set_ylabel("peak memory (MiB)")
    memory.set_ylim(bottom=0)
    memory.set_xlabel("update")
    memory.legend()
    figure.savefig(path, dpi=120)
