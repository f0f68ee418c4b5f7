"""Live bytes: how much memory the tensors take that were born inside a block, now and at the worst moment."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_COMPRESSED = {
    torch.sparse_csr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_bsr: (Tensor.crow_indices, Tensor.col_indices),
    torch.sparse_csc: (Tensor.ccol_indices, Tensor.row_indices),
    torch.sparse_bsc: (Tensor.ccol_indices, Tensor.row_indices),
}


def dense_parts(tensor: Tensor) -> Iterator[Tensor]:
    """The plain tensors that hold a tensor's numbers: itself, or what a sparse, nested or wrapped tensor is made of.

    >>> import torch
    >>> [tuple(part.shape) for part in dense_parts(torch.eye(3).to_sparse())]
    [(2, 3), (3,)]
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from dense_parts(getattr(tensor, name))
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in _COMPRESSED:
        yield from (read(tensor) for read in (*_COMPRESSED[tensor.layout], Tensor.values))
    elif tensor.is_nested:
        yield tensor.values()
    elif tensor.layout == torch.strided:
        yield tensor


class Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all storages that are born inside, on any device, until each of them dies.

    A storage counts once, however many views it has; parameters and inputs that were there before do not count, the
    gradients of parameters do. A death is counted whenever it happens, also after the block. Works through backward,
    with checkpoints and with fake tensors, whose bytes are those of the tensors that they stand for.

    What it cannot see: scratch space inside an operator, the allocator's rounding and cache, memory that no operator
    made (a `torch.from_numpy` that nothing touched, Python objects), and a storage that is resized by hand until the
    next operator meets it. With threads that run operators at the same time the peak is theirs together.

    Attributes:
        live_bytes: bytes alive now.
        peak_bytes: the most bytes that were alive at once, looked at after every operator.

    Args:
        device: count only what lies on devices of this type ("cpu", "cuda"); None counts everything.

    >>> import torch
    >>> with Live() as live:
    ...     kept = torch.zeros(1000)
    ...     kept = (kept + 1).view(10, 100)
    >>> live.live_bytes, live.peak_bytes
    (4000, 8000)
    """

    def __init__(self, device: str | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        self.live_bytes = self.peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        old = set() if func is torch.ops.aten.lift_fresh.default else set(self._storages((args, kwargs)))
        out = func(*args, **kwargs)
        for key, storage in {**self._storages((args, kwargs)), **self._storages(out)}.items():
            if key in self._known:
                self._resize(key, storage.nbytes())
            elif key not in old:
                self._known[key] = (weakref.ref(storage, partial(self._forget, key)), 0)
                self._resize(key, storage.nbytes())
        return out

    def reset_peak(self) -> None:
        """Lets the peak start again from what is alive now."""
        self.peak_bytes = self.live_bytes

    def _storages(self, tree: Any) -> dict[int, Any]:
        """Address -> storage of every tensor in `tree` that lies on the chosen device and has a storage at all."""
        found: dict[int, Any] = {}
        for leaf in tree_leaves(tree):
            for part in dense_parts(leaf) if isinstance(leaf, Tensor) else ():
                if self.device in (None, part.device.type):
                    storage = part.untyped_storage()
                    found[storage._cdata] = storage
        return found

    def _resize(self, key: int, size: int) -> None:
        reference, before = self._known[key]
        self._known[key] = (reference, size)
        self.live_bytes += size - before
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, reference: Any) -> None:
        _, size = self._known.pop(key)
        self.live_bytes -= size
