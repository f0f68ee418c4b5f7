"""What PyTorch keeps for each thread, carried from the thread that asks into those that compute for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import overrides
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch as dispatch

from bigbatch.engines.again import Autocast


@dataclass(frozen=True)
class Surroundings:
    """Grad mode, inference mode, autocast, modes (`torch.device` is one), hooks for saved tensors, device and stream.

    Default dtype, deterministic algorithms and anomaly detection hold for all threads anyway. So does the number of
    threads inside an operator, once a thread has asked for it: before, oneDNN takes all cores (torch 2.13).

    >>> import threading
    >>> def look():
    ...     with here.again():
    ...         print(torch.is_grad_enabled(), torch.get_autocast_dtype("cpu"), torch.ones(1).device)
    >>> with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
    ...     here = Surroundings.now(None)
    >>> thread = threading.Thread(target=look)
    >>> thread.start(), thread.join()
    False torch.float16 meta
    (None, None)
    """

    grad: bool
    inference: bool
    autocast: Autocast
    functions: list[Any]
    dispatchers: list[Any]
    hooks: tuple[Callable[..., Any], Callable[..., Any]] | None
    stream: Any

    @classmethod
    def now(cls, device: torch.device | None) -> Surroundings:
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            Autocast.now(device),
            overrides._get_current_function_mode_stack(),  # type: ignore[no-untyped-call]
            dispatch._get_current_dispatch_mode_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(True),
            torch.cuda.current_stream() if torch.cuda.is_initialized() else None,  # type: ignore[no-untyped-call]
        )

    @contextmanager
    def again(self) -> Iterator[None]:
        """The same in another thread, for as long as the block lasts."""
        torch.get_num_threads()
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            stack.enter_context(self.autocast.again(graph=True))
            if self.stream is not None:  # pragma: no cover - needs CUDA
                stack.enter_context(torch.cuda.stream(self.stream))  # and the device that it belongs to
            if self.hooks is not None:
                stack.enter_context(saved_tensors_hooks(*self.hooks))
            # A mode is pushed as it stands, for entering it once more would run code of its owner's.
            for mode in self.functions:
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(overrides._pop_mode)
            for mode in self.dispatchers:
                dispatch._push_mode(mode)
                stack.callback(dispatch._pop_mode, getattr(mode, "_mode_key", None))
            yield
