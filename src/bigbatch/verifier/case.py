"""What is proved on what: one configuration, one batch, and fresh copies of both for every run."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core import models
from bigbatch.core.arguments import gathered
from bigbatch.core.held import Held, held, plain_tensors
from bigbatch.core.join import join
from bigbatch.core.rng import preserved_rng
from bigbatch.core.rules import rule_for
from bigbatch.core.split import Piece, Splitter, even_sizes
from bigbatch.door import Door
from bigbatch.errors import BigBatchError
from bigbatch.micro_batched import MicroBatched
from bigbatch.verifier.copies import Memo, batch_copy, copied, widened

Gradients = dict[str, "Tensor | None"]
Span = tuple[int, int]


@dataclass
class Bench:
    """Copies for one run, which may spoil them. `inner` is the model in a wrapper, `held` is what gradients reach."""

    model: Any
    inner: Any
    loss_fn: Any
    run: Any
    held: Held
    inputs: Any
    targets: Any
    options: dict[str, Any]

    @property
    def modules(self) -> list[nn.Module]:
        return list(self.held.modules.values())

    @property
    def device(self) -> torch.device | None:
        return models.device_of(models.parameters_of(models.inner_modules(self.modules)))

    @property
    def door(self) -> Door | None:
        return self.model.__dict__["_door"] if isinstance(self.model, MicroBatched) else None

    def parameters(self) -> dict[str, Tensor]:
        """Parameters, and the tensors beside them that get a gradient."""
        return self.held.trainable()

    def buffers(self) -> dict[str, Tensor]:
        return dict(self._named("named_buffers"))

    def plain(self) -> dict[str, Tensor]:
        return plain_tensors(self.named_modules())

    def named_modules(self) -> dict[str, nn.Module]:
        return dict(self._named("named_modules"))

    def _named(self, kind: str) -> Iterator[tuple[str, Any]]:
        """Names as the first module gives them; those of the others begin with their variable or attribute."""
        for start, module in self.held.modules.items():
            for name, value in getattr(module, kind)():
                yield f"{start}.{name}".strip("."), value


@dataclass(frozen=True)
class Case:
    """One configuration and one batch, as the user handed them over.

    Attributes:
        model, loss_fn, inputs, targets: the user's own, never run.
        run: a function of the user's that is judged in place of the doors.
        options: those of `Accumulator`.
        micro_batch_size: what the doors are run with.
        double: whether copies are made in float64.
        edits: what is changed in every copy before it runs; experiments add to them.
    """

    model: Any
    loss_fn: Any
    inputs: Any
    targets: Any
    run: Callable[..., Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    micro_batch_size: int | None = None
    double: bool = True
    edits: tuple[Callable[[Bench], None], ...] = ()

    def fresh(self) -> Bench:
        """New copies of everything, without gradients.

        Raises:
            ModelError: something cannot be copied.
        """
        memo: Memo = {}
        model, loss_fn, run = (copied(value, memo) for value in (self.model, self.loss_fn, self.run))
        options = {name: copied(value, memo) for name, value in self.options.items()}
        inner = model.__dict__["_wrapped"] if isinstance(model, MicroBatched) else model
        copies = twins(self.every, memo)
        for module in copies.modules.values():
            if self.double:
                module._apply(widened)  # type: ignore[no-untyped-call]
            for tensor in [*module.parameters(), *module.buffers()]:
                tensor.grad = None
        for tensor in copies.loose.values():
            tensor.grad = None
            tensor.data = widened(tensor.data) if self.double else tensor.data
        inputs, targets = batch_copy(self.inputs, self.double), batch_copy(self.targets, self.double)
        bench = Bench(model, inner, loss_fn, run, twins(self.held, memo), inputs, targets, options)
        for edit in self.edits:
            edit(bench)
        return bench

    @functools.cached_property
    def held(self) -> Held:
        """What gradients of the whole batch can reach among the user's own."""
        return held(self._roots())

    @functools.cached_property
    def every(self) -> Held:
        """The same, and what a loop of the user's alone can reach: it is copied, but not compared."""
        return held({**self._roots(), "run": self.run})

    def _roots(self) -> dict[str, Any]:
        first = {"modules": list(self.options.get("modules") or ()), "model": self.model, "loss_fn": self.loss_fn}
        return {**first, **{name: value for name, value in self.options.items() if name != "modules"}}

    @property
    def way(self) -> str:
        """ "function", "wrapper", "joint" (the loss runs once on joined outputs) or "sequential"."""
        if self.run is not None:
            return "function"
        if isinstance(self.model, MicroBatched):
            return "wrapper"
        unknown = rule_for(self.model, self.loss_fn, self.options.get("reduction", "auto")) is None
        return "joint" if unknown and self.loss_fn is not None else "sequential"

    def splitter(self, bench: Bench) -> Splitter:
        if bench.door is not None:
            return bench.door.splitter
        inner = models.inner_modules(bench.modules)
        return Splitter(bench.options.get("split"), models.sizes_of(models.parameters_of(inner)))

    def samples(self, bench: Bench) -> int:
        return self.splitter(bench).count(*self._cut_from(bench))

    def _cut_from(self, bench: Bench) -> tuple[Any, Any]:
        """Inputs and targets as the way at hand cuts them; a wrapper sees the arguments of its call alone."""
        if bench.door is None:
            return bench.inputs, bench.targets
        return models.call(lambda *args, **kwargs: gathered(args, kwargs), bench.inputs), None

    def pieces(self, bench: Bench, spans: list[Span]) -> list[Piece]:
        """The batch cut where a run was seen to cut it.

        Raises:
            BigBatchError: it cannot be cut there.
        """
        inputs, targets = self._cut_from(bench)
        splitter, sizes = self.splitter(bench), [last - first for first, last in spans]
        if self.run is None:
            return splitter.pieces(inputs, targets, self.size(bench))
        if not sizes or [first for first, _ in spans] != [sum(sizes[:k]) for k in range(len(sizes))]:
            return []
        singles = splitter.pieces(inputs, targets, 1)
        return [_joined(singles[first:last], first) for first, last in spans]

    def size(self, bench: Bench) -> int | None:
        """The micro-batch size that the doors are run with; None where nobody stated a number ("auto")."""
        own = bench.door.micro_batch_size if bench.door is not None else None
        return self.micro_batch_size or (own if isinstance(own, int) else None)


