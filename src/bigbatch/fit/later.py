"""The automatic size of a call whose backward comes later: what both of them cost is learnt together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.buffers import Buffers
from bigbatch.core.split import Piece, Splitter
from bigbatch.engines.again import Tries, tensors_in
from bigbatch.engines.recompute import fresh, moved
from bigbatch.fit.need import Need, Probe, bytes_of
from bigbatch.fit.oom import is_out_of_memory, let_go
from bigbatch.fit.sizer import Answer, Ran, Sizer


class Later:
    """One call, from its forward to its first backward. A size whose backward failed is not measured.

    Args:
        sizer: what chooses the size and learns.
        need: what the call asks of the device.
        retried: told of each try of the backward that ran out of memory.
    """

    def __init__(self, sizer: Sizer, need: Need, retried: Callable[[], None]) -> None:
        self.sizer, self.need, self.retried = sizer, need, retried
        self.ran: Ran | None = None  # until the first backward is over
        self.tries = Tries(self._too_large, is_out_of_memory, let_go, self._measured)

    def run(self, attempt: Callable[[int], Answer]) -> tuple[Answer, int]:
        """What `attempt` returns, and how many tries ran out of memory before."""
        answer, self.ran = self.sizer.begin(attempt, self.need)
        return answer, self.ran.retries

    def follow(self, outputs: Any) -> None:
        """For outputs whose graph runs backward as it is: a backward that begins and does not end has failed."""
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._begins)  # type: ignore[no-untyped-call]

    def _begins(self, _: Tensor) -> None:
        if self.ran is not None and self.sizer.unfinished is not self.ran:
            self.sizer.unfinished = self.ran
            torch.autograd.Variable._execution_engine.queue_callback(self._ends)

    def _ends(self) -> None:
        self.sizer.unfinished = None
        if self.ran is not None:
            self.sizer.learn(self.ran)
            self.ran = None

    def _too_large(self, size: int) -> None:
        self.ran = None
        self.sizer.tuner = self.sizer.tuner.failed(size, self.need.cost)
        self.retried()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        with self.ran.meter if self.ran is not None else nullcontext():
            yield
        if self.ran is not None:
            self.sizer.learn(self.ran)
            self.ran = None


def probe_of(forward: Callable[[Piece], Any], inputs: Any, splitter: Splitter, need: Need) -> Probe:
    """See `Need`: beside its micro-batches, a call holds all of their outputs."""

    def probe(size: int) -> tuple[int, int]:
        piece = splitter.pieces(inputs, None, size)[0]
        with Buffers(need.place.inner).replayed():
            tensors = tensors_in(forward(fresh(moved(piece, need.place.device), piece)))
            ends = [tensor for tensor in tensors if tensor.requires_grad]
            if ends:
                seeds = [torch.ones_like(end) for end in ends]
                torch.autograd.grad(ends, need.place.trained(), seeds, allow_unused=True)
        return piece.samples, bytes_of(tensors) * need.samples // piece.samples

    return probe
