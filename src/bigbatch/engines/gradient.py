"""The loss of one batch and its gradient, by the engine that suits the loss and the model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from bigbatch.core.batch import Batch
from bigbatch.core.gradients import detached
from bigbatch.core.join import join
from bigbatch.core.losses import call_loss
from bigbatch.core.models import call, parameters_of
from bigbatch.core.move import to_device
from bigbatch.core.own_loss import OwnLoss
from bigbatch.core.rules import Rule, weigh
from bigbatch.core.split import Piece, Splitter
from bigbatch.engines import blocks, joined, lockstep, recompute, sequential
from bigbatch.engines.again import autocast
from bigbatch.engines.offload import Host
from bigbatch.engines.randomness import Randomness

Items = Sequence[tuple[Any, Any]]
OnOutputs = Callable[[Any, Any], object] | None


@dataclass(frozen=True)
class Task:
    """What is to be computed for one batch.

    Attributes:
        model: a module or a function.
        loss_fn: None where the model returns its own loss.
        rule: how the loss is weighed; None where the model has to be asked, or where nobody knows.
        own_loss: asks the model.
        joint: whether the micro-batches have to meet, for their batch norm.
        activations: "recompute", "offload" or "keep".
        checkpoint: whether repeated blocks keep only their inputs.
        splitter: counts samples.
        autocast: the dtype of autocast around forward and loss.
        scale: multiplies a weight by the loss scale of a GradScaler.
        around: what a proof puts around a micro-batch.
        randomness: how random numbers are drawn.
        grad_dtype: as in `Accumulator`.
    """

    model: Callable[..., Any]
    loss_fn: Callable[..., Tensor] | None
    rule: Rule | None
    own_loss: OwnLoss | None
    joint: bool
    activations: str
    checkpoint: bool
    splitter: Splitter
    autocast: torch.dtype | None
    scale: Callable[[Tensor], Tensor] | None
    around: Callable[[Piece], AbstractContextManager[object]] | None
    randomness: Randomness
    grad_dtype: torch.dtype | None = None

    def run(self, batch: Batch, items: Items, on_outputs: OnOutputs) -> tuple[Tensor, Any]:
        """The batch's loss, with its gradient in `.grad`, and its denominator where it has one that bigbatch knows."""
        if not batch.pieces:
            return torch.zeros((), device=batch.device), None
        if self.joint and self.checkpoint:
            blocks.refuse_meeting(batch.inner)
        with blocks.checkpointed(batch.inner) if self.checkpoint else nullcontext():
            return self._run(batch, items, on_outputs)

    def _run(self, batch: Batch, items: Items, on_outputs: OnOutputs) -> tuple[Tensor, Any]:
        rule = self.rule
        if rule is None and self.own_loss is None:
            return self._of_all_outputs(batch, items, on_outputs), None
        if rule is None:
            with autocast(self.autocast, batch.device):
                rule = cast(OwnLoss, self.own_loss).rule(batch.pieces, batch.device)
        return self._weighed(batch, items, rule, on_outputs)

    def _weighed(self, batch: Batch, items: Items, rule: Rule, on_outputs: OnOutputs) -> tuple[Tensor, Any]:
        """A loss that adds up over micro-batches."""
        weights, totals, denominator = weigh(rule, batch.pieces, items, batch.device)
        extra, of = rule.extra(totals), rule.for_batch()
        shown: list[Any] = []

        forward = self._forward(batch, extra)

        def loss_of(piece: Piece) -> Tensor:
            outputs = forward(piece)
            if on_outputs is not None:
                shown.append(outputs)
            if rule.terms is not None:
                rule.refuse_other_samples(outputs, piece.samples)
            return of(outputs, piece.targets, totals)

        def show(piece: Piece) -> None:  # once the backward is through, nobody minds what happens to the outputs
            cast(Callable[[Any, Any], object], on_outputs)(detached(shown.pop(0)), piece.targets)

        run, done = self._inside(loss_of, batch.device), None if on_outputs is None else show
        if self.joint:
            loss = lockstep.gradient(batch, weights, run, self.activations, self.scale, done)
        else:
            whole = sum(piece.samples for piece in batch.pieces)
            shares = [piece.samples / whole for piece in batch.pieces]
            if self.activations == "offload":
                run = offloaded(run, Host(parameters_of(batch.inner)))
            loss = sequential.run(batch.there(), weights, shares, run, batch.buffers, self.scale, done)
        return loss, denominator

    def _of_all_outputs(self, batch: Batch, items: Items, on_outputs: OnOutputs) -> Tensor:
        """A loss that nobody can weigh is computed once, on the outputs of the whole batch."""
        loss_fn = cast(Callable[..., Tensor], self.loss_fn)
        samples = [self.splitter.count(*item) for item in items]
        parts = [targets for _, targets in items]
        targets = join(parts, samples, "targets") if len(parts) > 1 else parts[0]
        targets = targets if batch.device is None else to_device(targets, batch.device)
        inside = self._inside(self._forward(batch), batch.device)
        check = functools.partial(recompute.refuse_tied_axes, batch, inside, self.splitter)
        if self.joint:
            outputs = lockstep.outputs(batch, inside, self.activations, check)
        else:
            outputs = joined.outputs(
                batch,
                inside,
                parameters_of(batch.inner),
                self.splitter,
                activations=self.activations,
                kept=int(len(batch.pieces) == 1),
                check=check,
                grad_dtype=self.grad_dtype,
            )
        with batch.buffers.lent(1.0):
            with autocast(self.autocast, batch.device):
                loss = sequential.scalar(call_loss(loss_fn, outputs, targets))
            seed = sequential.weight_like(1.0, loss)
            torch.autograd.backward(loss, self.scale(seed) if self.scale is not None else seed)
        if on_outputs is not None:
            on_outputs(detached(outputs), targets)
        return loss.detach()

    def _forward(self, batch: Batch, extra: Mapping[str, Any] | None = None) -> Callable[[Piece], Any]:
        """The model's outputs, with the random numbers that are theirs."""

        def forward(piece: Piece) -> Any:
            return call(self.model, piece.inputs, extra)

        with autocast(self.autocast, batch.device):
            return self.randomness.drawing(batch, forward, self.splitter)

    def _inside(self, function: Callable[[Piece], Any], device: torch.device | None) -> Callable[[Piece], Any]:
        """The function, run under autocast and under whatever a proof puts around a micro-batch."""
        if self.autocast is None and self.around is None:
            return function

        def run(piece: Piece) -> Any:
            with autocast(self.autocast, device), self.around(piece) if self.around is not None else nullcontext():
                return function(piece)

        return run


def offloaded(function: Callable[[Piece], Tensor], host: Host) -> Callable[[Piece], Tensor]:
    """The function, whose saved tensors wait on the host."""

    def run(piece: Piece) -> Tensor:
        with host.hooks():
            return function(piece)

    return run
