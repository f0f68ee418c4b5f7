"""Which errors mean that memory ran out, and how nothing of the failed try stays alive behind the error."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType

import torch

# In lower case. A text that may also mean something else (no cuDNN engine, an illegal access) is not listed.
TEXTS = (
    "defaultcpuallocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "std::bad_alloc",
    "cuda out of memory",
    "cuda error: out of memory",
    "cuda driver error: out of memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
    "cudnn_status_internal_error_device_allocation_failed",
    "cusolver_status_alloc_failed",
    "cusparse_status_alloc_failed",
    "hip out of memory",
    "hip error: out of memory",
    "hipblas_status_alloc_failed",
    "mps backend out of memory",
    "xpu out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, itself or as the cause it was raised `from`.

    An error that merely came up while another one was handled is its own affair: a shape error stays one.

    >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    True
    >>> is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"))
    False
    """
    seen: set[int] = set()
    at: BaseException | None = error
    while isinstance(at, Exception) and id(at) not in seen:
        seen.add(id(at))
        if isinstance(at, MemoryError | torch.OutOfMemoryError):
            return True
        if isinstance(at, RuntimeError) and any(text in str(at).lower() for text in TEXTS):
            return True
        at = at.__cause__
    return False


def let_go(error: BaseException) -> None:
    """Clears the locals of every finished frame that an error, its causes and its contexts lead to.

    Afterwards no tensor of the failed try is alive through the error, whoever keeps it and without the garbage
    collector. Frames that still run, and errors that the caller was handling before the try, are left as they are.

    >>> kept = []
    >>> def fails() -> None:
    ...     big = torch.zeros(1000)
    ...     raise MemoryError
    >>> try:
    ...     fails()
    ... except MemoryError as error:
    ...     let_go(error)
    ...     kept.append(error)
    >>> kept[0].__traceback__ is None
    True
    """
    running = running_frames()
    for part in list(linked_errors(error, running)):
        if part.__traceback__ is not None:
            traceback.clear_frames(part.__traceback__)
            part.__traceback__ = None
    drain()


def drain() -> None:
    """Runs the smallest backward: PyTorch keeps what waited in one that failed until the thread's next backward."""
    with suppress(RuntimeError, MemoryError), torch.enable_grad():
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


def running_frames() -> set[int]:
    """Addresses of the frames that run now; to keep the frames themselves would tie a knot that keeps the error."""
    frame: FrameType | None = sys._getframe(1)
    addresses = set()
    while frame is not None:
        addresses.add(id(frame))
        frame = frame.f_back
    return addresses


def linked_errors(error: BaseException, running: set[int]) -> Iterator[BaseException]:
    """The error and all that it leads to, but nothing that was caught in a frame that still runs: that one is older."""
    waiting, seen = [error], set()
    while waiting:
        at = waiting.pop()
        older = at is not error and at.__traceback__ is not None and id(at.__traceback__.tb_frame) in running
        if id(at) in seen or older:
            continue
        seen.add(id(at))
        yield at
        waiting += [link for link in (at.__cause__, at.__context__) if link is not None]
        waiting += [part for part in getattr(at, "exceptions", ()) if isinstance(part, BaseException)]


def free_cached(device: torch.device) -> None:
    """Gives memory that the device's allocator keeps for later back to the device; the CPU keeps none.

    >>> free_cached(torch.device("cpu"))
    """
    if device.type == "cuda":  # pragma: no cover - needs CUDA
        torch.cuda.empty_cache()
    elif device.type == "mps":  # pragma: no cover - needs MPS
        torch.mps.empty_cache()
