"""Batch norm over the whole batch: micro-batches run side by side and meet at every batch norm in training mode.

Each micro-batch runs its forward in a thread of its own, one at a time. A mode catches PyTorch's `batch_norm`, wherever
it is called from; there a micro-batch leaves the statistics of its piece and waits for those of all others. What comes
out is one graph. Its saved tensors leave the device, which so holds the batch where it stands at the moment (its
frontier) and not all that lies behind it.
"""

from __future__ import annotations

import functools
import itertools
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.batch import Batch
from bigbatch.core.batch_norm import ASKED
from bigbatch.core.compiled import uncompiled
from bigbatch.core.join import join
from bigbatch.core.joint_norm import enter, leave, meet, move
from bigbatch.core.models import parameters_of
from bigbatch.core.split import Piece
from bigbatch.core.sums import Shared, adds_up_low
from bigbatch.core.tree import tensors_of
from bigbatch.core.weigh import Count
from bigbatch.engines.meeting import MARK, Call, Meeting
from bigbatch.engines.offload import Host
from bigbatch.engines.recompute import refuse_left_behind
from bigbatch.engines.replay import Guard
from bigbatch.engines.sequential import scalar, weighed_sum, weight_like
from bigbatch.engines.surroundings import Surroundings
from bigbatch.engines.turns import Turns
from bigbatch.errors import ModelError


def run(batch: Batch, function: Callable[[Piece], Any], activations: str = "offload") -> list[Any]:
    """What `function` (forward, or forward and loss) makes of every micro-batch; all of it is one graph.

    Args:
        batch: the micro-batches and the modules. Buffers are lent, and left for the caller to settle.
        function: runs once for each micro-batch, on the model's device. Random numbers are drawn layer by layer.
        activations: "keep" leaves saved tensors where they are; otherwise they wait on the host.

    Raises:
        ModelError: the micro-batches do not all come to the same batch norms, or one reads what another has computed.
    """
    return Lockstep(batch, function, activations).run()


def gradient(
    batch: Batch,
    weights: Sequence[Count],
    loss_of: Callable[[Piece], Tensor],
    activations: str,
    scale: Callable[[Tensor], Tensor] | None = None,
    done: Callable[[Piece], None] | None = None,
) -> Tensor:
    """The loss of the whole batch, detached, with its gradient in `.grad`; arguments as in `sequential.run`."""
    losses = [scalar(loss) for loss in run(batch, loss_of, activations)]
    seeds = [weight_like(weight, loss) for weight, loss in zip(weights, losses, strict=True)]
    pairs = [(loss, seed) for loss, seed in zip(losses, seeds, strict=True) if loss.requires_grad]
    if not pairs:
        losses[-1].backward()  # type: ignore[no-untyped-call]  # PyTorch's own error says what is missing
    torch.autograd.backward([loss for loss, _ in pairs], [scale(seed) if scale else seed for _, seed in pairs])
    if done is not None:
        for piece in batch.pieces:
            done(piece)
    wide = functools.reduce(torch.promote_types, {loss.dtype for loss in losses}, torch.float32)
    return weighed_sum([loss.detach() for loss in losses], seeds, wide)


def outputs(
    batch: Batch, forward: Callable[[Piece], Any], activations: str, check: Callable[[Any], None] | None
) -> Any:
    """The outputs of the whole batch; `check` is shown those of the first micro-batch. Buffers are settled."""
    guard = Guard([*parameters_of(batch.inner), *tensors_of(batch.source)])
    found = run(batch, forward, activations)
    refuse_left_behind(batch.inner, found[-1])
    if check is not None:
        check(found[0])
    joined = join(found, [piece.samples for piece in batch.pieces])
    batch.buffers.settle()
    guard.watch(joined)
    return joined


