"""One run each: the whole batch, the user's configuration, single micro-batches, outputs joined before the loss."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.accumulator import Accumulator
from bigbatch.core import models
from bigbatch.core.join import join
from bigbatch.core.losses import call_loss
from bigbatch.core.move import to_device
from bigbatch.core.rng import Draws, preserved_rng
from bigbatch.core.rules import loss_of
from bigbatch.core.split import Piece
from bigbatch.core.weigh import divisor, divisors, number
from bigbatch.engines.randomness import Randomness
from bigbatch.errors import ModelError
from bigbatch.verifier.case import Bench, Case, Gradients, Span, generators
from bigbatch.verifier.numbers import ByPlace, numbers_of
from bigbatch.verifier.precision import Dtypes, InDouble, coarsest
from bigbatch.verifier.watch import Watch


@dataclass(frozen=True)
class Run:
    """What one run left behind.

    Attributes:
        loss: the loss that it returned, if any.
        gradients: name -> gradient.
        buffers: name -> buffer.
        plain: name -> tensor that a module keeps as a plain attribute.
        spans: the samples (first, last) of every forward that was seen, in order, each once.
        parts: what each micro-batch added to the gradient, where that was seen.
        moved: parameters that changed.
        dtype: the least precise dtype that the gradient went through.
    """

    loss: float | None
    gradients: Gradients
    buffers: dict[str, Tensor]
    plain: dict[str, Tensor] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    parts: list[Gradients] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    dtype: torch.dtype = torch.float64


class Trial:
    """One case with the random numbers that its whole batch drew; all other runs draw the same ones."""

    def __init__(self, case: Case) -> None:
        self.case, self.draws = case, numbers_of(case)
        self.bench = case.fresh()
        self.samples = case.samples(self.bench)
        self.whole = whole(case, self.draws.record(self.samples))

    def repeated(self, case: Case | None = None, seed: int = 0) -> Run:
        """The whole batch again, with the same draws."""
        return whole(case or self.case, self.draws.replay(0, self.samples), seed)

    def ours(self, seed: int = 0) -> Run:
        """The user's configuration."""
        return ours(self.case, self.draws, seed)

    def single(self, spans: list[Span]) -> list[Run]:
        """Each micro-batch alone, with the loss as it stands."""
        found = []
        for k, span in enumerate(spans):
            bench = self.case.fresh()
            piece = self.case.pieces(bench, spans)[k]
            with generators(0), InDouble(self.case.double):
                loss = plain_loss(bench, piece, self.draws.replay(*span), self.case.way == "sequential")
                loss.backward()  # type: ignore[no-untyped-call]
            found.append(record(bench, loss))
        return found

    def joined(self, spans: list[Span]) -> Run:
        """The outputs of all micro-batches joined, and the loss computed once."""
        bench = self.case.fresh()
        pieces = self.case.pieces(bench, spans)
        outputs = []
        with generators(0), InDouble(self.case.double):
            for piece, span in zip(pieces, spans, strict=True):
                with preserved_rng(), self.draws.replay(*span):
                    outputs.append(models.call(bench.inner, on_device(piece.inputs, bench)))
            joined = join(outputs, [piece.samples for piece in pieces])
            loss = call_loss(bench.loss_fn, joined, on_device(bench.targets, bench))
            loss.backward()  # type: ignore[no-untyped-call]
        return record(bench, loss)


def on_device(tree: Any, bench: Bench) -> Any:
    return tree if bench.device is None else to_device(tree, bench.device)


def whole(case: Case, drawing: AbstractContextManager[object], seed: int = 0) -> Run:
    """The definition of right: one forward and backward of plain PyTorch over the whole batch."""
    bench = case.fresh()
    piece = Piece(case.samples(bench), bench.inputs, bench.targets)
    before = {name: parameter.dtype for name, parameter in bench.parameters().items()}
    with generators(seed), Dtypes() as dtypes, InDouble(case.double):
        loss = plain_loss(bench, piece, drawing, case.way == "sequential")
        if not loss.requires_grad:
            raise ModelError(
                "the gradient of the whole batch was asked for",
                f"the loss depends on nothing that requires a gradient, with gradients {grad_mode()}",
                "unfreeze what is to be trained (requires_grad_(True)), and verify outside of torch.no_grad()",
            )
        loss.backward()  # type: ignore[no-untyped-call]
    return record(bench, loss, dtype=coarsest([*dtypes.seen, *before.values()]))


def grad_mode() -> str:
    return "on" if torch.is_grad_enabled() else "switched off"


