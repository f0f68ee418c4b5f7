"""Which axis of a random operator's result holds the samples, as two forwards over different numbers of samples tell.

One shape cannot tell: [1, 12, 8] may be one sample of 12 tokens, or 12 tokens of one sample each, or noise that has
nothing to do with samples. Between two numbers of samples, the axis of samples is the one that grew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bigbatch.core.random_operators import only_difference


@dataclass(frozen=True)
class Seen:
    """What one random operator of a forward was asked for: its name, the shape to fill, its numbers and flags."""

    name: str
    shape: tuple[int, ...]
    plain: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Place:
    """One operator's place in the forward: what it was, its axis of samples (None: the samples share its numbers).

    Attributes:
        rows: the size of that axis for one sample.
        why: the reason why the axis cannot be told; None where it can.
    """

    name: str
    shape: tuple[int, ...]
    axis: int | None = None
    rows: int = 1
    why: str | None = None

    def fits(self, shape: Sequence[int], samples: int, exactly: bool) -> bool:
        """Whether a result of this shape may be the operator's; exactly: only its number of samples is another."""
        if len(shape) != len(self.shape):
            return False
        if not exactly:
            return self.axis is None or samples == 0 or shape[self.axis] % samples == 0
        expected = list(self.shape)
        if self.axis is not None:
            expected[self.axis] = self.rows * samples
        return tuple(shape) == tuple(expected) and self.why is None


@dataclass(frozen=True, eq=False)
class Axes:
    """The axis of samples of every random operator of a model's forward; made by `axes_of`."""

    places: tuple[Place, ...]

    def find(self, place: int, name: str, shape: tuple[int, ...], samples: int) -> tuple[int | None, str | None]:
        """The axis of samples (None: shared by all samples) and, where it cannot be told, the reason."""
        return _find(self, place, name, shape, samples)


@lru_cache(maxsize=4096)
def _find(axes: Axes, place: int, name: str, shape: tuple[int, ...], samples: int) -> tuple[int | None, str | None]:
    here = axes.places[place] if place < len(axes.places) else None
    known = [other for other in axes.places if other.name == name]
    for exactly in (True, False):
        found = [other for other in known if other.fits(shape, samples, exactly)]
        answers = {(other.axis, other.why) for other in found}
        if here in found and here is not None:
            answers &= {(here.axis, here.why)}  # a layer that was dropped moves places: they decide only between axes
        if len(answers) == 1:
            return answers.pop()
    return None, f"nothing that was looked at tells which axis of {shape} holds the samples"


def axes_of(one: Sequence[Seen], samples: int, other: Sequence[Seen], other_samples: int) -> Axes:
    """The axes of samples of a forward that has run over `samples` and over `other_samples`, two different numbers.

    >>> two, three = [Seen("aten::rand", (5, 2), {})], [Seen("aten::rand", (5, 3), {})]
    >>> axes_of(two, 2, three, 3).find(0, "aten::rand", (5, 8), samples=8)
    (1, None)
    """
    places = []
    for a, b in zip(one, other, strict=False):
        if a.name != b.name:
            break  # from here on the two forwards did not draw the same
        places.append(_compared(a, samples, b, other_samples))
    return Axes(tuple(places))


def _compared(a: Seen, samples: int, b: Seen, other_samples: int) -> Place:
    odd = [key for key in a.plain if a.plain[key] != b.plain.get(key)]
    if odd:
        why = f"{odd[0]} is {a.plain[odd[0]]} for {samples} samples and {b.plain.get(odd[0])} for {other_samples}"
        return Place(a.name, a.shape, why=why)
    if a.shape == b.shape:
        return Place(a.name, a.shape)
    axis = only_difference(a.shape, b.shape)
    if axis is not None:
        rows, rest = divmod(a.shape[axis], samples)
        if rest == 0 and b.shape[axis] == rows * other_samples:
            return Place(a.name, a.shape, axis, rows)
    return Place(a.name, a.shape, why=f"shape {a.shape} for {samples} samples, {b.shape} for {other_samples}")


def guessed(shape: Sequence[int], samples: int) -> int | None:
    """The axis of samples from one shape alone: the first of that size, or else the first of a multiple of it."""
    exact = [axis for axis, size in enumerate(shape) if size == samples]
    merged = [axis for axis, size in enumerate(shape) if samples and size % samples == 0]
    return next(iter(exact or merged), None)
