"""Random numbers of the whole batch, handed out again in slices: a micro-batch sees the whole batch's masks.

Dropout makes the whole batch's gradient a matter of luck: other masks, another gradient. To compare two ways of running
one batch, both must use the same numbers. A random operator of a micro-batch is answered here with its samples' part
of what the same operator drew for the whole batch.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.core.random_operators import (
    MIXERS,
    Draw,
    bound_arguments,
    draws_now,
    may_draw,
    no_slices,
    parts_of,
    plain_arguments,
    written_by,
)
from bigbatch.errors import OptionError

_Answer = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
_Later = Callable[[], Callable[[], AbstractContextManager[None]]]


def host_numbers() -> Callable[[], None]:
    """Reads the global generators of Python and, where it is in use, NumPy; the result puts them back."""
    numpy = sys.modules.get("numpy")
    python, other = random.getstate(), numpy.random.get_state() if numpy is not None else None

    def put_back() -> None:
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(other)

    return put_back


def states_of(generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Reads some generators; the result puts them back."""
    states = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)

    return put_back


def snapshot(others: Sequence[torch.Generator] = ()) -> Callable[[], None]:
    """Reads every global generator in use, and any others; the function that comes back puts them back."""
    host, own = host_numbers(), states_of(others)
    cpu = torch.get_rng_state()
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if in_use else []
    mps = torch.mps.get_rng_state() if torch.backends.mps.is_available() else None

    def put_back() -> None:
        host()
        own()
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
        if mps is not None:
            torch.mps.set_rng_state(mps)

    return put_back


@contextmanager
def preserved_rng(others: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Puts the global generators (Python, NumPy, CPU, every CUDA device, MPS) and others back at exit as at entry.

    Costs copies of 10 KB where CUDA was never used, because CUDA is then left alone. A CUDA that is first used inside
    has no earlier state and keeps the one it then has.

    >>> import torch
    >>> with preserved_rng():
    ...     inside = torch.rand(3)
    >>> bool((torch.rand(3) == inside).all())
    True
    """
    put_back = snapshot(others)
    try:
        yield
    finally:
        put_back()


class _Asking(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Hands every random operator to `answer`; all other operators run as they are."""

    checkpoints = 0  # counted by `checkpoints.Numbers`, which asks `from_here`

    def __init__(self, answer: _Answer, from_here: _Later | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.answer, self.from_here = answer, from_here

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if may_draw(func) and draws_now(bound_arguments(func, args, kwargs)):
            return self.answer(func, args, kwargs)
        return func(*args, **kwargs)


def inside_checkpoint() -> bool:
    """Whether the code at hand runs inside a call of `torch.utils.checkpoint`."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename != torch.utils.checkpoint.__file__:
        frame = frame.f_back
    return frame.f_code.co_filename == torch.utils.checkpoint.__file__


class Draws:
    """The random numbers that one forward over the whole batch drew, for its micro-batches to draw again.

    Samples are told by shapes (see `random_operators.share`). An axis that merges samples with something else is taken
    to be sample-major; nothing in a shape could tell [samples * T] from [T * samples]. Numbers from Python's `random`
    or from NumPy are not seen. The numbers recorded take as much memory as the masks of the whole batch.

    Attributes:
        unfollowed: every random operator that could not be followed, by name and with the reason. Such an operator drew
            new numbers, so that a difference between the gradients proves nothing while this list is not empty.

    >>> import torch
    >>> draws, x = Draws(), torch.ones(6, 2)
    >>> with draws.record(samples=6):
    ...     whole = torch.nn.functional.dropout(x, 0.5)
    >>> with draws.replay(4, 6):
    ...     piece = torch.nn.functional.dropout(x[4:6], 0.5)
    >>> bool((piece == whole[4:6]).all()), draws.unfollowed
    (True, [])
    """

    def __init__(self) -> None:
        self.unfollowed: list[str] = []
        self._draws: list[Draw] = []
        self._samples = 0
        self._inside = threading.local()  # micro-batches may run side by side

    @contextmanager
    def record(self, samples: int) -> Iterator[None]:
        """Records what the forward inside draws for a batch of `samples`; forgets all that was recorded before.

        Only the forward belongs inside. `torch.no_grad()` may surround it, `torch.inference_mode()` may not.
        """
        self._draws, self.unfollowed, self._samples = [], [], samples
        with self._on_top(self._keep):
            yield

    @contextmanager
    def replay(self, first: int, last: int, begin: int | None = None) -> Iterator[None]:
        """Answers the j-th random operator inside with the part of the j-th recorded one of samples [first, last).

        A recomputation that sets in later says at which operator: `begin`.

        The global generators stay as they are. For a forward under `torch.utils.checkpoint`, hand a new `replay` of the
        same samples to the recomputation as well (`context_fn`): it counts from zero, whatever surrounds it.

        Raises:
            OptionError: the samples are not among those that were recorded.
        """
        if not 0 <= first <= last <= self._samples:
            raise OptionError(
                f"samples {first} to {last} were asked for",
                f"{self._samples} samples were recorded",
                "record the whole batch first and ask for samples of it",
            )
        place = begin or 0

        def answer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            nonlocal place
            place += 1
            return self._hand_out(place - 1, (first, last), func, args, kwargs)

        with self._on_top(answer, lambda: partial(self.replay, first, last, place)):
            yield
        if begin is None and place < len(self._draws):  # a recomputation stops early: it leaves by an exception
            self._name(self._draws[place].name, "the micro-batch never came to it")

    @contextmanager
    def _on_top(self, answer: _Answer, from_here: _Later | None = None) -> Iterator[None]:
        """Lets `answer` rule; an outer record or replay stays out of what happens inside."""
        self._inside.level = level = getattr(self._inside, "level", 0) + 1

        def alone(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return answer(func, args, kwargs) if self._inside.level == level else func(*args, **kwargs)

        try:
            with _Asking(alone, from_here):
                yield
        finally:
            self._inside.level = level - 1

    def _name(self, name: str, why: str) -> None:
        if f"{name}: {why}" not in self.unfollowed:
            self.unfollowed.append(f"{name}: {why}")

    def _keep(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        name, bound = func._schema.name, bound_arguments(func, args, kwargs)
        written = written_by(func, bound, out)
        why = no_slices(func, written)
        if why is not None:
            self._name(name, why)
        elif inside_checkpoint():
            self._name(name, "the model recomputes it by torch.utils.checkpoint, which draws from the generator again")
        kept = [] if why is not None else [t.detach().clone() for t in written[name in MIXERS :]]
        self._draws.append(Draw(name, plain_arguments(bound), kept))
        return out

    def _hand_out(
        self, place: int, span: tuple[int, int], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        name, bound = func._schema.name, bound_arguments(func, args, kwargs)
        draw = self._draws[place] if place < len(self._draws) else None
        source = bound[func._schema.arguments[0].name].clone() if name in MIXERS else None
        put_back = snapshot([value for value in bound.values() if isinstance(value, torch.Generator)])
        out = func(*args, **kwargs)
        written = written_by(func, bound, out)
        parts, why = parts_of(draw, name, plain_arguments(bound), written[name in MIXERS :], (self._samples, *span))
        if why is not None:
            self._name(name, why)
            return out
        put_back()
        for target, part in zip(written[name in MIXERS :], parts, strict=True):
            target.copy_(part)
        if source is not None:
            written[0].copy_(MIXERS[name](source, written[1], bound))
        return out