def plain_loss(bench: Bench, piece: Piece, drawing: AbstractContextManager[object], loss_inside: bool) -> Tensor:
    """Forward and loss of a batch in one piece. Where the doors run the loss once, it draws on its own."""
    inputs, targets = on_device(piece.inputs, bench), on_device(piece.targets, bench)
    autocast, stated = bench.options.get("autocast"), totals_of(bench, inputs, targets)
    named = "num_items_in_batch" if isinstance(bench.inner, nn.Module) else "count"
    extra = {named: stated} if stated is not None and bench.loss_fn is None else {}
    device = bench.device or torch.device("cpu")
    with torch.autocast(device.type, dtype=autocast) if autocast is not None else nullcontext():
        if loss_inside:
            with drawing:
                return loss_from(bench, models.call(bench.inner, inputs, extra), targets, stated).reshape(())
        with preserved_rng(), drawing:
            outputs = models.call(bench.inner, inputs, extra)
        return loss_from(bench, outputs, targets, stated).reshape(())


def totals_of(bench: Bench, inputs: Any, targets: Any) -> Any:
    """The denominators of the batch as tensors, where the user's own count function states them."""
    reduction = bench.options.get("reduction", "auto")
    if not callable(reduction):
        return None
    count = reduction(inputs, targets)
    if isinstance(count, Mapping):
        return {term: tensor_of(total, bench.device) for term, total in divisors([count]).items()}
    return tensor_of(divisor([number(count)]), bench.device)


def tensor_of(total: Any, device: torch.device | None) -> Tensor:
    dtype = torch.int64 if isinstance(total, int) else torch.float64
    return total if isinstance(total, Tensor) else torch.full((), total, dtype=dtype, device=device)


def loss_from(bench: Bench, outputs: Any, targets: Any, stated: Any = None) -> Tensor:
    if bench.loss_fn is None:
        return loss_of(outputs)
    if stated is not None:
        loss: Tensor = bench.loss_fn(outputs, targets, stated)
        return loss
    return call_loss(bench.loss_fn, outputs, targets)


def ours(case: Case, draws: Draws | ByPlace, seed: int) -> Run:
    """The user's configuration, with the whole batch's draws handed out in slices."""
    bench = case.fresh()
    watch = Watch(bench, draws, case.samples(bench), case.double)
    values = {name: parameter.detach().clone() for name, parameter in bench.parameters().items()}
    scaler = bench.options.get("scaler")
    with generators(seed), InDouble(case.double):
        if case.run is not None:
            with watch.inside():
                loss = bench.run(bench.model, bench.inputs, bench.targets)
        elif bench.door is not None:
            bench.door.micro_batch_size = case.size(bench) or 1
            bench.door.around, bench.door.randomness = watch.around, Randomness("global")
            outputs = models.call(bench.model, bench.inputs)
            loss = loss_from(bench, outputs, on_device(bench.targets, bench))
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            accumulator = Accumulator(
                bench.model, bench.loss_fn, micro_batch_size=case.micro_batch_size, **bench.options
            )
            accumulator.around, accumulator.randomness = watch.around, Randomness("global")
            loss = accumulator.backward(bench.inputs, bench.targets)
    if not watch.spans:  # names what the whole batch drew and nobody came to
        with draws.replay(0, 0):
            pass
    run = record(bench, loss, scale=scaler.get_scale() if scaler is not None else 1.0)
    moved = [name for name, parameter in bench.parameters().items() if not torch.equal(parameter, values[name])]
    spans = list(dict.fromkeys(watch.spans))
    if case.run is None:  # a door may look at the outputs of a few samples more
        spans = in_a_row(spans)
    return replace(run, spans=spans, parts=watch.parts(), moved=moved)


def in_a_row(spans: Iterable[Span]) -> list[Span]:
    """The spans that go on where the last one ended.

    >>> in_a_row([(0, 3), (0, 2), (3, 5)])
    [(0, 3), (3, 5)]
    """
    found: list[Span] = []
    for span in spans:
        if span[0] == (found[-1][1] if found else 0):
            found.append(span)
    return found


def automatic_size(case: Case) -> int:
    """The micro-batch size that the automatic one settles on for a first batch, in the model's own dtype."""
    bench = replace(case, double=False).fresh()
    with generators(0):
        if bench.door is not None:
            bench.door.micro_batch_size = "auto"
            models.call(bench.model, bench.inputs)
            report = bench.door.report
        else:
            accumulator = Accumulator(bench.model, bench.loss_fn, **bench.options)
            accumulator.backward(bench.inputs, bench.targets)
            report = accumulator.report
    return report.micro_batch_size if report is not None else 0


def record(bench: Bench, loss: Any, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Run:
    number = loss.detach().item() if isinstance(loss, Tensor) and loss.numel() == 1 else loss
    gradients = {name: parameter.grad for name, parameter in bench.parameters().items()}
    if scale != 1.0:
        gradients = {name: None if g is None else g / scale for name, g in gradients.items()}
    buffers = {name: buffer.detach() for name, buffer in bench.buffers().items()}
    return Run(
        float(number) if isinstance(number, int | float) else None, gradients, buffers, bench.plain(), dtype=dtype
    )