def twins(own: Held, memo: Memo) -> Held:
    """The copies of what gradients can reach; what was not copied is left out, and must stay as it is."""
    modules = {name: memo[id(module)] for name, module in own.modules.items() if id(module) in memo}
    return Held(modules, {name: memo[id(tensor)] for name, tensor in own.loose.items() if id(tensor) in memo})


def _joined(singles: list[Piece], first: int) -> Piece:
    ones = [1] * len(singles)
    inputs = join([single.inputs for single in singles], ones, "inputs")
    return Piece(len(singles), inputs, join([single.targets for single in singles], ones, "targets"), first)


def chosen_size(samples: int) -> int:
    """The largest micro-batch size that gives at least three micro-batches of uneven sizes, or else of even ones.

    >>> [chosen_size(samples) for samples in (2, 6, 8, 12)]
    [1, 2, 3, 5]
    """
    sizes = [size for size in range(samples, 0, -1) if len(even_sizes(samples, size)) >= 3]
    uneven = [size for size in sizes if len(set(even_sizes(samples, size))) > 1]
    return (uneven or sizes or [1])[0]


def tried(action: Callable[[], Any]) -> Any:
    """What an experiment gives, or None where it cannot be made on this batch."""
    try:
        return action()
    except (BigBatchError, RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError):
        return None


@contextmanager
def generators(seed: int) -> Iterator[None]:
    """Every run starts from the same random numbers: PyTorch's, Python's, and NumPy's where it is loaded."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    array = numpy.random.get_state() if numpy is not None else None
    with preserved_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        if numpy is not None:
            numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            if numpy is not None:
                numpy.random.set_state(array)
