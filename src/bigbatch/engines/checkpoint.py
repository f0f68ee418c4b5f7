"""One call that keeps only its inputs: it runs again in the backward, and finds everything as it was the first time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from bigbatch.core.buffers import Buffers, clone, version_of
from bigbatch.core.checkpoints import Numbers
from bigbatch.core.models import inner_modules
from bigbatch.engines.meeting import Meeting
from bigbatch.engines.replay import Guard, Replays
from bigbatch.errors import ModelError


def run_again(function: Any, *args: Any, **kwargs: Any) -> Any:
    """`call_again` as Hugging Face calls it, with a layer's method or a partial of one."""
    while isinstance(function, functools.partial):
        function, args, kwargs = function.func, (*function.args, *args), {**function.keywords, **kwargs}
    holders = (getattr(function, "__self__", None), *args[:1])
    block = next((holder for holder in holders if isinstance(holder, nn.Module)), None)
    return call_again(block, function, args, kwargs)


def call_again(
    block: nn.Module | None, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What the function returns, by `torch.utils.checkpoint` where gradients are enabled.

    The second call gets the tensors of the first and lists and dicts of its own, so that what a block appends to a list
    is appended once. Random numbers are the same ones, also where a mode hands them out.

    Args:
        block: the module whose buffers, mode and generators the function uses.
        function: its forward.
        args: what it is called with; so are kwargs.

    Raises:
        ModelError: the call has written to its inputs, which a second one would find changed.
    """
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    leaves, spec = tree_flatten((tuple(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i] for i in places]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    inner = inner_modules([] if block is None else [block])
    numbers, modes, replays = Numbers(), function_modes(), Replays(inner, as_they_are(inner), Guard([]))
    first_time = [(args, kwargs)]  # the checkpoint alone holds the tensors afterwards, wherever they wait

    def run(*held: Tensor) -> Any:
        if first_time:
            args, kwargs = first_time.pop()
            with numbers.followed():
                return function(*args, **kwargs)
        filled = list(rest)
        for i, tensor in zip(places, held, strict=True):
            filled[i] = tensor
        args, kwargs = tree_unflatten(filled, spec)
        with replays, numbers.again(), under(modes):
            return function(*args, **kwargs)

    before = list(map(version_of, tensors))
    outputs = checkpoint(run, *tensors, use_reentrant=False)
    if list(map(version_of, tensors)) != before:
        raise ModelError(
            "checkpoint=True was asked for",
            f"{type(block).__name__} writes to its inputs, which its second forward would find changed",
            "leave checkpoint out, or let it work on a copy (inplace=False)",
        )
    return outputs


def as_they_are(inner: Sequence[nn.Module]) -> Buffers:
    """Buffers whose replay finds what they hold at this moment, whatever is written to them later."""
    buffers = Buffers(inner)
    buffers.before = {i: clone(buffer) for i, buffer in enumerate(buffers.originals)}
    return buffers


def function_modes() -> list[Any]:
    """The modes that watch PyTorch's functions now. Micro-batches that meet do so once, in their first forward."""
    modes = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return [mode for mode in modes if not isinstance(mode, Meeting)]


@contextmanager
def under(modes: Sequence[Any]) -> Iterator[None]:
    """The modes as they stand, without those that are there already: a backward is a function, so it takes off some."""
    there = set(map(id, overrides._get_current_function_mode_stack()))  # type: ignore[no-untyped-call]
    missing = [mode for mode in modes if id(mode) not in there]
    for mode in missing:
        overrides._push_mode(mode)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for _ in missing:
            overrides._pop_mode()  # type: ignore[no-untyped-call]
