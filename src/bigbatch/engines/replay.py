"""A forward that is run again finds everything as it was the first time: buffers, weights, random numbers of the host.

`torch.utils.checkpoint` puts back PyTorch's own random numbers and autocast; what it leaves out is put back here.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor

from bigbatch.core.buffers import Buffers, version_of
from bigbatch.core.rng import host_numbers
from bigbatch.errors import ModelError


class Guard:
    """Watches the weights between the forwards and the backward: a second forward must use what the first one used."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.weights = weights
        self.note()

    def note(self) -> None:
        """A forward has run; what it did to the weights itself is no fault."""
        self.versions = list(map(version_of, self.weights))

    def refuse_new_weights(self) -> None:
        if self.versions != list(map(version_of, self.weights)):
            raise ModelError(
                "the backward of outputs that were made earlier was asked for",
                "weights have changed since then (an optimizer step?), and a second forward would use the new ones",
                "run every backward before the step",
            )


class Replays(AbstractContextManager[None]):
    """A micro-batch's second forward finds buffers, Python's and NumPy's random numbers as its first one did.

    It can be entered as often as asked: a graph that is kept, or a derivative in a forward, recomputes again.
    """

    def __init__(self, buffers: Buffers, guard: Guard) -> None:
        self.buffers, self.guard = buffers, guard
        self.numbers = host_numbers()
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        self.guard.refuse_new_weights()
        stack = ExitStack()
        stack.enter_context(self.buffers.replayed())
        stack.callback(host_numbers())
        self.numbers()
        self.open.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.open.pop().__exit__(*error)
        self.guard.note()
