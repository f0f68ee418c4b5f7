"""The arguments of a call as one batch, and the arguments of a call again."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def gathered(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a call as one batch: a tensor, a tuple of arguments, or a mapping by position and keyword."""
    if kwargs and args:
        return {**dict(enumerate(args)), **kwargs}
    if kwargs:
        return kwargs
    return args[0] if len(args) == 1 and isinstance(args[0], Tensor) else args


def spread(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call again.

    >>> spread(gathered((1, 2), {"mask": 3}))
    ((1, 2), {'mask': 3})
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, tuple):
        return inputs, {}
    positional = tuple(value for key, value in inputs.items() if isinstance(key, int))
    return positional, {key: value for key, value in inputs.items() if isinstance(key, str)}
