"""Buffers move once a window: b = b_0 + Σ_k share_k (b_k - b_0), where b_k is what micro-batch k alone makes of b_0.

Every forward starts from the buffers that the batch started from. What each leaves behind is averaged by its share of
the samples, which is what one forward over the whole batch does to a moving average of means. A whole number that
moves alike in all micro-batches is a counter and makes that move once; one that moves by the number of samples counts
samples; any other is refused by name. A forward that is run again (recomputation, a probe, a retry) moves nothing.

The modules are lent clones, so that no buffer that a graph has saved is ever written to and the originals stay as they
were until the window is settled.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from bigbatch.errors import ModelError

Slot = tuple[nn.Module, str]


class Buffers:
    """The buffers that some modules hold themselves, over one window.

    >>> layer = nn.BatchNorm1d(1)
    >>> buffers = Buffers([layer])
    >>> for rows in (torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])):
    ...     with buffers.lent(share=0.5):
    ...         _ = layer(rows)
    >>> buffers.settle()
    >>> layer.num_batches_tracked.item(), round(layer.running_mean.item(), 6)  # a tenth of the mean of all four rows
    (1, 0.3)
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        slots: dict[int, list[Slot]] = {}
        self.originals: list[Tensor] = []  # never written to before the window is settled: they hold b_0
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    if id(buffer) not in slots:
                        self.originals.append(buffer)
                    slots.setdefault(id(buffer), []).append((module, name))
        self.slots = [slots[id(buffer)] for buffer in self.originals]
        self.resting: dict[int, Tensor] = {}  # clones that no forward has moved: they are lent again
        self.moved: dict[int, Tensor] = {}  # Σ_k share_k (b_k - b_0) of numbers that can be averaged
        self.left: dict[int, list[tuple[Tensor, int]]] = {}  # what each micro-batch left of the others, and its samples
        self.runs = 0  # micro-batches since the window began
        self.before: dict[int, Tensor] = {}  # b_0 of what has moved, once the window is settled

    @contextmanager
    def lent(self, share: float, samples: int = 1) -> Iterator[None]:
        """One micro-batch's forward (and backward): so many samples, which are `share` of the batch's."""
        lent = [self.resting.get(i, original) for i, original in enumerate(self.originals)]
        lent = [clone(buffer) if buffer is self.originals[i] else buffer for i, buffer in enumerate(lent)]
        versions = [version_of(buffer) for buffer in lent]
        self._place(enumerate(lent))
        try:
            yield
            for i, buffer in enumerate(lent):
                self._collect(i, buffer, versions[i], share, samples)
            self.runs += 1
        finally:
            self._place(enumerate(self.originals))

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Other micro-batches run inside; afterwards the one at hand finds its buffers as it left them."""
        held = [self._held(i) for i in range(len(self.originals))]
        try:
            yield
        finally:
            self._place(enumerate(held))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """A forward that is run again: it starts where the first one did, and what it leaves is thrown away."""
        current = {i: self._held(i) for i in range(len(self.originals))}
        clones = [(i, clone(self.before.get(i, original))) for i, original in enumerate(self.originals)]
        self._place(clones)  # none is placed if memory runs out for one of them
        try:
            yield
        finally:
            self._place(current.items())

    def settle(self) -> None:
        """The window is over: each buffer makes its one move."""
        if self.originals:
            self._settle()

    @torch.no_grad()
    def _settle(self) -> None:
        for i, buffer in self.resting.items():
            self.originals[i].copy_(buffer)  # the same values, unless a forward wrote behind autograd's back
        for i, move in self.moved.items():
            self._write(i, finite(self.originals[i]) + move)
        for i, left in self.left.items():
            still = [(self.originals[i], 0)] * (self.runs - len(left))
            self._write(i, together(self.originals[i], still + left, self.slots[i][0]))
        self.resting, self.moved, self.left, self.runs = {}, {}, {}, 0

    def _write(self, i: int, value: Tensor) -> None:
        original = self.originals[i]
        self.before[i] = original.clone()
        if value.shape == original.shape:
            original.copy_(value)
        else:  # a cache that grew
            self._place([(i, value)])

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        """An error inside, after the window was settled, takes the buffers' moves back."""
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for i, value in self.before.items():
                    self.originals[i].copy_(value)
            self._place(enumerate(self.originals))
            raise

    @torch.no_grad()
    def _collect(self, i: int, lent: Tensor, version: int | None, share: float, samples: int) -> None:
        original, now = self.originals[i], self._held(i)
        if now is original:  # it was lazy, and the forward has made it where it stands
            return
        still = now is lent and version is not None and now._version == version
        # `.data` is written to without a trace in the version; comparing values is free of waiting on the CPU only.
        if still and (now.device.type != "cpu" or torch.equal(now, original)):
            self.resting[i] = lent
            return
        self.resting.pop(i, None)
        if now.shape == original.shape and (original.is_floating_point() or original.is_complex()):
            move = (now - finite(original)) * share
            self.moved[i] = self.moved[i] + move if i in self.moved else move
        else:
            self.left.setdefault(i, []).append((now.detach(), samples))

    def _held(self, i: int) -> Tensor:
        module, name = self.slots[i][0]
        held = module._buffers[name]
        return self.originals[i] if held is None else held

    def _place(self, buffers: Iterable[tuple[int, Tensor]]) -> None:
        for i, buffer in buffers:
            for module, name in self.slots[i]:
                module._buffers[name] = buffer


def together(original: Tensor, left: list[tuple[Tensor, int]], slot: Slot) -> Tensor:
    """What the whole batch makes of a buffer that cannot be averaged, from what its micro-batches left of it."""
    newest = left[-1][0]
    if newest.dtype == torch.bool or newest.shape != original.shape:
        alike = all(now.shape == newest.shape and torch.equal(now, newest) for now, _ in left)
    else:
        several = len(left) > 1 and any(samples > 1 for _, samples in left)
        if several and all(bool((now - original == samples).all()) for now, samples in left):
            return original + sum(samples for _, samples in left)
        alike = all(torch.equal(now, newest) for now, _ in left)
    if alike:
        return newest
    module, name = slot
    raise ModelError(
        "buffers that move once a batch were asked for",
        f"the buffer {name} of {type(module).__name__} is left different by each micro-batch, and is no average",
        "make it a floating-point average, move it outside of forward, or run the batch in one piece",
    )


def finite(buffer: Tensor) -> Tensor:
    """The buffer with zero where it is infinite, so that moves are counted from a number."""
    return torch.where(buffer.isfinite(), buffer, torch.zeros_like(buffer))


def clone(buffer: Tensor) -> Tensor:
    if is_lazy(buffer):  # it has no values yet: the forward gives it some, where it stands
        return buffer
    with torch.no_grad():
        return buffer.detach().clone()


def version_of(tensor: Tensor) -> int | None:
    """Counts the writes to a tensor; None where nobody counts: in inference mode, and before a lazy layer is made."""
    return None if is_lazy(tensor) or tensor.is_inference() else tensor._version
