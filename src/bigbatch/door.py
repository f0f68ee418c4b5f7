"""How door 2 runs one call of a model: which engine, in which pieces, and what is known from the calls before."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from bigbatch.core import models
from bigbatch.core.arguments import gathered, spread
from bigbatch.core.batch import Batch
from bigbatch.core.batch_norm import BatchNorm
from bigbatch.core.buffers import Buffers
from bigbatch.core.rng import preserved_rng
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.sums import expect, is_low
from bigbatch.engines import blocks, joined, lockstep, recompute
from bigbatch.engines.again import autocast
from bigbatch.engines.randomness import Randomness
from bigbatch.fit.budget import affordable
from bigbatch.fit.later import Later, probe_of
from bigbatch.fit.need import Place, need_of
from bigbatch.fit.sizer import Sizer
from bigbatch.terms import StepReport


@dataclass
class Door:
    """How one model is run in micro-batches.

    Attributes:
        micro_batch_size: samples in one micro-batch, or "auto".
        activations: "recompute", "offload" or "keep".
        checkpoint: whether repeated blocks keep only their inputs.
        keep_bytes: memory to spend on keeping the activations of the last micro-batches; None for no more than needed.
        splitter: cuts the arguments of a call.
        modules: the model, and modules that it holds in plain attributes.
        sizer: chooses the size where it is automatic; `without_graph` does in calls that no backward follows.
        around: what a proof puts around the forward of a micro-batch.
        report: what the last call did.
        checked: micro-batch sizes whose outputs are known to be joinable.
        places: where the model of the last call is checkpointed, with `checkpoint`.
        sample_bytes: bytes that the backward of one sample keeps, once measured.
        norms: how batch norm is treated.
        randomness: how random numbers are drawn.
        autocast: the dtype of autocast around the model's forward, or None.
        grad_dtype: as in `MicroBatched`.
    """

    micro_batch_size: int | str
    activations: str
    checkpoint: bool
    keep_bytes: int | None
    splitter: Splitter
    modules: list[nn.Module]
    sizer: Sizer
    norms: BatchNorm
    randomness: Randomness
    without_graph: Sizer
    autocast: torch.dtype | None = None
    grad_dtype: torch.dtype | None = None
    around: Callable[[Piece], Any] | None = None
    report: StepReport | None = None
    checked: set[int] = field(default_factory=set)
    sample_bytes: float | None = None
    places: blocks.Places | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs for the whole batch."""
        inputs = gathered(args, kwargs)
        inner = models.inner_modules(self.modules)
        start, retries = time.perf_counter(), 0
        self.places = blocks.places_of(inner) if self.checkpoint else None
        if isinstance(self.micro_batch_size, str):
            outputs, retries = self._automatic(model, inputs, inner)
        else:
            outputs = self._attempt(model, inputs, inner, self.micro_batch_size)
        self.report = replace(cast(StepReport, self.report), retries=retries, seconds=time.perf_counter() - start)
        return outputs

    def _automatic(self, model: nn.Module, inputs: Any, inner: list[nn.Module]) -> tuple[Any, int]:
        """The outputs, and how many tries ran out of memory before."""
        parameters = models.parameters_of(inner)
        place = Place(inner, models.device_of(parameters), parameters)
        need = need_of([(inputs, None)], self.splitter, place)
        need = replace(need, probe=probe_of(functools.partial(self._forward, model), inputs, self.splitter, need))
        if not torch.is_grad_enabled():
            return self.without_graph.run(lambda size: self._attempt(model, inputs, inner, size), need)
        later = Later(self.sizer, need, self._one_more_retry)
        return later.run(lambda size: self._attempt(model, inputs, inner, size, later))

    def _one_more_retry(self) -> None:
        self.report = self.report and replace(self.report, retries=self.report.retries + 1)

    def _forward(self, model: nn.Module, piece: Piece) -> Any:
        positional, keywords = spread(piece.inputs)
        device = None
        if self.autocast is not None:  # every micro-batch comes here
            device = models.device_of(models.parameters_of(models.inner_modules(self.modules)))
        with (
            autocast(self.autocast, device),
            self.around(piece) if self.around is not None else nullcontext(),
            self.places.checkpointed() if self.places is not None else nullcontext(),
        ):
            return model(*positional, **keywords)

    def _attempt(
        self,
        model: nn.Module,
        inputs: Any,
        inner: list[nn.Module],
        micro_batch_size: int,
        later: Later | None = None,
    ) -> Any:
        """The outputs from micro-batches of one size; with `later`, a backward that runs out of memory goes smaller."""
        return self.norms.sighted(lambda: self._run(model, inputs, inner, micro_batch_size, later), inner)

    def _run(
        self, model: nn.Module, inputs: Any, inner: list[nn.Module], micro_batch_size: int, later: Later | None
    ) -> Any:
        pieces = self.splitter.pieces(inputs, None, micro_batch_size)
        self.report = StepReport(sum(p.samples for p in pieces), len(pieces), pieces[0].samples if pieces else 0, None)
        if not pieces:
            return self._forward(model, Piece(0, inputs, None))

        parameters = models.parameters_of(inner)
        if self.grad_dtype is not None and torch.is_grad_enabled():
            expect([(parameter, self.grad_dtype) for parameter in parameters if is_low(parameter)])
        device = models.device_of(parameters)
        batch = Batch([inputs], pieces, inner, Buffers(inner), device)
        forward = self.randomness.drawing(batch, functools.partial(self._forward, model), self.splitter)
        size = pieces[0].samples
        tied = functools.partial(recompute.refuse_tied_axes, batch, forward, self.splitter)
        check = None if size in self.checked else tied
        joint = self.norms.is_joint(inner, len(pieces))
        if joint and self.checkpoint:
            blocks.refuse_meeting(inner)
        kept = 1 if len(pieces) == 1 else 0 if joint else self._kept(batch, forward)
        with batch.buffers.put_back_on_error():
            if joint:
                outputs = lockstep.outputs(batch, forward, self.activations, check)
                if later is not None:
                    later.follow(outputs)
            else:
                outputs = joined.outputs(
                    batch,
                    forward,
                    parameters,
                    self.splitter,
                    activations=self.activations,
                    kept=kept,
                    check=check,
                    grad_dtype=self.grad_dtype,
                    tries=later.tries if later is not None else None,
                    by_sample=self.randomness.mode == "by_sample",
                )
        self.checked.add(size)
        self.report = replace(self.report, peak_bytes=models.peak_bytes(device))
        return outputs

    def _kept(self, batch: Batch, forward: recompute.Forward) -> int:
        """How many of the last micro-batches the stated budget keeps; the first time, one of them is measured."""
        if self.keep_bytes is None or not torch.is_grad_enabled():
            return 0
        if self.sample_bytes is None:
            first = recompute.fresh(recompute.moved(batch.pieces[0], batch.device), batch.pieces[0])
            constants = [*models.parameters_of(batch.inner), *batch.buffers.originals]
            with preserved_rng(models.generators_of(batch.inner)), batch.buffers.replayed():
                self.sample_bytes = recompute.saved_bytes(forward, first, constants) / first.samples
        return affordable([piece.samples for piece in batch.pieces], self.sample_bytes, self.keep_bytes)
