"""Random numbers by sample: the numbers of a sample follow from seed, operator and sample, never from the split.

A micro-batch's random operators are answered in a dispatch mode; see `sample_numbers` for how they are drawn and
`sample_axes` for how the samples are told in a shape.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from bigbatch.core.checkpoints import open_checkpoints
from bigbatch.core.compiled import uncompiled
from bigbatch.core.random_operators import bound_arguments, draws_now, is_fused, may_draw, plain_arguments
from bigbatch.core.sample_axes import Axes, Seen, guessed
from bigbatch.core.sample_numbers import Numbers, filling_of
from bigbatch.errors import OptionError

_drawing = threading.local()  # .now: an operator is being answered, and modes further out stay out of it


class BySample:
    """Around the forward of one micro-batch: its samples get the random numbers that they get in the whole batch.

    A number depends on the seed, on the operator's place among the random operators of the forward, and on the sample's
    place in the batch; where samples share an operator's numbers (a coin for a whole layer), on seed and place alone.
    The global generators are neither read nor moved, and nothing is kept between forward and backward.

    Every entry counts operators from zero, so the same object serves a recomputation (`context_fn` of
    `torch.utils.checkpoint`, for the forward and the recomputation alike). Each thread needs an object of its own.

    Not followed, drawn from the global generator as ever, and named in `unfollowed`: attention and recurrence in one
    fused kernel, operators that were handed a generator, shapes in which no axis of samples can be told, results that
    are not dense, and what a model recomputes by a `torch.utils.checkpoint` of its own. Not seen at all: Python's
    `random` and NumPy. Compiled code runs as it was written: its operators could not be seen, and what PyTorch first
    meets under a dispatch mode is never compiled afterwards.

    Args:
        seed: the window's; any integer, of which 64 bits count.
        first: the place in the batch of the micro-batch's first sample.
        samples: how many samples the micro-batch has.
        axes: where the samples are in each operator's result, by `axes_of` from what two forwards over different
            numbers of samples have `seen`. Without it every axis is guessed from one shape, and named as a guess.

    Attributes:
        unfollowed: names and reasons of operators that were not followed, or by a guess only.
        seen: what each random operator of the latest forward was asked for, in order.

    Raises:
        OptionError: first or samples is negative.

    >>> import torch
    >>> x = torch.ones(6, 2)
    >>> with BySample(seed=5, first=0, samples=6):
    ...     whole = torch.nn.functional.dropout(x, 0.5)
    >>> with BySample(seed=5, first=4, samples=2):
    ...     piece = torch.nn.functional.dropout(x[4:], 0.5)
    >>> bool((piece == whole[4:]).all())
    True
    """

    def __init__(self, seed: int, first: int, samples: int, axes: Axes | None = None) -> None:
        if first < 0 or samples < 0:
            raise OptionError(f"first={first}, samples={samples}", "a negative number", "count samples from 0")
        self.seed, self.first, self.samples, self.axes = seed, first, samples, axes
        self.unfollowed: list[str] = []
        self.seen: list[Seen] = []
        self._before: list[Seen] = []  # what a forward that begins in the middle has behind it
        self._open: list[ExitStack] = []

    def __enter__(self) -> BySample:
        self.seen = list(self._before)
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            stack.enter_context(_Mode(self))
            self._open.append(stack.pop_all())
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)

    def _name(self, name: str, why: str) -> None:
        if f"{name}: {why}" not in self.unfollowed:
            self.unfollowed.append(f"{name}: {why}")


class _NotFollowed(Exception):
    """Carries the reason why an operator's numbers cannot be told by sample."""


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers the random operators of one entry."""

    def __init__(self, owner: BySample) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner, self.checkpoints = owner, open_checkpoints()

    def from_here(self) -> Callable[[], BySample]:
        """Makes what answers the operators that are still to come."""
        owner = self.owner
        twin = BySample(owner.seed, owner.first, owner.samples, owner.axes)
        twin._before = list(owner.seen)
        return lambda: twin

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled():  # composite operators arrive whole, and what they draw must be seen
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        if not may_draw(func) or getattr(_drawing, "now", False):
            return func(*args, **kwargs)
        bound = bound_arguments(func, args, kwargs)
        if not draws_now(bound):
            return func(*args, **kwargs)
        _drawing.now = True
        try:
            return self._answer(func, bound, args, kwargs)
        except _NotFollowed as reason:
            self.owner._name(func._schema.name, str(reason))
            return func(*args, **kwargs)
        finally:
            _drawing.now = False

    def _answer(self, func: Any, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        why = self._cannot(func, bound)
        if why is not None:
            self._see(func, bound, ())
            raise _NotFollowed(why)
        filling = filling_of(func, bound, args, kwargs)
        if filling is not None:
            numbers, axis = self._told(func, bound, filling.target)
            numbers.fill(filling.target, axis, filling.fill)
            return filling.finish(filling.target)
        if func is torch.ops.aten.bernoulli_.Tensor:
            chances = bound["p"].expand_as(bound["self"])
            return bound["self"].copy_(self._one_by_one(torch.ops.aten.bernoulli.default, {"self": chances}))
        return self._one_by_one(func, bound)

    def _one_by_one(self, func: Any, bound: dict[str, Any]) -> Any:
        if "generator" not in bound and func is not torch.ops.aten.bernoulli.default:
            func = getattr(func.overloadpacket, "generator", func)  # for example randperm.generator
        takes = any(argument.name == "generator" for argument in func._schema.arguments)
        if not takes or len(func._schema.returns) != 1 or func._schema.is_mutable:
            self._see(func, bound, ())
            raise _NotFollowed("it takes no generator, or writes where it is told to")
        shared = self._numbers().generator(torch.Generator(bound["device"] if "device" in bound else _device(bound)))
        out = func(**{**bound, "generator": shared})
        numbers, axis = self._told(func, bound, out)
        why = None if axis is None else numbers.one_by_one(func, bound, out, axis)
        if why is not None:
            raise _NotFollowed(why)
        return out

    def _cannot(self, func: Any, bound: dict[str, Any]) -> str | None:
        """Why the operator cannot be followed, as far as this does not depend on shapes."""
        tensors = [value for value in bound.values() if isinstance(value, Tensor)]
        if bound.get("generator") is not None:
            return "it draws from a generator that it was handed"
        if is_fused(func):
            return "a fused kernel keeps its dropout mask to itself (sdpa_kernel(SDPBackend.MATH) avoids it)"
        if any(t.is_nested or t.layout != torch.strided or is_traceable_wrapper_subclass(t) for t in tensors):
            return "its tensors are not dense"
        if any(t.is_meta for t in tensors) or str(bound.get("device")) == "meta":
            return "its tensors hold no numbers"
        if open_checkpoints() > self.checkpoints:
            return "the model recomputes it by torch.utils.checkpoint, which draws from the generator again"
        return None

    def _told(self, func: Any, bound: dict[str, Any], target: Tensor) -> tuple[Numbers, int | None]:
        """The operator's numbers, and its target's axis of samples."""
        numbers, name, shape = self._numbers(), func._schema.name, tuple(target.shape)
        self._see(func, bound, shape)
        if self.owner.axes is not None:
            axis, why = self.owner.axes.find(numbers.place, name, shape, self.owner.samples)
            if why is not None:
                raise _NotFollowed(why)
            return numbers, axis
        if shape:
            self.owner._name(name, f"its samples were guessed from the shape {shape} alone")
        return numbers, guessed(shape, self.owner.samples)

    def _numbers(self) -> Numbers:
        return Numbers(self.owner.seed, len(self.owner.seen), self.owner.first, self.owner.samples)

    def _see(self, func: Any, bound: dict[str, Any], shape: tuple[int, ...]) -> None:
        self.owner.seen.append(Seen(func._schema.name, shape, plain_arguments(bound)))


def _device(bound: dict[str, Any]) -> torch.device:
    """The device of the first tensor among the arguments, or else the default."""
    tensors = [value for value in bound.values() if isinstance(value, Tensor)]
    return tensors[0].device if tensors else torch.get_default_device()
