"""A forward that is run again finds everything as it was the first time: buffers, modes, random numbers.

`torch.utils.checkpoint` puts back PyTorch's own random numbers and autocast; what it leaves out is put back here. What
cannot be put back, weights and inputs that were written to meanwhile, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bigbatch.core.buffers import Buffers, version_of
from bigbatch.core.models import generators_of
from bigbatch.core.rng import host_numbers, states_of
from bigbatch.core.tree import leaves
from bigbatch.errors import ModelError


class Guard:
    """Watches weights and inputs between forward and backward, as autograd watches what it has saved itself."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.note()

    def note(self) -> None:
        """A forward has run; what it wrote itself is no fault."""
        self.versions = list(map(version_of, self.tensors))

    def watch(self, outputs: Any) -> None:
        """From now on, a backward through the outputs is refused if anything has been written to."""
        self.note()
        for leaf in leaves(outputs):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(self.refuse_writes)  # type: ignore[no-untyped-call]

    def refuse_writes(self, _: Tensor | None = None) -> None:
        if self.versions != list(map(version_of, self.tensors)):
            raise ModelError(
                "the backward of outputs that were made earlier was asked for",
                "weights or inputs have been written to since then (an optimizer step, a buffer that is filled again?)",
                "run every backward before the step, and hand over copies of inputs that are filled again",
            )


class Replays(AbstractContextManager[None]):
    """A micro-batch's second forward finds buffers, train or eval mode, and the random numbers of Python, NumPy and the
    modules' own generators as its first one did.

    It can be entered as often as asked: a graph that is kept, or a derivative in a forward, recomputes again.
    """

    def __init__(self, inner: Sequence[nn.Module], buffers: Buffers, guard: Guard) -> None:
        self.inner, self.buffers, self.guard = inner, buffers, guard
        self.generators = generators_of(inner)
        self.numbers = host_numbers(), states_of(self.generators)
        self.modes = [module.training for module in inner]
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(self.buffers.replayed())
        for put_back in (host_numbers(), states_of(self.generators)):
            stack.callback(put_back)
        stack.callback(self._set_modes, [module.training for module in self.inner])
        for put_back in self.numbers:
            put_back()
        self._set_modes(self.modes)
        self.open.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.open.pop().__exit__(*error)
        self.guard.note()

    def _set_modes(self, modes: Sequence[bool]) -> None:
        for module, mode in zip(self.inner, modes, strict=True):
            module.training = mode


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors of a batch."""
    held = (leaf.data if isinstance(leaf, PackedSequence) else leaf for leaf in leaves(tree))
    return [leaf for leaf in held if isinstance(leaf, Tensor)]
