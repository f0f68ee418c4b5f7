"""Batches on the model's device: leaf → leaf.to(device), and on CUDA one micro-batch ahead of the computation."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bigbatch.core.split import Piece
from bigbatch.core.tree import leaves, map_leaves

Before = TypeVar("Before")
Sent = TypeVar("Sent")
After = TypeVar("After")


def to_device(tree: Any, device: torch.device | str) -> Any:
    """The tree with its tensors, PackedSequences, nested tensors and objects that have their own `.to` on `device`.

    Modules, strings, numbers and arrays stay as they are. Returns the same object when nothing moves.

    >>> batch = {"ids": torch.tensor([1, 2]), "names": ["a", "b"]}
    >>> to_device(batch, "cpu") is batch, to_device(batch, "meta")["ids"].device.type
    (True, 'meta')
    """
    return tree.to(device) if type(tree) is Tensor else map_leaves(lambda leaf: moved(leaf, device), tree)


def moved(leaf: Any, device: torch.device | str) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.to(device)
    own = None if isinstance(leaf, str | type | nn.Module) else getattr(leaf, "to", None)
    return own(device) if callable(own) else leaf


def ahead(pieces: Iterable[Piece], device: torch.device | str) -> Iterator[Piece]:
    """Yields each piece on `device`; on CUDA the next one is already on its way while the current one is computed.

    There the next piece is pinned and copied on a side stream, and the consumer's stream waits for its own copy only.
    A copy starts when all that was queued before it is done, and a piece's memory is free again when the consumer has
    dropped it and the device is through with it.
    """
    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        side = side_stream(index)
        yield from one_ahead(pieces, lambda piece: send(piece, device, side), lambda sent: receive(*sent, device))
        return
    for piece in pieces:
        inputs, targets = to_device(piece.inputs, device), to_device(piece.targets, device)
        same = inputs is piece.inputs and targets is piece.targets
        yield piece if same else piece._replace(inputs=inputs, targets=targets)


@lru_cache
def side_stream(index: int) -> torch.cuda.Stream:
    """One stream for copies a device: the allocator keeps a stream's memory for that stream."""
    stream: torch.cuda.Stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
    return stream


def one_ahead(
    items: Iterable[Before], start: Callable[[Before], Sent], finish: Callable[[Sent], After]
) -> Iterator[After]:
    """Starts item k + 1 before it hands out item k, and holds nothing of an item that was handed out.

    >>> log = []
    >>> for number in one_ahead([1, 2], lambda n: log.append(f"start {n}") or n, lambda n: n):
    ...     log.append(f"use {number}")
    >>> log
    ['start 1', 'start 2', 'use 1', 'use 2']
    """
    waiting: deque[Sent] = deque()
    for item in items:
        waiting.append(start(item))
        if len(waiting) > 1:
            yield finish(waiting.popleft())
    while waiting:
        yield finish(waiting.popleft())


Copies = dict[int, tuple[Any, Any]]  # by the id of the original: the original, kept alive, and its copy


def send(
    piece: Piece, device: torch.device, side: torch.cuda.Stream
) -> tuple[Piece, Copies, torch.cuda.Event]:  # pragma: no cover - needs CUDA
    """Starts the copies of a piece's plain tensors and PackedSequences."""
    copies: Copies = {}
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for leaf in [*leaves(piece.inputs), *leaves(piece.targets)]:
            if can_be_sent(leaf):
                copies[id(leaf)] = leaf, leaf.pin_memory().to(device, non_blocking=True)
    return piece, copies, side.record_event()


def receive(
    piece: Piece, copies: Copies, event: torch.cuda.Event, device: torch.device
) -> Piece:  # pragma: no cover - needs CUDA
    """Makes the consumer's stream wait for the copies, and puts the piece together from them on that stream."""
    stream = torch.cuda.current_stream(device)
    stream.wait_event(event)
    for _, copy in copies.values():
        # The copies' memory belongs to the side stream: it must not be used again before this stream is through.
        for tensor in copy if isinstance(copy, PackedSequence) else (copy,):
            if isinstance(tensor, Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)

    def arrived(leaf: Any) -> Any:
        return copies[id(leaf)][1] if id(leaf) in copies else moved(leaf, device)

    return piece._replace(inputs=map_leaves(arrived, piece.inputs), targets=map_leaves(arrived, piece.targets))


def can_be_sent(leaf: Any) -> bool:
    """Plain tensors and PackedSequences in the CPU's memory; other kinds are copied when they are received."""
    data = leaf.data if isinstance(leaf, PackedSequence) else leaf
    plain = type(data) is Tensor and data.layout == torch.strided and not data.is_nested
    return plain and data.device.type == "cpu" and not data.requires_grad
