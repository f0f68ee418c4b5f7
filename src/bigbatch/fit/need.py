"""What a batch asks of the device that it runs on: samples, what one of them costs, and the bytes that are there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.core.batch_norm import by_batch
from bigbatch.core.split import Splitter
from bigbatch.core.tree import leaves


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
        whole_only: begin with the whole batch, as the model takes no smaller piece willingly (batch norm).
    """

    samples: int
    cost: float
    place: Place
    whole_only: bool = False


def bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def need_of(items: Sequence[tuple[Any, Any]], splitter: Splitter, place: Place, batch_norm: str) -> Need:
    """What a batch, as it was delivered, asks of the device."""
    samples = [splitter.count(*item) for item in items]
    whole_only = batch_norm == "exact" and any(map(by_batch, place.inner))
    return Need(max(samples, default=0), cost_of(items, samples), place, whole_only)


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
