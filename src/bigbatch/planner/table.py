"""A plan as plain text of at most 110 columns: the ladder, where the bytes go, and how to switch it on."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from bigbatch.core.units import format_bytes
from bigbatch.planner.records import Plan, Rung
from bigbatch.terms import table

COLUMNS, NAME_COLUMNS = 110, 38
WHOLE, PLAIN = "whole batch at once", "micro-batches"
HEADS = ("way", "micro-batch", "peak", "on the host", "forwards", "time", "numbers")


def text_of(plan: Plan) -> str:
    """All that a person asks of a plan."""
    rung = plan.rungs[plan.chosen] if plan.chosen is not None else None
    parts = [header(plan), ladder(plan), legend(plan)]
    parts += [refusal(plan)] if rung is None else [bytes_by_kind(rung, plan), switching(rung, plan)]
    return "\n\n".join(wrapped(part) for part in parts)


def wrapped(text: str) -> str:
    """The same with every line that is too long continued on the next one, further in."""
    lines = text.splitlines()
    return "\n".join(
        part
        for line in lines
        for part in ([line] if len(line) <= COLUMNS else textwrap.wrap(line, COLUMNS, subsequent_indent="    "))
    )


def header(plan: Plan) -> str:
    """What was asked."""
    there, free = format_bytes(plan.memory_bytes), format_bytes(plan.margin_bytes)
    card = f" on {plan.card}" if plan.card else ""
    return table(
        {
            "batch": samples_of(plan.batch_size),
            "memory": f"{there}{card}, of which {free} stay free for allocator and work space",
            "predicted": f"with {plan.how}" if plan.how == "fake tensors" else plan.how,
        }
    )


def ladder(plan: Plan) -> str:
    """One row a way, from cheap to dear; the recommended one is marked."""
    rows: list[tuple[str, ...]] = [("  ", *HEADS)]
    rows += [("> " if k == plan.chosen else "  ", *cells(rung)) for k, rung in enumerate(plan.rungs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(line(row, widths) for row in rows)


def cells(rung: Rung) -> tuple[str, ...]:
    """A row: name, largest micro-batch, peak, host, extra forwards of a sample, time of an update, numbers."""
    name = rung.name if len(rung.name) <= NAME_COLUMNS else rung.name[: NAME_COLUMNS - 1] + "…"
    return (
        name,
        "no size fits" if rung.micro_batch_size is None else str(rung.micro_batch_size),
        format_bytes(rung.peak_bytes),
        format_bytes(rung.host_bytes) if rung.host_bytes else "-",
        f"+{rung.extra_forwards:.2f}",
        "?" if rung.relative_time is None else f"{rung.relative_time:.2f}",
        "change" if rung.changes_numerics else "same",
    )


def line(row: Sequence[str], widths: Sequence[int]) -> str:
    """Words to the left, figures to the right."""
    left = (0, 1, len(row) - 1)
    parts = [
        cell.ljust(width) if k in left else cell.rjust(width)
        for k, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]
    return (parts[0] + "  ".join(parts[1:])).rstrip()


def legend(plan: Plan) -> str:
    """What the columns mean, and the notes of single ways."""
    words = ["forwards: more than one a sample. time: of an update, 1.00 is plain accumulation."]
    if any(rung.micro_batch_size is None for rung in plan.rungs):
        words += ["Where no size fits, the peak is that of one sample at a time (of the whole batch, at once)."]
    return "\n".join([*words, *(f"{rung.name}: {rung.note}" for rung in plan.rungs if rung.note)])


def bytes_by_kind(rung: Rung, plan: Plan) -> str:
    """Where the bytes are at the worst moment, the largest first."""
    held = {kind: count for kind, count in sorted(rung.kinds.items(), key=lambda item: -item[1]) if count}
    rest = plan.memory_bytes - plan.margin_bytes - rung.peak_bytes
    sizes = {**held, "stays free": plan.margin_bytes, "to spare": rest}
    shown = {
        f"  {name}": f"{format_bytes(count):>12}  {count / plan.memory_bytes:>4.0%}" for name, count in sizes.items()
    }
    size = "" if rung.name == WHOLE else f", {samples_of(rung.micro_batch_size or 1)} a micro-batch"
    return f"Where the memory goes: {rung.name}{size}\n{table(shown)}"


def switching(rung: Rung, plan: Plan) -> str:
    """What no size changes, how far this way goes, and how it is switched on."""
    largest = "any size" if plan.largest_batch is None else samples_of(plan.largest_batch)
    rows = {
        "at any size": f"{format_bytes(sum(plan.fixed.values()))}: {listed(plan.fixed)}",
        "largest batch": largest + (" at once" if rung.name == WHOLE else ""),
    }
    if plan.largest_length is not None:
        rows["longest sample"] = (
            f"{plan.largest_length} tokens in memory, one sample at a time; the model may take fewer"
        )
    door, *others = rung.switch.split("; ")
    rows["switch it on"] = door
    rows |= {" " * 8: " and ".join(others)} if others else {}
    words = "\nWeights then move otherwise than in the whole batch's update." if rung.changes_numerics else ""
    return table(rows) + words


def refusal(plan: Plan) -> str:
    """Why nothing fits, and how much would be needed."""
    plain = next((rung for rung in plan.rungs if rung.name == PLAIN), plan.rungs[0])
    least = min(plan.rungs, key=lambda rung: rung.peak_bytes)
    always = sum(plan.fixed.values())
    parts = ["weights", *(["gradients"] if plan.fixed.get("gradients") else [])]
    parts += [plain.optimizer] if plan.fixed.get("optimizer state") else []
    subject = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    words = f"{subject} need {format_bytes(always)}"
    if always <= plan.memory_bytes:  # they would fit alone
        most, count = max(plain.kinds.items(), key=lambda item: item[1])
        words += f", and with them one sample at a time {format_bytes(plain.peak_bytes)}, "
        words += f"of which {most} {format_bytes(count)}"
    words += f"; no micro-batch size fits {format_bytes(plan.memory_bytes)}."
    words = f"Nothing fits: {words}\nThe smallest peak of any way is {format_bytes(least.peak_bytes)} ({least.name}), "
    words += f"and {format_bytes(plan.margin_bytes)} have to stay free beside it."
    if plan.largest_length:
        words += f"\nSamples of at most {plan.largest_length} tokens would fit, one at a time."
    return words


def listed(kinds: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {format_bytes(count)}" for kind, count in kinds.items() if count) or "nothing"


def samples_of(count: int) -> str:
    """A number of samples in words.

    >>> samples_of(1), samples_of(2)
    ('1 sample', '2 samples')
    """
    return f"{count} sample" if count == 1 else f"{count} samples"
