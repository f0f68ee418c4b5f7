"""A model's own generators move as they do without a proof, so that a second forward with other numbers is seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from bigbatch.core.random_operators import bound_arguments, may_draw


class OwnNumbers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The draws of one micro-batch by generators that the model names.

    The first forward gets the whole batch's numbers (a replay surrounds this mode), and its generators move on. Where a
    later forward of the same samples comes with a generator in the same state, it gets the same numbers; with another
    state, it gets what that state gives, as it would without a proof.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.states: list[Tensor] = []
        self.place = 0

    def again(self) -> OwnNumbers:
        """The next forward of the same samples."""
        self.place = 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator = own_generator(func, args, kwargs)
        if generator is None:
            return func(*args, **kwargs)
        before = generator.get_state()
        self.place += 1
        if self.place > len(self.states):
            self.states.append(before)
        shared = func(*args, **kwargs)
        if not torch.equal(generator.get_state(), before):  # it could not be shared, and has drawn for itself
            return shared
        if torch.equal(self.states[self.place - 1], before):
            with _disable_current_modes():
                func(*tree_map(clone, args), **tree_map(clone, kwargs))
            return shared
        with _disable_current_modes():
            return func(*args, **kwargs)


def own_generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator | None:
    """The generator that a random operator was handed, if any."""
    if not may_draw(func):
        return None
    values = bound_arguments(func, args, kwargs).values()
    return next((value for value in values if isinstance(value, torch.Generator)), None)


def clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
