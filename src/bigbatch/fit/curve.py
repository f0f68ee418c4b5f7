"""Memory of a micro-batch: fixed + slope × size × growth(cost), read from measured peaks so that it is not too low.

`cost` is what one sample costs, for instance its padded length. Growth lies between the cost and its square, so what
was seen at one cost says something safe about every other: `carry` is that rule, and all else here follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

NOISE = 0.01  # an allocator's peak differs by about this share between two equal windows


UNSEEN = (
    1.1  # a prediction's bytes for each sample, over what was counted: scratch space, the next micro-batch's inputs
)


@dataclass(frozen=True)
class Seen:
    """A micro-batch size that fitted.

    Attributes:
        size: samples in the micro-batch.
        cost: what one of its samples costs.
        rate: samples × cost a second, smoothed over the windows.
        times: windows that ran with it.
        peak_bytes: the last window's peak, on the budget's scale; None where nothing was counted.
        window: number of the last window that ran with it.
    """

    size: int
    cost: float
    rate: float
    times: int
    peak_bytes: float | None
    window: int

    @property
    def units(self) -> float:
        return self.size * self.cost


def carry(size: float, cost: float, to: float) -> float:
    """A size that at cost `to` needs no more memory than `size` does at `cost`, whichever way memory grows.

    >>> carry(16, 10, 20), carry(16, 10, 5)
    (4.0, 32.0)
    """
    return size * (cost / to if to <= cost else (cost / to) ** 2)


def fixed_part(seen: Sequence[Seen], known: float) -> float:
    """A lower bound of the memory that no size changes: what is `known`, or what two sizes at one cost tell.

    >>> fixed_part([Seen(2, 1.0, 1.0, 1, 50.0, 0), Seen(10, 1.0, 1.0, 1, 90.0, 0)], 0.0)  # 40 + 5 a sample, and noise
    39.15
    """
    best = known if all(known < (item.peak_bytes or 0) for item in seen) else 0.0
    for cost in {item.cost for item in seen}:
        group = [item for item in seen if item.cost == cost]
        small, large = min(group, key=lambda item: item.size), max(group, key=lambda item: item.size)
        if large.size > small.size:
            low, high = (1 - NOISE) * (small.peak_bytes or 0), (1 + NOISE) * (large.peak_bytes or 0)
            slope = (high - low) / (large.size - small.size)
            best = max(best, low - slope * small.size)
    return best


def fitting_size(seen: Sequence[Seen], cost: float, budget: float, known_fixed: float) -> int | None:
    """The largest size whose peak at `cost` stays within `budget`, as far as the peaks tell; None where there are none.

    >>> fitting_size([Seen(4, 1.0, 1.0, 1, 60.0, 0)], 1.0, 100.0, 40.0)  # 40 + 5 a sample, and noise
    11
    """
    counted = [item for item in seen if item.peak_bytes is not None]
    if not counted:
        return None
    fixed = fixed_part(counted, known_fixed)
    limits = [limit_from(item, cost, budget, fixed) for item in counted]
    at_this_cost = [item for item in counted if item.cost == cost]
    if at_this_cost and all(item.size == 1 and (item.peak_bytes or 0) < budget for item in at_this_cost):
        limits.append(2.0)  # one sample says nothing about the slope, and a second one is the smallest question
    return int(max(limits) + 1e-9)


def limit_from(item: Seen, cost: float, budget: float, fixed: float) -> float:
    """The size that one measured peak allows: a straight line from it, no flatter than noise allows it to be."""
    size, peak = carry(item.size, item.cost, cost), item.peak_bytes or 0.0
    if peak > budget:
        return 0.9 * size * max(0.0, budget - fixed) / max(peak - fixed, 1e-9)
    slope = max((1 + NOISE) * peak - fixed, 1e-9) / size
    return size + (budget - peak) / slope


def foreseen(
    small: Sequence[int], large: Sequence[int], samples: tuple[int, int], room: float, gradients: Sequence[int]
) -> tuple[float, float]:
    """Bytes for each sample, and bytes that no size changes, where a micro-batch that grows meets `room` first.

    Live bytes after an operator grow in a straight line with the samples. The operator that has the most of them for a
    few samples (the last gradient of a weight) is not the one that has the most for many (the end of the forward).

    Args:
        small, large: live bytes after each operator of one forward and backward, with few samples and with more.
        samples: how many samples each of them ran.
        room: bytes that may be used.
        gradients: bytes of each weight's gradient. From the second micro-batch on all of them are there, and the new
            ones, which are added to them, come one after the other.

    >>> foreseen([10, 104], [20, 105], (1, 2), 1000, [40, 10])  # 50 and 10 a sample, or 103 and 1 a sample
    (10.0, 50.0)
    """
    few, many = samples
    there, one = sum(gradients), max(gradients, default=0)

    def fixed(low: float) -> float:
        return max(low, there + min(max(0.0, low), one))

    if len(small) != len(large) or many <= few:  # other operators ran, so nothing is known to be fixed
        return max(small) / few, float(there + one)
    slopes = [(after - before) / (many - few) for before, after in zip(small, large, strict=True)]
    lines = [(slope, fixed(low - few * slope)) for slope, low in zip(slopes, small, strict=True) if slope > 0]
    return min(lines, key=lambda line: (room - line[1]) / line[0], default=(max(large) / many, float(there + one)))


def planned(predict: Callable[[int], float], samples: int, room: float) -> tuple[float, float]:
    """Bytes for each sample, and bytes that no size changes, around the largest size that a plan lets into `room`.

    The latter are less than none where bytes grow faster for large sizes than for small ones.

    >>> planned(lambda size: max(100 + size, 10 * size), 64, 200)  # the largest is 20
    (10.0, 0.0)
    """
    low, high = 1, samples
    while low < high:  # bytes grow with the size
        middle = (low + high + 1) // 2
        low, high = (middle, high) if predict(middle) <= room else (low, middle - 1)
    further = min(low + 1, samples) if low > 1 or samples == 1 else 2
    here, there = predict(further - 1), predict(further)
    each = float(max(there - here, 1.0))
    return each, float(predict(low) - each * low)
