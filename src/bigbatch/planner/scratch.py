"""Memory that an operator takes for itself, and that no tensor shows: one call on zeros of the same shapes tells.

A convolution copies its input into another layout, a recurrent layer has a work space that fake tensors do not know of.
Only operators that are known to do so are called, one sample's worth of work or two, once for each shape.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

OPERATORS = frozenset(
    f"aten::{name}{direction}"
    for name in ("convolution", "native_batch_norm", "native_layer_norm", "native_group_norm")
    for direction in ("", "_backward")
) | frozenset(
    f"aten::{name}"
    for name in (
        *("mkldnn_rnn_layer", "embedding_dense_backward", "gelu_backward", "roll", "im2col", "col2im"),
        # The loss of each element is made first, and the storage of the mean stays as large.
        *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "soft_margin_loss_backward"),
        *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        # Pictures in one layout are copied into another.
        *("max_pool2d_with_indices_backward", "avg_pool2d_backward", "reflection_pad2d_backward"),
        *(f"upsample_{way}2d{back}" for way in ("nearest", "bilinear", "bicubic") for back in ("", "_backward")),
        *("adaptive_max_pool2d_backward", "grid_sampler_2d_backward"),
    )
)
# The backward of a recurrent layer cannot be called alone: it takes as much for itself as the forward, whose work space
# it is given.
RNN, RNN_BACKWARD = "aten::mkldnn_rnn_layer", "aten::mkldnn_rnn_layer_backward"
NOTHING: tuple[int, list[int]] = (0, [])


@dataclass
class Scratch:
    """What is known so far of the operators on one device.

    Attributes:
        device: where the operators are called; None measures nothing.
        known: operator and shapes -> bytes beside the outputs at the worst moment, and the bytes of each output.
    """

    device: torch.device | None
    known: dict[Any, tuple[int, list[int]]] = field(default_factory=dict)

    def of(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[int, list[int]]:
        """Bytes of one call beside its outputs, and of its outputs where they are not what the fakes have."""
        name = func.name()
        if name == RNN_BACKWARD:
            beside, sizes = self.known.get((RNN, described(args[0])), NOTHING)
            return beside + sum(sizes[:-1]), []  # copies of its outputs' gradients; the last one is the work space
        if self.device is None or name not in OPERATORS:
            return NOTHING
        key = (RNN, described(args[0])) if name == RNN else (name, str(tree_map(described, (args, kwargs))))
        if key not in self.known:
            # In inference a recurrent layer keeps nothing for the backward.
            with _disable_current_modes(), torch.enable_grad():
                try:
                    self.known[key] = measured(func, *tree_map(self._zeros, (args, kwargs)))
                except RuntimeError:  # a mixture of dtypes that only fakes take
                    self.known[key] = NOTHING
        return self.known[key]

    def _zeros(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.size(), leaf.stride(), dtype=leaf.dtype, device=self.device).zero_()


def described(leaf: Any) -> Any:
    return f"{tuple(leaf.shape)} {leaf.stride()} {leaf.dtype}" if isinstance(leaf, Tensor) else leaf


def measured(func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[int, list[int]]:
    """Calls an operator, and counts what the allocator gives it."""
    device = next((leaf.device for leaf in tree_leaves(args) if isinstance(leaf, Tensor)), torch.device("cpu"))
    if device.type == "cuda":  # pragma: no cover - needs CUDA
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        out = func(*args, **kwargs)
        peak = torch.cuda.max_memory_allocated(device) - before
    else:
        with unheard(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            out = func(*args, **kwargs)
        peak = peak_of(record)
    sizes = [leaf.untyped_storage().nbytes() if isinstance(leaf, Tensor) else 0 for leaf in tree_leaves(out)]
    return max(0, peak - sum(sizes)), sizes


@contextmanager
def unheard() -> Iterator[None]:
    """The profiler of torch 2.13 writes two lines to standard error for each time that it runs; nobody wants them."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def peak_of(record: profile) -> int:
    """The most bytes that the CPU's allocator had given away at once, of those that it gave under a profiler.

    >>> with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
    ...     _ = (torch.zeros(1000) + 1).sum()
    >>> peak_of(record) >= 8000
    True
    """
    now = peak = 0
    results: Any = record.profiler
    for event in results.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
