"""Code that `torch.compile` has made shows nobody its operators; inside `uncompiled` it runs as it was written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_lock = threading.Lock()
_stances: list[Any] = []  # one for each block that is open; the first has set PyTorch's, which holds for all threads


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled code runs as it was written, in every thread, until the last of these blocks is left.

    >>> import torch
    >>> with uncompiled():
    ...     runs_uncompiled()
    True
    """
    with _lock:
        compiles = not _stances and "torch._dynamo" in sys.modules  # importing it takes seconds
        _stances.append(torch.compiler.set_stance("force_eager") if compiles else None)
    try:
        yield
    finally:
        with _lock:
            stance = _stances.pop()
            if stance is not None:
                stance.__exit__(None, None, None)


def runs_uncompiled() -> bool:
    """Whether such a block is open."""
    return bool(_stances)


def is_compiled(module: nn.Module) -> bool:
    if getattr(module, "_compiled_call_impl", None) is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def any_compiled(modules: Iterable[nn.Module]) -> bool:
    return any(map(is_compiled, modules))
