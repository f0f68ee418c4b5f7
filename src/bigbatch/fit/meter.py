"""What a piece of work costs: its seconds, and the most bytes it held at once beyond what was there before."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.core.live import Live
from bigbatch.fit.oom import let_go


class Meter(AbstractContextManager["Meter"]):
    """Measures one piece of work, or several that belong together: what one leaves behind counts in the next.

    Bytes are counted by `Live`; on CUDA the allocator's peak is taken where it rose, which tells more. The user's peak
    statistics are never reset. Time on CUDA is read off events later, so that nobody waits for the device.

    Args:
        device: where the work runs; None means the CPU.
        counting: whether every operator is looked at to count bytes, which is slow.

    Attributes:
        peak_bytes: the most bytes at once; None where nobody counted.

    >>> with Meter(None, counting=True) as meter:
    ...     kept = torch.zeros(1000) + 1
    >>> meter.peak_bytes, meter.seconds() > 0
    (8000, True)
    """

    def __init__(self, device: torch.device | None, counting: bool) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        self.live = Live(None if self.device is None else "cuda") if counting else None
        self.peak_bytes: int | None = None
        self.spent = 0.0
        self.left = 0
        self.events: list[tuple[Any, Any]] = []

    def __enter__(self) -> Meter:
        if self.device is not None:  # pragma: no cover - needs CUDA
            self.zero = torch.cuda.memory_allocated(self.device) - self.left
            self.highest = torch.cuda.max_memory_allocated(self.device)
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self.events.append((pair[0], pair[1]))
            pair[0].record()
        if self.live is not None:
            self.live.__enter__()  # type: ignore[no-untyped-call]
        self.start = time.perf_counter()
        return self

    def __exit__(self, *error: Any) -> None:
        self.spent += time.perf_counter() - self.start
        if self.live is not None:
            self.live.__exit__(*error)  # type: ignore[no-untyped-call]
            self.peak_bytes = max(self.peak_bytes or 0, self.live.peak_bytes)
        if self.device is not None:  # pragma: no cover - needs CUDA
            self.events[-1][1].record()
            self.left = torch.cuda.memory_allocated(self.device) - self.zero
            peak = torch.cuda.max_memory_allocated(self.device)
            if peak > self.highest:
                self.peak_bytes = max(self.peak_bytes or 0, peak - self.zero)

    def seconds(self) -> float | None:
        """Time that the work took; None while the device has not come to its end."""
        if not self.events:
            return self.spent
        if not all(end.query() for _, end in self.events):  # pragma: no cover - needs CUDA
            return None
        return float(sum(start.elapsed_time(end) for start, end in self.events)) / 1e3  # pragma: no cover - needs CUDA


class _Course(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the live bytes after every operator; entered after `live`, so that this has counted it by then."""

    def __init__(self, live: Live) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.bytes = live, [0]

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.bytes.append(self.live.live_bytes)
        return out


def course_of(work: Callable[[], Any], device: torch.device | None) -> tuple[Any, list[int]] | None:
    """What `work` returns, and the live bytes after each of its operators; None where it fails.

    A model may refuse so few samples (batch norm sees only one); what is really wrong comes up again in the batch.

    >>> course_of(lambda: (torch.zeros(10) + 1).sum().item(), None)
    (10.0, [0, 40, 80, 44, 4])
    """
    live = Live(device.type if device is not None and device.type == "cuda" else None)
    course = _Course(live)
    try:
        with live, course:
            return work(), course.bytes
    except Exception as error:
        let_go(error)
        return None
