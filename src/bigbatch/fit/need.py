"""What a batch asks of the device that it runs on: samples, what one of them costs, and the bytes that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core.split import Splitter
from bigbatch.core.tree import leaves

Probe = Callable[[int], tuple[int, int]]


@dataclass(frozen=True)
class Place:
    """Where a batch runs: the modules, their device, their parameters, and the bytes that are theirs."""

    inner: Sequence[nn.Module]
    device: torch.device | None
    parameters: Sequence[nn.Parameter] = ()

    def on_cuda(self) -> bool:
        return self.device is not None and self.device.type == "cuda"

    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def weight_bytes(self) -> int:
        buffers = [buffer for module in self.inner for buffer in module._buffers.values() if buffer is not None]
        gradients = [parameter.grad for parameter in self.trained() if parameter.grad is not None]
        return bytes_of([*self.parameters, *buffers, *gradients])


@dataclass(frozen=True)
class Need:
    """What a batch asks of the device.

    Attributes:
        samples: samples in the batch, or in the largest micro-batch that was delivered.
        cost: elements of one sample's largest field.
        place: where it runs.
        probe: runs so many samples forward and backward, or a few more, and leaves all as it was but for random
            numbers; returns how many, and the bytes that the whole batch holds beside its micro-batches.
    """

    samples: int
    cost: float
    place: Place
    probe: Probe | None = None


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Enough(Exception):
    """Ends a try on a few samples, which takes back all that it has done."""


def need_of(
    items: Sequence[tuple[Any, Any]],
    splitter: Splitter,
    place: Place,
    attempt: Callable[..., Any] | None = None,
) -> Need:
    """What a batch, as it was delivered, asks of the device.

    Args:
        items: inputs and targets, as they were delivered.
        splitter: cuts them.
        place: where they run.
        attempt: `attempt(items, place, on_outputs, None)` runs items, shows their outputs after their backward, and
            after an error leaves everything as it was.
    """
    samples = [splitter.count(*item) for item in items]
    need = Need(max(samples, default=0), cost_of(items, samples), place)
    if attempt is None or not need.samples:
        return need

    def stop(*_: Any) -> None:
        raise Enough

    def probe(size: int) -> tuple[int, int]:
        piece = splitter.pieces(*items[samples.index(need.samples)], size)[0]
        with suppress(Enough):
            attempt([(piece.inputs, piece.targets)], place, stop, None)
        return piece.samples, 0

    return replace(need, probe=probe)


def cost_of(items: Sequence[tuple[Any, Any]], samples: Sequence[int]) -> float:
    """Elements of the largest field of one sample, by which one batch's cost is compared with another's.

    >>> cost_of([({"ids": torch.zeros(4, 30), "scale": 0.5}, torch.zeros(4))], [4])
    30.0
    """
    largest = 1.0
    for item, size in zip(items, samples, strict=True):
        for leaf in leaves(item):
            if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.size(0) == size:
                largest = max(largest, leaf.numel() / size)
    return largest
