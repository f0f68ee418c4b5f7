"""Saved tensors wait for the backward on the host, as `torch.autograd.graph.save_on_cpu` has it, but for the weights.

On CUDA they are copied to pinned memory on a side stream, while the forward goes on; the backward fetches them back.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from bigbatch.core.move import side_stream
from bigbatch.core.tree import storage_of

LEAST_BYTES = 64 * 1024  # what is smaller stays: fetching it back would take longer than the little room is worth


@dataclass(eq=False)
class Parked:
    """A tensor on the host.

    Attributes:
        there: its numbers on the host.
        device: where they came from.
        source: the storage that they came from; while somebody holds this, no other storage gets its address.
        arrived: the event after which they are there, on CUDA.
    """

    there: Tensor
    device: torch.device
    source: StorageWeakRef
    arrived: Any = None

    def back(self) -> Tensor:
        if self.arrived is not None:  # pragma: no cover - needs CUDA
            torch.cuda.current_stream(self.device).wait_event(self.arrived)
        return self.there.to(self.device, non_blocking=True)


class Host:
    """Where the saved tensors of one forward wait. A tensor that two operators save is copied once.

    Args:
        staying: tensors that are on the device anyway, such as weights.
    """

    def __init__(self, staying: Iterable[Tensor]) -> None:
        self.staying = storages(staying)
        self.parked: weakref.WeakValueDictionary[Any, Parked] = weakref.WeakValueDictionary()

    def hooks(self) -> saved_tensors_hooks:
        """A context in which operators save their tensors here."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | Parked:
        tensor = tensor.detach()  # the very tensor, if it is an output, would keep itself alive
        if self._stays(tensor):
            return tensor
        where = storage_of(tensor), tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        place = *where, tensor._version, tensor.is_conj(), tensor.is_neg()  # the same memory, read in another way
        parked = self.parked.get(place)
        if parked is None:
            parked = self.parked[place] = park(tensor)
        return parked

    def _stays(self, tensor: Tensor) -> bool:
        return (
            is_on_host(tensor)
            or tensor.layout != torch.strided
            or tensor.numel() * tensor.element_size() < LEAST_BYTES
            or storage_of(tensor) in self.staying
        )

    def _unpack(self, packed: Tensor | Parked) -> Tensor:
        return packed.back() if isinstance(packed, Parked) else packed


def park(tensor: Tensor) -> Parked:
    """A copy on the host, in the same memory format."""
    source = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
    if tensor.device.type != "cuda":
        return Parked(to_host(tensor), tensor.device, source)
    side = side_stream(tensor.device.index)  # pragma: no cover - needs CUDA
    side.wait_stream(torch.cuda.current_stream(tensor.device))
    with torch.cuda.stream(side):
        there = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    tensor.record_stream(side)  # its memory is not used again before the copy is through
    return Parked(there, tensor.device, source, side.record_event())


def is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu").copy_(tensor)


def storages(tensors: Iterable[Tensor]) -> frozenset[int]:
    known = (tensor for tensor in tensors if not is_lazy(tensor))
    return frozenset(storage_of(tensor) for tensor in known if tensor.layout == torch.strided)
