"""A picture of a plan: memory by kind against the micro-batch size, the card's edge, and the recommended size."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigbatch.core.units import FACTORS, format_bytes
from bigbatch.errors import MissingExtra
from bigbatch.planner.records import Plan
from bigbatch.planner.table import samples_of

# From the bottom up: what no size changes lies below what grows with it. Cool colours stay, warm ones grow.
COLOURS = {
    "parameters": "#1f4e79",
    "buffers": "#7f7f7f",
    "gradients": "#2e86c1",
    "optimizer state": "#85c1e9",
    "inputs": "#76d7c4",
    "outputs and loss": "#f9e79f",
    "activations": "#f5b041",
    "temporary": "#e59866",
}
BOX: Any = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
LOW = 0.15  # of the picture's height: below it, words stand above their point
HEADROOM = 1.5  # how far above the card's edge, and above the recommended point, the picture goes


def draw(plan: Plan, path: Path) -> None:
    """Writes the picture.

    Args:
        plan: with at least one point in its course.
        path: where it goes; the ending names the format.

    Raises:
        MissingExtra: matplotlib is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError as error:
        found, do = "no package named matplotlib", 'run pip install "bigbatch[train]"'
        raise MissingExtra("A picture of a plan was asked for", found, do) from error

    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, whatever the user's settings say
    axes = figure.subplots()
    sizes, kinds = areas(plan)
    edge = plan.memory_bytes - plan.margin_bytes
    top = HEADROOM * max(edge, chosen_point(plan)[1], sum(held[0] for held in kinds.values()))
    unit = next(unit for unit in ("GIB", "MIB", "KIB", "B") if top >= 2 * FACTORS[unit] or unit == "B")
    scale = FACTORS[unit]
    heights = [[count / scale for count in held] for held in kinds.values()]
    axes.stackplot(sizes, heights, labels=list(kinds), colors=[COLOURS.get(kind, "#bbbbbb") for kind in kinds])
    axes.axhline(edge / scale, color="#c0392b", linestyle="--", linewidth=1.5)
    words = (
        f"{plan.card or 'memory'}: {format_bytes(plan.memory_bytes)} less {format_bytes(plan.margin_bytes)} kept free"
    )
    over: dict[str, Any] = {"xytext": (0, 6), "textcoords": "offset points", "va": "bottom"}
    over |= {"color": "#c0392b", "fontsize": 9, "bbox": BOX}
    axes.annotate(words, (0.015, edge / scale), xycoords=("axes fraction", "data"), **over)
    axes.set_xlim(sizes[0], reach(sizes, kinds, top))
    axes.set_ylim(0, top / scale)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("micro-batch size (samples at once)")
    axes.set_ylabel(f"peak memory ({unit.replace('IB', 'iB')})")
    axes.set_title(title(plan), fontsize=11)
    mark(axes, plan, scale)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=120)


def title(plan: Plan) -> str:
    """What is drawn: the recommended way, or the first in micro-batches where none fits."""
    if plan.chosen is None:
        return f"{samples_of(plan.batch_size)} in micro-batches: nothing fits"
    return f"{samples_of(plan.batch_size)}, {plan.rungs[plan.chosen].name}"


def areas(plan: Plan) -> tuple[list[float], dict[str, list[int]]]:
    """Micro-batch sizes, and for every kind that is ever there its bytes at each; one size alone becomes a bar."""
    course = sorted(plan.course, key=lambda point: point[0])
    sizes: list[float] = [size for size, _ in course]
    if len(course) == 1:
        sizes, course = [sizes[0] - 0.5, sizes[0] + 0.5], course * 2
    names = [*COLOURS, *sorted({kind for _, kinds in course for kind in kinds} - set(COLOURS))]
    found = {name: [kinds.get(name, 0) for _, kinds in course] for name in names}
    return sizes, {name: held for name, held in found.items() if any(held)}


def reach(sizes: Sequence[float], kinds: dict[str, list[int]], top: float) -> float:
    """The size at which memory leaves the picture, on the line between two points of the course.

    >>> reach([1, 2, 4], {"a": [10, 20, 40]}, 30), reach([1, 2, 4], {"a": [10, 20, 40]}, 99)
    (3.0, 4)
    """
    totals: list[int] = [sum(held) for held in zip(*kinds.values(), strict=True)]
    for k in range(1, len(sizes)):
        if totals[k] > top >= totals[k - 1]:
            return sizes[k - 1] + (sizes[k] - sizes[k - 1]) * (top - totals[k - 1]) / (totals[k] - totals[k - 1])
    return sizes[-1]


def chosen_point(plan: Plan) -> tuple[int, int]:
    """Size and peak of the recommended way; zeros where none is."""
    if plan.chosen is None:
        return 0, 0
    rung = plan.rungs[plan.chosen]
    return rung.micro_batch_size or 1, rung.peak_bytes


def mark(axes: Any, plan: Plan, scale: int) -> None:
    """A point on the recommended size, with its figures beside it."""
    size, peak = chosen_point(plan)
    if not size:
        return
    axes.plot([size], [peak / scale], "o", color="black", markersize=8, clip_on=False, zorder=5)
    left, low = size > sum(axes.get_xlim()) / 2, peak / scale < LOW * axes.get_ylim()[1]
    words, beside = f"{size} at once: {format_bytes(peak)}", (-10 if left else 10, 10 if low else -10)
    side = {"ha": "right" if left else "left", "va": "bottom" if low else "top"}
    at = (size, peak / scale)
    axes.annotate(words, at, xytext=beside, textcoords="offset points", weight="bold", bbox=BOX, zorder=6, **side)
