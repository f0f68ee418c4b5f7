"""The most memory that a piece of work holds at once: counted on the CPU, asked of the allocator on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from bigbatch.core.live import Live

Answer = TypeVar("Answer")


def counted_how(device: torch.device) -> str:
    """How `peak_bytes_of` counts on this device, in words.

    >>> counted_how(torch.device("cpu"))
    'bytes of all tensors born meanwhile, counted'
    """
    return "the CUDA allocator's peak" if device.type == "cuda" else "bytes of all tensors born meanwhile, counted"


def peak_bytes_of(work: Callable[[], Answer], device: torch.device) -> tuple[Answer, int]:
    """What `work` returns, and its peak in bytes beyond what was there before.

    >>> peak_bytes_of(lambda: (torch.zeros(1000) + 1).sum().item(), torch.device("cpu"))
    (1000.0, 8000)
    """
    if device.type == "cuda":  # pragma: no cover - needs CUDA
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        answer = work()
        return answer, torch.cuda.max_memory_allocated(device) - before
    with Live() as live:
        answer = work()
    return answer, live.peak_bytes


def free_bytes(device: torch.device) -> int:
    """Memory that is free on the device now."""
    if device.type == "cuda":  # pragma: no cover - needs CUDA
        return torch.cuda.mem_get_info(device)[0]
    import psutil  # type: ignore[import-untyped,unused-ignore]

    return int(psutil.virtual_memory().available)
