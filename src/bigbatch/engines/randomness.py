"""Random numbers of a door: as they come from the global generators, or by sample, the same whatever the split."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bigbatch.core.batch import Batch
from bigbatch.core.by_sample import BySample
from bigbatch.core.compiled import any_compiled
from bigbatch.core.models import generators_of
from bigbatch.core.rng import preserved_rng
from bigbatch.core.sample_axes import Axes, Seen, axes_of
from bigbatch.core.split import Piece, Splitter
from bigbatch.engines.recompute import Forward, first_samples, fresh, moved

MODES = ("global", "by_sample")
COMPILED = "randomness='by_sample': a compiled model hides what it draws; its forward runs as it was written"
NOT_FOLLOWED = "randomness='by_sample': the numbers of {} are drawn as they come and depend on the split ({})"


class Randomness:
    """How one door draws. By sample, one number a batch is drawn from the global CPU generator: the batch's seed."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.axes: dict[bool, Axes] = {}  # of each random operator, in train and eval mode
        self.told: set[str] = set()

    def drawing(self, batch: Batch, forward: Forward, splitter: Splitter) -> Forward:
        """The forward of a batch's micro-batches with the random numbers that are theirs, however often it runs."""
        if self.mode == "global":
            return forward
        numbers_of = self.numbers(batch, forward, splitter)

        def by_sample(piece: Piece) -> Any:
            numbers = numbers_of(piece)
            with numbers:
                outputs = forward(piece)
            self._tell(numbers.unfollowed)
            return outputs

        return by_sample

    def numbers(self, batch: Batch, forward: Forward, splitter: Splitter) -> Callable[[Piece], BySample]:
        """What goes around the forward of each of a batch's micro-batches; draws the batch's seed."""
        if any_compiled(batch.inner) and COMPILED not in self.told:
            self.told.add(COMPILED)
            warnings.warn(COMPILED, stacklevel=6)
        seed = int(torch.randint(2**63 - 1, ()))
        axes = self._axes(batch, forward, splitter)
        return lambda piece: BySample(seed, piece.first, piece.samples, axes)

    def _axes(self, batch: Batch, forward: Forward, splitter: Splitter) -> Axes | None:
        """Told by two forwards over a few samples, without gradients; nothing that they move stays moved."""
        mode = bool(batch.inner) and batch.inner[0].training
        if mode not in self.axes:
            few = {piece.samples: piece for piece in (first_samples(batch.pieces, n, splitter) for n in (1, 4, 3, 2))}
            if len(few) > 1:
                one, other = sorted(few, key=lambda n: (n < 2, n))[:2]  # batch norm refuses one sample alone
                seen = [self._seen(batch, forward, few[n]) for n in (one, other)]
                self.axes[mode] = axes_of(seen[0], one, seen[1], other)
        return self.axes.get(mode)

    def _seen(self, batch: Batch, forward: Forward, piece: Piece) -> list[Seen]:
        drawing = BySample(0, 0, piece.samples)
        with torch.no_grad(), preserved_rng(generators_of(batch.inner)), batch.buffers.replayed(), drawing:
            forward(fresh(moved(piece, batch.device), piece))
        return drawing.seen

    def _tell(self, unfollowed: Sequence[str]) -> None:
        for name, _, why in (each.partition(": ") for each in unfollowed):
            if name not in self.told:
                self.told.add(name)
                warnings.warn(NOT_FOLLOWED.format(name, why), stacklevel=6)
