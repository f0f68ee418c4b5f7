"""Bytes at every moment of a window as a polynomial in its size, through windows of two or three sizes.

Windows of one model run the same operators and make the same storages, only of other sizes. So what each moment holds
is known for every size, and the worst moment may be another one for large micro-batches than for small ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bigbatch.planner.ledger import GRADIENTS, HOST, TEMPORARY, Ledger

Kinds = Mapping[str, float]
Course = Mapping[str, Tensor]


@dataclass(frozen=True)
class Curve:
    """The polynomial through some points: a line through two, a parabola through three.

    Attributes:
        sizes: the size of each window.
        courses: bytes of each kind at every moment of it, [moments].

    >>> line = Curve((1, 2), ({"a": torch.tensor([5.0, 1.0])}, {"a": torch.tensor([5.0, 4.0])}))
    >>> line.worst(2), line.worst(3)
    ({'a': 5.0, 'host': 0.0}, {'a': 7.0, 'host': 0.0})
    """

    sizes: tuple[int, ...]
    courses: tuple[Course, ...]

    def worst(self, size: int) -> Kinds:
        """Bytes by kind when most bytes are held; the most that the host holds is told apart."""
        weights = lagrange(self.sizes, size)
        course = {
            kind: torch.stack([weight * each[kind] for weight, each in zip(weights, self.courses, strict=True)]).sum(0)
            for kind in self.courses[0]
        }
        at = int(on_device(course).argmax())
        found = {kind: max(0.0, float(held[at])) for kind, held in course.items()}
        return {**found, HOST: max(0.0, float(course[HOST].max())) if HOST in course else 0.0}


def lagrange(points: Sequence[int], x: float) -> list[float]:
    """The weights of the values at some points in the polynomial through them.

    >>> lagrange((1, 2, 3), 2), lagrange((2, 4), 6)
    ([0.0, 1.0, 0.0], [-1.0, 2.0])
    """
    weights = [1.0] * len(points)
    for i, a in enumerate(points):
        for b in points:
            if b != a:
                weights[i] *= (x - b) / (a - b)
    return [weight + 0.0 for weight in weights]  # no negative zero


def curve(windows: Mapping[int, Ledger], phases: range, again: bool = False) -> Curve:
    """The curve of some phases of a window, from ledgers by size; the worst moments where their operators differ.

    With `again`, of a window that comes after another one: what it adds to gradients is gone as soon as it is added.
    """
    courses = [part_of(again_of(ledger) if again else ledger, phases) for ledger in windows.values()]
    if len({len(next(iter(course.values()))) for course in courses}) > 1:
        courses = [at_worst(course) for course in courses]
    kinds = {kind for course in courses for kind in course}
    zero = torch.zeros_like(next(iter(courses[0].values())))
    return Curve(tuple(windows), tuple({kind: course.get(kind, zero) for kind in kinds} for course in courses))


def again_of(ledger: Ledger) -> Ledger:
    """The same operators when gradients are there already: a new one lives until it has been added."""
    twin = copy(ledger)
    twin.lives = [
        replace(life, kind=TEMPORARY, dead=life.born + 1) if life.kind == GRADIENTS else life for life in ledger.lives
    ]
    return twin


def part_of(ledger: Ledger, phases: range) -> Course:
    """What each moment of some phases holds."""
    starts = [0, *(start + 1 for _, start in ledger.phases[1:])]
    part = slice(starts[phases.start], starts[phases.stop])
    return {kind: held[part] for kind, held in course_of(ledger).items()}


def course_of(ledger: Ledger) -> dict[str, Tensor]:
    """Bytes of each kind at every operator, [operators + 1]."""
    changes = {HOST: torch.zeros(ledger.now + 3, dtype=torch.float64)}
    for life in ledger.lives:
        change = changes.setdefault(life.kind, torch.zeros_like(changes[HOST]))
        change[life.born] += life.size
        change[ledger.now + 2 if life.dead is None else life.dead] -= life.size
    return {kind: change.cumsum(0)[: ledger.now + 1] for kind, change in changes.items()}


def on_device(course: Course) -> Tensor:
    """Bytes of all kinds but the host's."""
    held = [held for kind, held in course.items() if kind != HOST]
    return torch.stack(held).sum(0) if held else torch.zeros_like(course[HOST])


def on_device_bytes(kinds: Kinds) -> float:
    """The same at one moment."""
    return sum(size for kind, size in kinds.items() if kind != HOST)


def at_worst(course: Course) -> Course:
    """The one moment at which most bytes are held."""
    at = int(on_device(course).argmax())
    return {kind: held[at : at + 1] for kind, held in course.items()}
