"""Sees every forward of a run: which samples of the batch it got, and what its backward added to `.grad`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.rng import Draws
from bigbatch.core.split import Piece
from bigbatch.core.tree import leaves
from bigbatch.verifier.case import Bench, Gradients, Span
from bigbatch.verifier.generators import OwnNumbers
from bigbatch.verifier.numbers import ByPlace
from bigbatch.verifier.precision import InDouble


class Watch:
    """Sees every forward of a run: which samples it got, and what `.grad` held before it."""

    def __init__(self, bench: Bench, draws: Draws | ByPlace, samples: int, double: bool) -> None:
        self.bench, self.draws, self.samples, self.double = bench, draws, samples, double
        self.spans: list[Span] = []
        self.held: list[Gradients] = []
        self.own: dict[Span, OwnNumbers] = {}

    @contextmanager
    def around(self, piece: Piece) -> Iterator[None]:
        self._note((piece.first, piece.first + piece.samples))
        own = self.own.setdefault(self.spans[-1], OwnNumbers())
        with InDouble(self.double), self.draws.replay(*self.spans[-1]), own.again():
            yield

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Every call of the model inside is found again in the batch, and draws what its samples drew there."""
        module = self.bench.modules[0]
        forward: Callable[..., Any] = module.forward

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            span = place_of((args, kwargs), self.bench.inputs, self.samples, self.spans[-1][1] if self.spans else 0)
            if span is not None:
                self._note(span)
            with InDouble(self.double), nullcontext() if span is None else self.draws.replay(*span):
                return forward(*args, **kwargs)

        module.__dict__["forward"] = watched
        yield
        del module.__dict__["forward"]

    def parts(self) -> list[Gradients]:
        """What each forward's backward added; empty where a forward was run again, or backwards were put off."""
        if not self.held or len(self.held) != len(set(self.spans)):
            return []
        ends = [*self.held[1:], self._gradients()]
        return [_minus(after, before) for after, before in zip(ends, self.held, strict=True)]

    def _note(self, span: Span) -> None:
        self.spans.append(span)
        self.held.append({name: None if g is None else g.clone() for name, g in self._gradients().items()})

    def _gradients(self) -> Gradients:
        return {name: parameter.grad for name, parameter in self.bench.parameters().items()}


def _minus(after: Gradients, before: Gradients) -> Gradients:
    found: Gradients = {}
    for name, gradient in after.items():
        earlier = before[name]
        found[name] = gradient if gradient is None or earlier is None else gradient - earlier
    return found


def place_of(call: Any, inputs: Any, samples: int, expected: int) -> Span | None:
    """Which samples of the batch a call was given, told by their values; `expected` is the first guess.

    >>> batch = torch.arange(12.0).view(6, 2)
    >>> place_of(batch[2:4], batch, 6, 0), place_of(batch[[4, 5]], batch, 6, 0), place_of(batch[::2], batch, 6, 0)
    ((2, 4), (4, 6), None)
    """
    wholes = [leaf for leaf in leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == samples]
    for part in leaves(call):
        if not isinstance(part, Tensor) or part.dim() == 0:
            continue
        for leaf in wholes:
            if leaf.shape[1:] == part.shape[1:] and leaf.dtype == part.dtype and 0 < len(part) <= samples:
                there, size = part.detach().to(leaf.device), len(part)
                starts = [expected, *range(samples - size + 1)]
                for first in starts:
                    if first + size <= samples and torch.equal(leaf[first : first + size], there):
                        return first, first + size
    return None
