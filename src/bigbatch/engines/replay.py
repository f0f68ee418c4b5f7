"""A forward that is run again finds everything as it was the first time: buffers, modes, random numbers.

`torch.utils.checkpoint` puts back PyTorch's own random numbers and autocast; what it leaves out is put back here. What
cannot be put back, weights and inputs that were written to meanwhile, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from bigbatch.core.buffers import Buffers, version_of
from bigbatch.core.compiled import runs_uncompiled, uncompiled
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
    modules' own generators as its first one did; compiled code that ran as it was written runs so again, for it saves
    other tensors than what was compiled.

    It can be entered as often as asked: a graph that is kept, or a derivative in a forward, recomputes again.
    """

    def __init__(self, inner: Sequence[nn.Module], buffers: Buffers, guard: Guard) -> None:
        self.inner, self.buffers, self.guard = inner, buffers, guard
        self.generators = generators_of(inner)
        self.first, self.uncompiled = self._now(), runs_uncompiled()
        self.open: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        if self.uncompiled:
            stack.enter_context(uncompiled())
        stack.enter_context(self.buffers.replayed())
        for put_back in self._now():
            stack.callback(put_back)
        for put_back in self.first:
            put_back()
        self.open.append(stack)

    def __exit__(self, *error: Any) -> None:
        self.open.pop().__exit__(*error)
        self.guard.note()

    def _now(self) -> tuple[Callable[[], None], ...]:
        """What puts random numbers and modes back to how they are now."""
        return host_numbers(), states_of(self.generators), modes_of(self.inner)


def modes_of(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Train or eval mode of each module as it is now; the result puts it back."""
    held = [(module, module.training) for module in modules]

    def put_back() -> None:
        for module, training in held:
            module.training = training

    return put_back
