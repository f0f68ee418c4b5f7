"""Any loss: the outputs of all micro-batches are joined, and the loss is computed once on the whole batch.

Between its forward and its backward a micro-batch's activations are thrown away and computed again ("recompute", by
`torch.utils.checkpoint`, which replays random numbers and autocast), moved to the host ("offload") or left where they
are ("keep"). The last micro-batches are the first to run backward, so theirs are the ones to keep where memory is to
spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bigbatch.core.batch import Batch
from bigbatch.core.join import axes_like, join
from bigbatch.core.models import generators_of, parameters_of
from bigbatch.core.move import ahead
from bigbatch.core.rng import preserved_rng
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.tree import leaves, map_leaves, storage_of, tensors_of
from bigbatch.engines.offload import Host, storages
from bigbatch.engines.replay import Guard, Replays
from bigbatch.errors import ModelError

ACTIVATIONS = ("recompute", "offload", "keep")

Forward = Callable[[Piece], Any]


def run(
    batch: Batch,
    forward: Forward,
    activations: str = "recompute",
    kept: int = 0,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """The outputs of the whole batch, with a graph that holds one micro-batch's activations at a time.

    Args:
        batch: the micro-batches and the modules.
        forward: the model's outputs for one micro-batch.
        activations: "recompute", "offload" or "keep".
        kept: how many of the last micro-batches keep their activations on the device all the same.
        check: shown the first micro-batch's outputs before the others run.
    """
    pieces, weights = batch.pieces, parameters_of(batch.inner)
    samples = [piece.samples for piece in pieces]
    whole = sum(samples)
    outputs = []
    host, guard = Host(weights), Guard([*weights, *tensors_of(batch.source)])
    for k, there in enumerate(batch.there()):
        how = "keep" if k >= len(pieces) - kept or not torch.is_grad_enabled() else activations
        with batch.buffers.lent(pieces[k].samples / whole, pieces[k].samples):
            outputs.append(_run_one(how, batch, forward, pieces[k], there, host, guard))
        if k == 0 and len(pieces) > 1:
            refuse_left_behind(batch.inner, outputs[0])
            if check is not None:
                check(outputs[0])
    joined = join(outputs, samples)
    batch.buffers.settle()
    guard.watch(joined)
    return joined


def _run_one(how: str, batch: Batch, forward: Forward, here: Piece, there: Piece, host: Host, guard: Guard) -> Any:
    if how == "keep":
        return forward(there)
    if how == "offload":
        with host.hooks():
            return forward(there)
    first_time = [there]  # the forward takes the copy that is on the device; a recomputation fetches its own

    def again(_: Tensor) -> Any:
        return forward(fresh(first_time.pop() if first_time else moved(here, batch.device), here))

    # The checkpoint looks at its arguments to learn which device's random numbers it has to replay.
    anchor = torch.empty(0, device=batch.device or "cpu")
    contexts = nullcontext(), Replays(batch.inner, batch.buffers, guard)
    return checkpoint(again, anchor, use_reentrant=False, context_fn=lambda: contexts)


def saved_bytes(forward: Forward, piece: Piece, constants: Iterable[Tensor]) -> int:
    """Bytes that autograd keeps for the backward of one micro-batch, parameters, buffers and inputs left out.

    Args:
        forward: the model's outputs for one micro-batch.
        piece: the micro-batch, on the model's device.
        constants: tensors that are there anyway.
    """
    known = storages(constants)
    sizes: dict[int, int] = {}
    held: list[Tensor] = []  # a storage that dies would hand its address to the next one

    def count(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # the very tensor, if it is an output, would keep itself alive
        if tensor.layout == torch.strided and storage_of(tensor) not in known:
            sizes[storage_of(tensor)] = tensor.untyped_storage().nbytes()
            held.append(tensor)
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        outputs = forward(piece)
    del outputs
    return sum(sizes.values())


def moved(piece: Piece, device: torch.device | None) -> Piece:
    return piece if device is None else next(ahead([piece], device))


def fresh(piece: Piece, here: Piece) -> Piece:
    """The piece with tensors of its own where it still shares them with the user's batch.

    A model may write to its inputs, and one that is run twice on them must find them as they were.
    """

    def own(leaf: Any) -> Any:
        dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided and not leaf.is_nested
        return leaf.clone() if dense else leaf

    return piece._replace(inputs=map_leaves(own, piece.inputs)) if piece.inputs is here.inputs else piece


def refuse_tied_axes(batch: Batch, forward: Forward, splitter: Splitter, outputs: Any) -> None:
    """An axis that is as long as the micro-batch might follow it (an n × n similarity), which joining would spoil.

    One forward over another number of samples, without gradients, decides; nothing that it moves stays moved.

    Raises:
        SplitError: an output's other axes follow the number of samples.
    """
    pieces, size = batch.pieces, batch.pieces[0].samples
    if not axes_like(outputs, size):
        return
    other = first_samples(pieces, size - 1 if size > 2 else size + 1, splitter)  # batch norm refuses one alone
    with torch.no_grad(), preserved_rng(generators_of(batch.inner)), batch.buffers.replayed():
        join([outputs, forward(fresh(moved(other, batch.device), other))], [size, other.samples])


def first_samples(pieces: Sequence[Piece], samples: int, splitter: Splitter) -> Piece:
    """About so many samples from the beginning of a batch, whatever its micro-batches are; targets stay behind."""
    sizes: list[int] = []
    parts: list[Any] = []
    for piece in pieces:
        part = splitter.pieces(piece.inputs, None, min(piece.samples, samples - sum(sizes)))[0]
        parts.append(part.inputs)
        sizes.append(part.samples)
        if sum(sizes) >= samples:
            break
    return Piece(sum(sizes), join(parts, sizes, "inputs") if len(parts) > 1 else parts[0], None)


def refuse_left_behind(inner: Sequence[nn.Module], outputs: Any) -> None:
    """A term that a module keeps for the loss to pick up (a load-balance loss) would be the last micro-batch's alone.

    What outputs depend on is no such term: a weight that is made anew in every forward, say.

    Raises:
        ModelError: a module holds the result of a computation that no output depends on.
    """
    left = [
        (f"{type(module).__name__}.{name}", value)
        for module in inner
        for name, value in vars(module).items()
        if isinstance(value, Tensor) and value.grad_fn is not None
    ]
    if not left:
        return
    used = nodes_behind(tensor for tensor in leaves(outputs) if isinstance(tensor, Tensor))
    for name, value in left:
        if value.grad_fn not in used:
            raise ModelError(
                "a loss on the outputs of all micro-batches was asked for",
                f"{name} is left behind by every forward, so that the last micro-batch's would stand for the batch",
                "return it as an output with one row a sample, or as the model's own loss",
            )


def nodes_behind(tensors: Iterable[Tensor]) -> set[Any]:
    """All nodes of the graph that some tensors depend on."""
    waiting = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(after for after, _ in node.next_functions if after is not None)
    return found