class Lockstep:
    """One forward of all micro-batches.

    Attributes:
        waiting: the layer and the call of batch norm at which each micro-batch stands.
        results: what each has returned.
    """

    def __init__(self, batch: Batch, function: Callable[[Piece], Any], activations: str) -> None:
        self.batch, self.function = batch, function
        self.count = len(batch.pieces)
        self.samples = sum(piece.samples for piece in batch.pieces)
        self.name = uuid.uuid4().hex  # a tensor may keep its mark, and reach another forward in another process
        self.turns = Turns(self.count)
        self.there = iter(batch.there())
        self.host = None if activations == "keep" else Host(parameters_of(batch.inner))
        self.surroundings = Surroundings.now(batch.device)
        self.waiting: dict[int, tuple[Any, Call]] = {}
        self.results: dict[int, Any] = {}
        given = Counter(number for piece in batch.pieces for number in {id(tensor) for tensor in given_to(piece)})
        self.shared = {number for number, times in given.items() if times > 1}  # tensors that are no micro-batch's own
        self.marked: list[Tensor] = []
        graph = torch.is_grad_enabled()
        self.low = {id(p): Shared(p) for p in parameters_of(batch.inner) if graph and adds_up_low(p)}
        refuse_nested(self.surroundings)

    def run(self) -> list[Any]:
        try:
            with uncompiled():
                self.turns.run(self._task)
        finally:
            for tensor in self.marked:  # the user's own
                tensor.__dict__.pop(MARK, None)
        return [self.results.pop(k) for k in range(self.count)]

    def _task(self, k: int) -> None:
        samples = self.batch.pieces[k].samples
        with (
            self.surroundings.again(),
            nullcontext() if self.host is None else self.host.hooks(),
            self.batch.buffers.lent(samples / self.samples, samples),
        ):
            there = next(self.there)
            torch.clear_autocast_cache()
            own = {number: shared.own() for number, shared in self.low.items()}
            meeting = Meeting((self.name, k), self.turns, self._normalised, own)
            given = [tensor for tensor in given_to(there) if id(tensor) not in self.shared]
            self.marked += given
            meeting.follow(given)
            with meeting:
                self.results[k] = self.function(there)

    def _normalised(self, k: int, x: Tensor, call: Call) -> Tensor:
        """Micro-batch k's part of a batch norm over all of them."""
        call.entered = enter(x)
        key = call.key(self.batch.inner)
        self.waiting[k] = key, call
        with self.batch.buffers.set_aside():
            self.turns.wait(k)
        torch.clear_autocast_cache()  # a cast of a weight that two micro-batches share adds up in its own dtype
        if call.met is None:
            self._put_together()
        del self.waiting[k]
        return leave(call.met, call.entered)

    def _put_together(self) -> None:
        """Everybody has had a turn, so all wait at the same batch norm now, or one of them took another path."""
        calls = [call for _, (_, call) in sorted(self.waiting.items())]
        if len(calls) < self.count or len({key for key, _ in self.waiting.values()}) > 1:
            raise self.turns.failed(self._parted())
        one, *others = calls
        self._refuse_other_weights(calls)
        met = meet([call.entered for call in calls], one.weight, one.bias, one.eps)
        move(one.running_mean, one.running_var, met, one.momentum)
        for call in calls:
            call.met = met
        for call in others:  # every micro-batch moves running statistics of its own, alike
            for moved, running in ((one.running_mean, call.running_mean), (one.running_var, call.running_var)):
                if running is not moved:
                    running.copy_(moved)

    def _parted(self) -> ModelError:
        first = min(self.waiting)
        key, call = self.waiting[first]
        for k in range(self.count):
            other = self.waiting.get(k)
            if other is None or other[0] != key:
                there = "the end" if other is None else other[1].name(self.batch.inner)
                break
        here = call.name(self.batch.inner)
        return ModelError(
            ASKED,
            f"micro-batch {first} came to {here}, and micro-batch {k} to {there}",
            "let every micro-batch take the same path, freeze batch norm with .eval(), or pass batch_norm='local'",
        )

    def _refuse_other_weights(self, calls: Sequence[Call]) -> None:
        """A weight that the forward computes is the same in all micro-batches, unless it depends on their samples."""
        for one, other in itertools.pairwise((call.weight, call.bias) for call in calls):
            if any(a is not b and not torch.equal(a, b) for a, b in zip(one, other, strict=True)):
                found = f"a weight or bias that differs between micro-batches, at {calls[0].where}"
                do = "make it depend on parameters alone, or pass batch_norm='local'"
                raise self.turns.failed(ModelError(ASKED, found, do))


def given_to(piece: Piece) -> list[Tensor]:
    return list(tensors_of((piece.inputs, piece.targets)))


def refuse_nested(surroundings: Surroundings) -> None:
    """Micro-batches of a micro-batch would meet one another, and not those of its neighbours."""
    if any(isinstance(mode, Meeting) for mode in surroundings.functions):
        raise ModelError(
            ASKED,
            "a model in micro-batches inside of another one",
            "hand over the model itself, without MicroBatched around it",
        )
