"""The random numbers that both sides of a proof share, where a door draws them by sample."""

from __future__ import annotations

from contextlib import AbstractContextManager

from bigbatch.core import models
from bigbatch.core.batch import Batch
from bigbatch.core.buffers import Buffers
from bigbatch.core.by_sample import BySample
from bigbatch.core.rng import Draws
from bigbatch.core.split import Piece
from bigbatch.engines.randomness import Randomness
from bigbatch.micro_batched import MicroBatched
from bigbatch.verifier.case import Case, generators


class ByPlace:
    """Hands out a sample's numbers by its place in the batch; stands in for `Draws`, and records nothing."""

    def __init__(self, case: Case) -> None:
        bench = case.fresh()
        inner = models.inner_modules(bench.modules)
        batch = Batch([], case.splitter(bench).pieces(bench.inputs, None, None), inner, Buffers(inner), bench.device)

        def forward(piece: Piece) -> object:
            return models.call(bench.inner, piece.inputs)

        with generators(0):
            self._numbers_of = Randomness("by_sample").numbers(batch, forward, case.splitter(bench))
        self._used: list[BySample] = []

    @property
    def unfollowed(self) -> list[str]:
        return list(dict.fromkeys(name for used in self._used for name in used.unfollowed))

    def record(self, samples: int) -> AbstractContextManager[object]:
        return self.replay(0, samples)

    def replay(self, first: int, last: int) -> AbstractContextManager[object]:
        self._used.append(self._numbers_of(Piece(last - first, None, None, first)))
        return self._used[-1]


def numbers_of(case: Case) -> Draws | ByPlace:
    """How the samples' random numbers are told on both sides of a case; the door itself is relieved of it."""
    door = case.model.__dict__["_door"] if isinstance(case.model, MicroBatched) else None
    mode = case.options.get("randomness") if door is None else door.randomness.mode
    return ByPlace(case) if mode == "by_sample" else Draws()
