"""Every layer's inputs and outputs, for the whole batch and for one micro-batch: which layer ties samples together?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core import models
from bigbatch.core.random_operators import share
from bigbatch.core.split import Piece
from bigbatch.core.tree import leaves
from bigbatch.verifier.case import Bench, Span, generators
from bigbatch.verifier.precision import InDouble
from bigbatch.verifier.runs import on_device


@dataclass(frozen=True)
class Call:
    """One call of one module, noted when it returned."""

    name: str
    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


def traced(bench: Bench, piece: Piece, drawing: AbstractContextManager[object], double: bool) -> list[Call]:
    """The calls of all modules in one forward, the inner ones before the outer ones."""
    calls: list[Call] = []
    handles = []

    def note(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls.append(Call(name, module, tensors([args, kwargs]), tensors(output)))

        return hook

    for name, module in bench.named_modules().items():
        handles.append(module.register_forward_hook(note(name), with_kwargs=True))
    with torch.no_grad(), generators(0), InDouble(double), drawing:
        models.call(bench.inner, on_device(piece.inputs, bench))
    for handle in handles:
        handle.remove()
    return calls


def tensors(tree: Any) -> list[Tensor]:
    """The tensors of a call, cloned: an operator in place may write to them before they are compared."""
    return [leaf.detach().clone() for leaf in leaves(tree) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def tied(whole: Sequence[Call], piece: Sequence[Call], samples: int, span: Span, tolerance: float) -> Call | None:
    """The first layer that was given its samples of the whole batch, but made something else of them."""
    for there, here in zip(whole, piece, strict=False):
        if there.name != here.name or len(there.outputs) != len(here.outputs):
            return None
        inputs = zip(there.inputs, here.inputs, strict=False)
        if not all(agree(w, p, samples, span, tolerance) is not False for w, p in inputs):
            continue
        outputs = zip(there.outputs, here.outputs, strict=True)
        if any(w.shape != p.shape and agree(w, p, samples, span, tolerance) is False for w, p in outputs):
            return there
    return None


def agree(whole: Tensor, piece: Tensor, samples: int, span: Span, tolerance: float) -> bool | None:
    """Whether the micro-batch's tensor is its samples' part of the whole one; None where no axis belongs to samples.

    >>> x = torch.arange(6.0).view(3, 2)
    >>> agree(x, x[1:], 3, (1, 3), 0.0), agree(x, x[:2], 3, (1, 3), 0.0), agree(x, x @ x.T, 3, (1, 3), 0.0)
    (True, False, None)
    """
    part = share(whole, piece.shape, samples, *span)
    if part is None:
        return None
    if not part.is_floating_point():
        return bool(torch.equal(part, piece))
    left, right = part.double(), piece.double()
    off = float(torch.nan_to_num(left - right).norm())
    return off <= tolerance * max(float(torch.nan_to_num(right).norm()), 1e-300)


def terms_of(calls: Sequence[Call], parameters: Sequence[Tensor], samples: int) -> int:
    """The longest sum that a gradient goes through: the rows that a weight's gradient is summed over (samples times
    positions), and the fan-in and fan-out of every layer that was called, once a step for recurrent ones.

    Where no layer was seen, every parameter counts once.
    """
    rows, fans = samples, 0
    for call in calls:
        own = [p for p in call.module.parameters(recurse=False) if p.dim() > 1]
        numbers = max((output.numel() for output in call.outputs), default=0)
        for weight in own:
            width = call.outputs[0].shape[-1] if isinstance(call.module, nn.RNNBase) else weight.shape[0]
            steps = numbers // (width * samples) or 1
            rows = max(rows, numbers // max(width, 1))
            fans += fan(weight) * (steps if isinstance(call.module, nn.RNNBase) else 1)
    return rows + (fans or sum(fan(p) for p in parameters if p.dim() > 1))


def fan(weight: Tensor) -> int:
    """Fan-in and fan-out of a weight together."""
    return math.prod(weight.shape[1:]) + weight.numel() // weight.shape[1]
