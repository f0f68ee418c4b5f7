"""The micro-batch size that is worth the next window: up to what fits, down while it is no slower, then stay.

Sizes are thought of in numbers of even pieces: samples / 1, 2, 3, 4, 6, 8, 11, 16, 23 ... and the most that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.fit.curve import Seen

SEARCH_WINDOWS = 18  # windows after which nothing but a larger limit is tried any more
NEAR = 1.06  # sizes whose costs are this close are taken for the same
STEP = 1.05  # a larger size must be larger by this to be tried
GAP = 1.5  # between sizes further apart than this lies another one to try
SLOWER = 0.97  # below this share of the best rate the search does not go on


@dataclass(frozen=True)
class Candidate:
    """A size that fits, with what is known of its speed; `times` is 0 where it was never run."""

    size: int
    rate: float
    times: int


def even_size(samples: int, size: int) -> int:
    """The largest piece when `samples` are cut evenly into as few pieces of at most `size` as possible.

    >>> even_size(100, 60), even_size(100, 33), even_size(5, 9)
    (50, 25, 5)
    """
    pieces = -(-samples // max(1, min(size, samples)))
    return -(-samples // pieces)


def candidates(seen: Sequence[Seen], samples: int, cost: float, limit: int) -> list[Candidate]:
    """Sizes that fit, the largest first: the ladder of even pieces, and the sizes that were run at this cost."""
    sizes, pieces = {even_size(samples, limit)}, 1.0
    while round(pieces) < samples:
        sizes.add(-(-samples // round(pieces)))
        pieces = pieces + 1 if pieces < 4 else pieces * 2**0.5
    sizes |= {1} | {even_size(samples, item.size) for item in seen if item.cost == cost}
    return [judged(seen, size, cost) for size in sorted(sizes, reverse=True) if size <= limit]


def judged(seen: Sequence[Seen], size: int, cost: float) -> Candidate:
    """A size with the mean rate of the runs that were as large as it, lengths counted in."""
    near = [item for item in seen if 1 / NEAR <= item.units / (size * cost) <= NEAR]
    exact = [item for item in near if item.units == size * cost] or near
    times = sum(item.times for item in exact)
    return Candidate(size, sum(item.rate * item.times for item in exact) / times if times else 0.0, times)


def next_size(found: list[Candidate], samples: int, home: float, windows: int, by_failure: bool) -> int:
    """The next window's size.

    Args:
        found: sizes that fit, the largest first.
        samples: samples in the batch.
        home: the size that the search has settled on so far.
        windows: windows that have run.
        by_failure: whether only a failure, and no count of bytes, bounds the largest size.
    """
    known = [item for item in found if item.times]
    if not known:
        return nearest(found, home)
    best = max(known, key=lambda item: item.rate)
    # While searching, noise may hide that larger is faster; afterwards a detour through slow sizes is a loss.
    no_slower = known[0].rate >= (SLOWER if windows < SEARCH_WINDOWS else 1.0) * best.rate
    if no_slower and found[0].size >= STEP * known[0].size:
        return upwards(known[0].size, found[0].size, samples) if by_failure else found[0].size
    if windows < SEARCH_WINDOWS:
        return explored(found, known, best) or best.size
    return nearest(found, home)


def nearest(found: list[Candidate], home: float) -> int:
    return min(found, key=lambda item: max(item.size / home, home / item.size)).size


def upwards(top: int, limit: int, samples: int) -> int:
    """Half way, in factors, between what fits and what nobody knows to fail: a bisection in numbers of pieces."""
    fewest, most = -(-samples // limit), -(-samples // top)
    return -(-samples // max(fewest, min(most - 1, int((fewest * most) ** 0.5 + 0.5))))


def explored(found: list[Candidate], known: list[Candidate], best: Candidate) -> int | None:
    """What the search still wants to see: a slower end, the best one's neighbours, a second look; None if nothing."""
    low = known[-1]
    if low.rate >= SLOWER * best.rate:
        smaller = [item for item in found if item.size <= 0.55 * low.size] or found[-1:]
        if smaller[0].size < low.size:
            return smaller[0].size
    elif low.times < 2:  # the first window of a shape may have paid for warming up
        return low.size
    for gap in gaps(known, best):
        between = [item for item in found if not item.times and min(gap) < item.size < max(gap)]
        if between:
            return nearest(between, (gap[0] * gap[1]) ** 0.5)
    close = [item for item in known if item.rate >= 0.95 * best.rate and item.times < 3]
    return min(close, key=lambda item: item.times).size if close else None


def gaps(known: list[Candidate], best: Candidate) -> list[tuple[int, int]]:
    """The best size with the next ones above and below that were run, where there is room for one more between."""
    above = [item.size for item in known if item.size > 1.15 * best.size]
    below = [item.size for item in known if item.size < best.size / 1.15]
    pairs = [(best.size, side) for side in (*above[-1:], *below[:1])]
    return [pair for pair in pairs if max(pair) > GAP * min(pair)]
