"""One window of a few small micro-batches, run in the way that a batch would be, with the lives of all its storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map

from bigbatch.core.batch import Batch
from bigbatch.core.buffers import Buffers
from bigbatch.core.gradients import added_at_once
from bigbatch.core.join import join
from bigbatch.core.losses import call_loss
from bigbatch.core.models import call, generators_of, parameters_of
from bigbatch.core.rng import preserved_rng
from bigbatch.core.rules import Rule, rule_for
from bigbatch.core.split import Piece
from bigbatch.core.sums import Sums
from bigbatch.core.tree import storage_of
from bigbatch.engines import blocks, lockstep, recompute, sequential
from bigbatch.engines.offload import storages
from bigbatch.planner.ledger import ACTIVATIONS, GRADIENTS, HOST, OUTPUTS, Ledger
from bigbatch.planner.records import Way
from bigbatch.planner.scratch import Scratch
from bigbatch.planner.stand_ins import faked, stand_ins


@dataclass(frozen=True)
class Job:
    """What is run.

    Attributes:
        model: a module or a function.
        loss_fn: None where the model returns its own loss.
        inner: the modules that a forward runs through.
        singles: a few samples, one in each piece.
        optimizer: an optimizer, or a function of the parameters that makes one; None where there is none.
        rule: how the loss is weighed; None where the model returns it, or where nobody knows.
    """

    model: Callable[..., Any]
    loss_fn: Callable[..., Tensor] | None
    inner: Sequence[nn.Module]
    singles: Sequence[Piece]
    optimizer: Any = None
    rule: Rule | None = None

    @property
    def adds_up(self) -> bool:
        """Whether the loss can be computed micro-batch by micro-batch."""
        return self.loss_fn is None or self.rule is not None

    def piece(self, samples: int) -> Piece:
        """So many samples, repeated where there are too few."""
        few, ones = list(islice(cycle(self.singles), samples)), [1] * samples
        inputs = join([one.inputs for one in few], ones, "inputs")
        targets = None if few[0].targets is None else join([one.targets for one in few], ones, "targets")
        return Piece(samples, inputs, targets)


def traced(job: Job, way: Way, samples: int, micro_batches: int, scratch: Scratch | None = None) -> Ledger:
    """One window of so many micro-batches of so many samples each, under fake tensors: nothing is computed.

    Raises:
        Exception: the forward depends on the values of its data, which a fake tensor has none of; the model then is as
            it was before.
    """
    mode, ledger = FakeTensorMode(allow_non_fake_inputs=True), Ledger(scratch)
    with stand_ins(job.inner, mode), mode:
        pieces = [faked(job.piece(samples), mode) for _ in range(micro_batches)]
        with ledger:
            Window(job, way, pieces, ledger).run()
    return ledger


def measured(job: Job, way: Way, samples: int, micro_batches: int, scratch: Scratch | None = None) -> Ledger:
    """The same for real, where fakes do not do: gradients, buffers and random numbers stay as they were."""
    ledger = Ledger(scratch)
    device = next((parameter.device for parameter in parameters_of(job.inner)), None)
    pieces = [recompute.moved(job.piece(samples), device) for _ in range(micro_batches)]
    with preserved_rng(generators_of(job.inner)), Buffers(job.inner).replayed(), ledger:
        Window(job, way, pieces, ledger).run()
    return ledger


class Window:
    """One window; it asks for nothing that depends on whether its tensors are fake or real."""

    def __init__(self, job: Job, way: Way, pieces: Sequence[Piece], ledger: Ledger) -> None:
        self.job, self.way, self.pieces, self.ledger = job, way, pieces, ledger
        self.parameters = parameters_of(job.inner)
        self.start = 0  # of the micro-batch at hand
        self.losses = 0
        self.sums: Sums | None = None
        whole = sum(piece.samples for piece in pieces)
        self.shares = [piece.samples / whole for piece in pieces]

    def run(self) -> None:
        batch = Batch(list(self.pieces), self.pieces, self.job.inner, Buffers([]), None)  # clones are counted apart
        with added_at_once(self.parameters) as self.sums, self._checkpointed():
            if self.way.engine == "sequential" and self.job.adds_up:
                sequential.run(self.pieces, self.shares, self.shares, self._loss, batch.buffers, done=self._done)
            elif self.way.engine == "lockstep" and self.job.adds_up:
                self.ledger.begins("forward")
                lockstep.gradient(batch, self.shares, self._loss, "keep", done=self._done)
            else:
                self._joined(batch)
            self.ledger.begins("end")
            for parameter in self.parameters:
                parameter.grad = None
            self.sums.totals.clear()

    def _joined(self, batch: Batch) -> None:
        self.ledger.begins("forward")
        activations = self.way.activations if self.way.activations == "recompute" else "keep"
        with self._offloaded():
            if self.way.engine == "lockstep":
                outputs = lockstep.outputs(batch, self._forward, "keep", None)
            else:
                outputs = recompute.run(batch, self._forward, activations)
        self.ledger.name(outputs, OUTPUTS)
        self.ledger.name_rest(ACTIVATIONS, 0)
        self.ledger.begins("loss")
        sizes = [piece.samples for piece in self.pieces]
        targets = join([piece.targets for piece in self.pieces], sizes, "targets")
        with self._in_user_code():
            loss = call_loss(self.job.loss_fn, outputs, targets)
        self.ledger.name(loss, OUTPUTS)
        self.ledger.name_rest(ACTIVATIONS, 0)
        reached = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        register_multi_grad_hook(reached, lambda _: self.ledger.begins("backward"))
        del outputs, targets, reached
        self.ledger.begins("backward of the loss")
        loss.backward()  # type: ignore[no-untyped-call]
        self._done()

    def _forward(self, piece: Piece, extra: Mapping[str, Any] | None = None) -> Any:
        with self._in_user_code():
            return call(self.job.model, piece.inputs, extra)

    def _weighed(self, piece: Piece) -> Tensor:
        """The loss of one micro-batch; any total will do, for it changes no shape."""
        rule = cast(Rule, self.job.rule or rule_for(self.job.model, self.job.loss_fn, "sum"))
        with self._in_user_code():
            counted = rule.count(piece.inputs, piece.targets, piece.samples) if rule.form == "counted" else 1
            totals = tree_map(lambda count: torch.as_tensor(count).reshape(()), counted)
        outputs = self._forward(piece, rule.extra(totals))
        self.ledger.name(outputs, OUTPUTS)
        with self._in_user_code():
            return rule.loss(outputs, piece.targets, totals)

    def _loss(self, piece: Piece) -> Tensor:
        alone = self.way.engine == "sequential"
        if alone:
            self.ledger.begins("forward")
            self.start = self.ledger.now
        with self._offloaded():
            loss = self._weighed(piece)
        self.ledger.name(loss, OUTPUTS)
        self.losses += 1
        if alone or self.losses == len(self.pieces):
            self.ledger.name_rest(ACTIVATIONS, self.start)
            self.ledger.begins("backward")
        return loss

    def _done(self, _: Piece | None = None) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        self.ledger.name([*gradients, *(self.sums.totals.values() if self.sums else ())], GRADIENTS)

    def _checkpointed(self) -> AbstractContextManager[Any]:
        return blocks.checkpointed(self.job.inner) if self.way.checkpoint else ExitStack()

    @contextmanager
    def _in_user_code(self) -> Iterator[None]:
        autocast = self.way.autocast
        device = self.parameters[0].device.type if self.parameters else "cpu"
        with self.ledger.in_user_code(), torch.autocast(device, autocast, enabled=autocast is not None):
            yield

    def _offloaded(self) -> AbstractContextManager[Any]:
        if self.way.activations != "offload":
            return ExitStack()
        return pretended(self.ledger, storages(self.parameters))


def pretended(ledger: Ledger, staying: frozenset[int]) -> saved_tensors_hooks:
    """Saved tensors move to a host that only the ledger knows of, as `engines.offload.Host` moves them.

    The few samples that are run here make them too small for its limit, which is left out.
    """

    def pack(tensor: Tensor) -> Any:
        tensor = tensor.detach()
        if tensor.layout != torch.strided or storage_of(tensor) in staying:
            return tensor
        with ledger.of_kind(HOST):
            return partial(torch.clone, tensor.clone())

    def unpack(packed: Any) -> Tensor:
        return packed if isinstance(packed, Tensor) else packed()

    return saved_tensors_hooks(pack, unpack)
