"""Any loss, and a backward that survives running out of memory: all micro-batches are one node of the user's graph.

Forward: every micro-batch runs, its outputs are kept and its graph is dropped. Backward: the micro-batches run again,
the last one first, and the node hands on the sums of their gradients; until then nothing has reached any `.grad`. An
out-of-memory error on the way throws away what was summed and starts the node's backward again in smaller pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bigbatch.core.batch import Batch
from bigbatch.core.gradients import Border, added_at_once, detached
from bigbatch.core.join import join
from bigbatch.core.models import generators_of
from bigbatch.core.move import ahead
from bigbatch.core.rng import Draws, preserved_rng, snapshot
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.tree import tensors_of
from bigbatch.engines.again import (
    Autocast,
    Tries,
    cannot_be_cut,
    known_leaves,
    linked,
    push,
    rows_of,
    same_outputs,
    tensors_in,
)
from bigbatch.engines.offload import Host
from bigbatch.engines.recompute import Forward, fresh, moved, refuse_left_behind
from bigbatch.engines.replay import Guard, modes_of
from bigbatch.errors import MicroBatchTooLarge

Gradients = Sequence[Tensor | None]


def run(
    batch: Batch,
    forward: Forward,
    parameters: Sequence[Tensor],
    splitter: Splitter,
    tries: Tries,
    *,
    activations: str = "recompute",
    kept: int = 0,
    check: Callable[[Any], None] | None = None,
    by_sample: bool = False,
) -> Any:
    """The outputs of the whole batch, behind one node whose backward runs the micro-batches again.

    Args:
        batch: the micro-batches and the modules.
        forward: the model's outputs for one micro-batch.
        parameters: everything that may get a gradient besides tensors of the batch.
        splitter: cuts a micro-batch whose backward ran out of memory.
        tries: what a failed try is told from, and what becomes of it.
        activations: as in `recompute.run`; where it is not "recompute", every micro-batch keeps its graph.
        kept: how many of the last micro-batches keep their graph, so that their first backward needs no forward.
        check: shown the first micro-batch's outputs before the others run.
        by_sample: whether the forward's random numbers do not depend on the split.

    Raises:
        ModelError: the outputs depend on a tensor that requires a gradient and is neither a parameter nor in the batch.
        MicroBatchTooLarge: in the backward, where a micro-batch does not fit and cannot be cut further. An error in
            the forward passes through: the call can be made again with smaller pieces.
    """
    border = Border([(piece.inputs, piece.targets) for piece in batch.pieces])
    pieces = [piece._replace(inputs=a, targets=b) for piece, (a, b) in zip(batch.pieces, border.items, strict=True)]
    buffers, device = batch.buffers, batch.device
    # What the user's graph holds in place of each leaf of a micro-batch's graph; for a parameter that is itself.
    outside = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    outside |= {id(leaf): tensor for tensor, leaf in border.leaves.values()}
    guard = Guard([*parameters, *(held for part in batch.source for held in tensors_of(part))])
    call = Call(replace(batch, pieces=pieces), forward, splitter, tries, guard, Autocast.now(device), by_sample)
    samples, host = [piece.samples for piece in pieces], Host(parameters)
    trees: list[Any] = []
    flags: list[bool] = []
    used: dict[int, Tensor] = {}
    for k, there in enumerate(ahead(pieces, device) if device is not None else pieces):
        with buffers.lent(samples[k] / sum(samples), samples[k]):
            how = "keep" if k >= len(pieces) - kept else activations
            with host.hooks() if how == "offload" else nullcontext():
                outputs = call.first_outputs(there, keep=how != "recompute")
        used |= known_leaves(outputs, outside.keys(), (there.inputs, there.targets))
        flags += [tensor.requires_grad for tensor in tensors_in(outputs)]
        trees.append(detached(outputs))
        if k == 0 and len(pieces) > 1:
            refuse_left_behind(batch.inner, outputs)
            if check is not None:
                check(trees[0])
        outputs = None
    if any(flags):
        call.leaves = list(used.values())
        tensors = [tensor for tree in trees for tensor in tensors_in(tree)]
        node: Any = Again  # PyTorch leaves `apply` without types
        trees = linked(trees, node.apply(call, tensors, flags, *(outside[leaf] for leaf in used)))
    whole = join(trees, samples)
    buffers.settle()
    guard.watch(whole)
    return whole


class Again(torch.autograd.Function):
    """The node: the outputs of all micro-batches one way, the sums of their gradients the other."""

    @staticmethod
    def forward(ctx: Any, call: Call, outputs: list[Tensor], flags: list[bool], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(tensor for tensor, flag in zip(outputs, flags, strict=True) if not flag))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return None, None, None, *ctx.call.sums(gradients)


@dataclass
class Call:
    """All that the backward of one call needs to find what its forwards found.

    Attributes:
        leaves: what gathers gradients: the parameters in use, and leaves in place of the batch's tensors.
        numbers: for each micro-batch, what puts the random numbers back to those its forward began with.
        counts: how many tensors each micro-batch's outputs hold.
        graphs: the outputs of micro-batches that kept their graph, until a backward uses them up.
        at_hand: samples of the piece that is running.
    """

    batch: Batch
    forward: Forward
    splitter: Splitter
    tries: Tries
    guard: Guard
    autocast: Autocast
    by_sample: bool = False
    leaves: list[Tensor] = field(default_factory=list)
    numbers: list[Callable[[], None]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    graphs: dict[int, Any] = field(default_factory=dict)
    at_hand: int = 0

    def first_outputs(self, there: Piece, keep: bool) -> Any:
        """The next micro-batch's outputs."""
        k = len(self.numbers)
        self.numbers.append(self._surroundings())
        outputs = self.forward(fresh(there, self.batch.pieces[k]))
        self.counts.append(len(tensors_in(outputs)))
        if keep and torch.is_grad_enabled():
            self.graphs[k] = outputs
        return outputs

    def sums(self, gradients: Gradients) -> list[Tensor | None]:
        """The gradient of each leaf, from the gradients of all outputs; after a failure in smaller pieces."""
        limit: int | None = None
        while True:
            try:
                with self.tries.around():
                    return self._attempt(gradients, limit)
            except BaseException as error:
                if not self.tries.is_oom(error):
                    raise
                self.tries.let_go(error)
            self.graphs.clear()
            self.tries.on_failure(self.at_hand)
            size = self.at_hand if limit is None else min(limit, self.at_hand)
            if size == 1:
                asked, found = "the backward of a micro-batch was asked for", "memory ran out, one sample at a time too"
                raise MicroBatchTooLarge(asked, found, "make the model or the sample smaller")
            limit = (size + 1) // 2

    def _attempt(self, gradients: Gradients, limit: int | None) -> list[Tensor | None]:
        last = len(gradients)
        with preserved_rng(generators_of(self.batch.inner)), added_at_once(self.leaves) as sums:
            for k in reversed(range(len(self.batch.pieces))):
                own = gradients[last - self.counts[k] : last]
                last -= self.counts[k]
                if any(gradient is not None for gradient in own):
                    self._backward(k, own, limit)
            return [sums.taken(leaf) for leaf in self.leaves]

    def _backward(self, k: int, gradients: Gradients, limit: int | None) -> None:
        piece = self.batch.pieces[k]
        self.at_hand = piece.samples
        if limit is None or piece.samples <= limit:
            outputs = tensors_in(self.graphs.pop(k) if k in self.graphs else self._outputs(k, piece))
            push(outputs, gradients, self.leaves)
            return
        # Without a graph the micro-batch fits, as a whole: this tells what each part of it must draw, and must give.
        draws = Draws()
        with nullcontext() if self.by_sample else draws.record(piece.samples):
            whole = self._outputs(k, piece, graph=False)
        with torch.enable_grad():
            parts = self.splitter.pieces(piece.inputs, piece.targets, limit)
        for part in parts:
            self.at_hand, span = part.samples, (piece.samples, part.first, part.first + part.samples)
            with nullcontext() if self.by_sample else draws.replay(*span[1:]):
                outputs = tensors_in(self._outputs(k, part._replace(first=piece.first + part.first)))
            expected = rows_of(whole, tensors_in(whole), *span)
            if draws.unfollowed or not same_outputs(outputs, expected, self._eps()):
                raise cannot_be_cut(piece.samples, draws.unfollowed)
            push(outputs, rows_of(whole, gradients, *span), self.leaves)
            del outputs

    def _outputs(self, k: int, piece: Piece, graph: bool = True) -> Any:
        """A forward that finds weights, buffers, random numbers and autocast as micro-batch k's first one did."""
        modes = modes_of(self.batch.inner)
        with self.batch.buffers.replayed(), self.autocast.again(graph), torch.set_grad_enabled(graph):
            there = fresh(moved(piece, self.batch.device), piece)
            self.numbers[k]()
            try:
                outputs = self.forward(there)
            finally:
                modes()
        self.guard.note()
        return outputs

    def _surroundings(self) -> Callable[[], None]:
        """Random numbers and train or eval mode as they are now; the result puts them back."""
        numbers, modes = snapshot(generators_of(self.batch.inner)), modes_of(self.batch.inner)

        def put_back() -> None:
            numbers()
            modes()

        return put_back

    def _eps(self) -> float:
        """The rounding unit of the coarsest numbers that the model computes with."""
        floats = [leaf.dtype for leaf in self.leaves if leaf.is_floating_point()]
        return max([self.autocast.eps(), *(torch.finfo(dtype).eps for dtype in floats)])
