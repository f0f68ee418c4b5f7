"""What micro-batch size comes next: a pure function of the sizes that fitted, their speed and peak, and of failures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from bigbatch.fit.curve import Seen, carry, fitting_size
from bigbatch.fit.search import SEARCH_WINDOWS, candidates, even_size, next_size

FIRST_WAIT = 8  # windows before a size that failed is tried again; doubled by every failure
LONGEST_WAIT = 4096
KEPT = 64  # sizes that are remembered
BETTER = 1.05  # after the search, a size must be faster by this to be moved to


@dataclass(frozen=True)
class Failure:
    """A size that ran out of memory at a cost, in which window, and for how many windows it is not tried again."""

    size: int
    cost: float
    window: int
    wait: int


@dataclass(frozen=True)
class Tuner:
    """What is known about micro-batch sizes. Nothing here asks a device or a clock; every change is a new record.

    `budget`, `fixed_bytes` and `peak_bytes` count from the same zero: if the budget is what is free beside the
    weights and what the optimizer will need, a peak is what came on top of the weights.

    Attributes:
        seen: sizes that fitted, the one that ran last at the end.
        failures: the smallest sizes that did not, the newest at the end.
        windows: windows that were measured.
        wait: windows for which the next failure will be left alone.
        in_a_row: failures since the last window that fitted.
        home: size and cost that the search has settled on so far.
        sample_bytes, fixed_bytes, at_cost: the prediction; 0 where there is none.

    >>> tuner = Tuner.first(sample_bytes=5, fixed_bytes=40)  # weights 10, gradients 10, moments 20 on a card of 100
    >>> tuner.choose(samples=12, cost=1.0, budget=100), tuner.choose(samples=1000, cost=1.0, budget=100)
    (12, 12)
    >>> tuner.failed(size=12, cost=1.0).choose(samples=12, cost=1.0, budget=100)
    3
    >>> Tuner().choose(samples=256, cost=1.0, budget=None)
    256
    """

    seen: tuple[Seen, ...] = ()
    failures: tuple[Failure, ...] = ()
    windows: int = 0
    wait: int = FIRST_WAIT
    in_a_row: int = 0
    home: tuple[int, float] | None = None
    sample_bytes: float = 0.0
    fixed_bytes: float = 0.0
    at_cost: float = 0.0

    @classmethod
    def first(cls, sample_bytes: float, fixed_bytes: float, cost: float = 0.0) -> Tuner:
        """A tuner that starts from a prediction.

        Args:
            sample_bytes: bytes that one sample's activations are expected to take.
            fixed_bytes: bytes that no size changes: gradients, optimizer state, weights if the budget holds them.
            cost: the cost of the sample that `sample_bytes` is meant for; 0 means every cost.
        """
        return cls(sample_bytes=float(sample_bytes), fixed_bytes=float(fixed_bytes), at_cost=float(cost))

    def choose(self, samples: int, cost: float, budget: int | None) -> int:
        """The most samples that a micro-batch of the next try should hold.

        Args:
            samples: samples in the batch, or in the part of it that is left to run; at least 1.
            cost: what one of them costs: elements of its largest field, such as its padded length.
            budget: bytes that may be used, or None where no limit is known.

        Returns:
            At least 1 and at most `samples`, cut evenly. After `failed` it is at most half of what failed, unless
            that was 1: then the batch does not fit, and the caller says so.
        """
        limit, counted = self._limit(samples, cost, budget)
        if self.in_a_row:
            return even_size(samples, min(limit, self._retreat(cost, budget)))
        if not self.seen:
            cautious = samples if budget is None or counted else ceil(samples / 16)
            return even_size(samples, min(limit, cautious))
        home = self.home[0] * self.home[1] / cost if self.home else limit
        found = candidates(self.seen, samples, cost, limit)
        return next_size(found, samples, home, self.windows, bool(self.failures) and not counted)

    def measured(self, size: int, cost: float, seconds: float, samples: int, peak_bytes: int | None) -> Tuner:
        """The same with one more window that fitted.

        Args:
            size, cost: the micro-batches' size and what one of their samples costs.
            seconds: time that the window took.
            samples: samples that it ran.
            peak_bytes: the most bytes in use meanwhile, or None where nobody counted.
        """
        rate = samples * cost / max(seconds, 1e-9)
        old = next((item for item in self.seen if (item.size, item.cost) == (size, cost)), None)
        peak = peak_bytes if peak_bytes is not None or old is None else old.peak_bytes
        new = Seen(size, cost, smoothed(old, rate), old.times + 1 if old else 1, peak, self.windows)
        seen = (*(item for item in self.seen if item is not old), new)[-KEPT:]
        failures = tuple(item for item in self.failures if carry(size, cost, item.cost) < item.size)
        now = replace(self, seen=seen, failures=failures, windows=self.windows + 1, in_a_row=0)
        return replace(now, home=now._settled())

    def failed(self, size: int, cost: float) -> Tuner:
        """The same with an out-of-memory error at that size; call it once for every try that failed."""
        new = Failure(size, cost, self.windows, self.wait)
        failures = tuple(item for item in self.failures if carry(item.size, item.cost, cost) < size)
        seen = tuple(item for item in self.seen if carry(item.size, item.cost, cost) < size)
        home = self.home if self.home and carry(*self.home, cost) < size else None
        wait = min(2 * self.wait, LONGEST_WAIT)
        return replace(self, seen=seen, failures=(*failures, new), wait=wait, in_a_row=self.in_a_row + 1, home=home)

    def to_dict(self) -> dict[str, Any]:
        """The record as JSON knows it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> Tuner:
        """The record that `to_dict` wrote, also after a journey through JSON.

        >>> tuner = Tuner().measured(4, 1.0, 0.5, 8, 1000).failed(8, 1.0)
        >>> Tuner.from_dict(tuner.to_dict()) == tuner
        True
        """
        seen = tuple(Seen(**item) for item in state["seen"])
        failures = tuple(Failure(**item) for item in state["failures"])
        home = tuple(state["home"]) if state["home"] else None
        return cls(**{**state, "seen": seen, "failures": failures, "home": home})

    def _limit(self, samples: int, cost: float, budget: int | None) -> tuple[int, bool]:
        """The largest size that may be tried, and whether counted or predicted bytes stand behind it."""
        fits = int(max((carry(item.size, item.cost, cost) for item in self.seen), default=0.0) + 1e-9)
        bounds = [samples]
        for item in self.failures:
            edge = carry(item.size, item.cost, cost)
            rested = self.windows - item.window >= item.wait
            bounds.append(max(fits, int(edge) if rested else ceil(edge - 1e-9) - 1))
        counted = None if budget is None else fitting_size(self.seen, cost, budget, self.fixed_bytes)
        if counted is None and budget is not None and self.sample_bytes:
            growth = 1 / carry(1.0, self.at_cost, cost) if self.at_cost else 1.0
            counted = int((budget - self.fixed_bytes) / (self.sample_bytes * growth))
        if counted is not None:
            bounds.append(counted)
        elif fits and self.wait > FIRST_WAIT:  # there is a wall somewhere, so take it by doubling
            bounds.append(2 * fits)
        return max(1, min(bounds)), counted is not None

    def _retreat(self, cost: float, budget: int | None) -> int:
        """Where to go after a failure: half, and if anything is known to fit, no more than that."""
        last = self.failures[-1]
        failing = min(carry(last.size, last.cost, cost), last.size if cost >= last.cost else float("inf"))
        if self.seen:
            quiet = [item for item in self.seen if budget is None or (item.peak_bytes or 0) <= 0.97 * budget]
            fits = max((carry(item.size, item.cost, cost) for item in quiet), default=failing / 4)
            return int(max(1.0, min(failing / 2, fits)))
        blind = budget is not None and not self.sample_bytes
        return 1 if blind else int(max(1.0, failing / 4))

    def _settled(self) -> tuple[int, float]:
        """The fastest size; after the search the old one, unless another is faster by more than chance."""
        best = max(self.seen, key=lambda item: item.rate)
        old = next((item for item in self.seen if (item.size, item.cost) == self.home), None)
        threshold = BETTER if self.windows > SEARCH_WINDOWS else 1.0
        chosen = best if old is None or best.rate > threshold * old.rate else old
        return chosen.size, chosen.cost


def smoothed(old: Seen | None, rate: float) -> float:
    """The mean over windows, in which no single window, slow by chance, weighs much.

    A second window that is much faster than the first replaces it: the first of a shape pays for warming up.
    """
    if old is None or (old.times == 1 and rate > 1.25 * old.rate):
        return rate
    share = max(0.25, 1 / (old.times + 1))
    return old.rate + share * (min(max(rate, 0.8 * old.rate), 1.25 * old.rate) - old.rate)
