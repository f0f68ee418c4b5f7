"""The bytes that a batch may use: asked for in bytes, as text or as a fraction, or what the device has free."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

import torch

from bigbatch.core.units import parse_bytes
from bigbatch.errors import OptionError

# Where Linux says how much a container may use (version 2 and version 1 of control groups).
CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def budget_bytes(memory: int | str | float | None, device: torch.device | None = None) -> int | None:
    """The budget in bytes; None where no limit is known.

    Args:
        memory: bytes (an int), text such as "2GiB", a fraction of the device's memory (a float, or text with a
            point and no unit, above 0 and at most 1), or None: on CUDA what is free now together with what this
            process's allocator holds and does not use; on other devices no limit.
        device: whose memory is meant; None means the CPU.

    Raises:
        OptionError: `memory` is no such amount, or is a fraction of a device that does not tell its size.

    >>> budget_bytes("2GiB", torch.device("cpu")), budget_bytes(4096), budget_bytes(None)
    (2147483648, 4096, None)
    """
    device = device or torch.device("cpu")
    if memory is None:
        return free_on_cuda(device) if device.type == "cuda" else None
    if isinstance(memory, str) and re.fullmatch(r"\s*[01]?\.\d*\s*", memory) and memory.strip() != ".":
        memory = float(memory)
    if not isinstance(memory, float):
        count = parse_bytes(memory, "memory")
        if count < 1:
            raise OptionError(f"memory={memory!r} was asked for", "nothing fits into no bytes", 'pass e.g. "2GiB"')
        return count
    if not 0 < memory <= 1:
        found = "a float is a fraction of the device, above 0 and at most 1"
        raise OptionError(f"memory={memory!r} was asked for", found, 'pass e.g. 0.9, or bytes as an int or as "2GiB"')
    return int(memory * total_bytes(device))


def free_on_cuda(device: torch.device) -> int:  # pragma: no cover - needs CUDA
    """What the device has free and what this process's allocator holds unused, within the process's own limit."""
    free, total = torch.cuda.mem_get_info(device)
    allocated = torch.cuda.memory_allocated(device)
    limit = int(torch.cuda.get_per_process_memory_fraction(device) * total)
    return max(0, min(free + torch.cuda.memory_reserved(device) - allocated, limit - allocated))


def total_bytes(device: torch.device) -> int:
    """All memory of a device: a card's own, or the RAM that this machine or container may use."""
    if device.type == "cuda":  # pragma: no cover - needs CUDA
        return int(torch.cuda.get_device_properties(device).total_memory)
    sizes = []
    if device.type == "cpu":
        with suppress(AttributeError, OSError, ValueError):  # Windows has no sysconf
            sizes.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        for path in CONTAINER_LIMITS:
            with suppress(OSError, ValueError):  # no such file, or the word "max"
                sizes.append(int(Path(path).read_text()))
    if not sizes or min(sizes) < 1:
        asked, found = f"memory as a fraction of {device} was asked for", "the device does not tell its size"
        raise OptionError(asked, found, 'pass bytes, or text such as "2GiB"')
    return min(sizes)


def affordable(samples: list[int], sample_bytes: float, budget: int) -> int:
    """How many of the last micro-batches fit a budget together.

    >>> affordable([4, 4, 3, 3], sample_bytes=10.0, budget=75)
    2
    """
    kept, spent = 0, 0.0
    for size in reversed(samples):
        spent += size * sample_bytes
        if spent > budget:
            break
        kept += 1
    return kept
