"""Random numbers under `torch.utils.checkpoint`: a second forward draws what modes handed out from its place on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack


def open_checkpoints() -> int:
    """How many calls of `torch.utils.checkpoint` the code at hand runs inside of; a recomputation is no call."""
    frame, count = sys._getframe().f_back, 0
    while frame is not None:
        code = frame.f_code
        count += code.co_name == "checkpoint" and code.co_filename == torch.utils.checkpoint.__file__
        frame = frame.f_back
    return count


class Numbers:
    """The modes that answer random operators now. Such a mode tells `from_here()` what answers alike from now on.

    >>> from bigbatch.core.by_sample import BySample
    >>> with BySample(seed=5, first=0, samples=2):
    ...     before, numbers = torch.rand(2), Numbers()
    ...     first = torch.rand(2)
    >>> with numbers.again():
    ...     second = torch.rand(2)
    >>> torch.equal(first, second), torch.equal(first, before)
    (True, False)
    """

    def __init__(self) -> None:
        modes: list[Any] = _get_current_dispatch_mode_stack()
        self.modes = [mode for mode in modes if getattr(mode, "from_here", None) is not None]
        self.later: list[Callable[[], AbstractContextManager[Any]]] = [mode.from_here() for mode in self.modes]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """The first forward, in a checkpoint whose recomputation runs under `again`: the modes need not name it."""
        for mode in self.modes:
            mode.checkpoints += 1
        try:
            yield
        finally:
            for mode in self.modes:
                mode.checkpoints -= 1

    @contextmanager
    def again(self) -> Iterator[None]:
        """The second forward."""
        with ExitStack() as stack:
            for resumed in self.later:
                stack.enter_context(resumed())
            yield
