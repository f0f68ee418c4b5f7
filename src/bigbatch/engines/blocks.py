"""Activation checkpointing: repeated blocks keep only their inputs and run forward again in the backward.

A stack of n blocks then holds n inputs and the activations of the one block that runs backward, for one more forward of
each block. It works within a micro-batch, so it adds to what the engines save between micro-batches.
"""

from __future__ import annotations

import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bigbatch.core.batch_norm import by_batch
from bigbatch.core.compiled import is_compiled, uncompiled
from bigbatch.core.models import inner_modules, names_of
from bigbatch.engines.checkpoint import call_again, run_again
from bigbatch.errors import ModelError

ASKED = "checkpoint=True was asked for"
PLACES = "gradient_checkpointing", "_gradient_checkpointing_func"  # where a Hugging Face model keeps its switch
MISSING = object()

PutBack = Callable[[], None]

_lock = threading.Lock()
_switched: weakref.WeakKeyDictionary[nn.Module, list[PutBack]] = weakref.WeakKeyDictionary()  # one for each that is in


def repeated_blocks(inner: Sequence[nn.Module]) -> list[nn.Module]:
    """The outermost repeated blocks: modules of one class beside each other that hold layers and parameters.

    A layer that holds no other one (`nn.Linear`) is no block. A container is one where it holds none itself, so the
    blocks of a network in stages are those in the stages. A block that stands in several places is named once.

    Args:
        inner: the modules, those that hold others first, as `inner_modules` lists them.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> stack = nn.Sequential(nn.Linear(3, 2), block(), block())
    >>> repeated_blocks(inner_modules([stack])) == [stack[1], stack[2]], repeated_blocks(inner_modules([block()]))
    (True, [])
    """
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in inner:  # a walk in which each module's parent comes before it
        if module not in inside and module not in found:
            found |= dict.fromkeys(_beside(module))
        children = [child for child in module._modules.values() if child is not None]
        if module in inside or module in found:
            inside |= set(children) - found.keys()
    return list(found)


def _beside(parent: nn.Module) -> list[nn.Module]:
    """The blocks among a module's children."""
    children = [child for child in parent._modules.values() if child is not None]
    alike = {kind: sum(type(child) is kind for child in children) for kind in map(type, children)}
    return [child for child in children if alike[type(child)] > 1 and _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    has_forward = getattr(module.forward, "__func__", None) is not nn.Module.forward  # a ModuleList has none
    if not has_forward or not module._modules or next(module.parameters(), None) is None:
        return False
    return type(module) is not nn.Sequential or not repeated_blocks(inner_modules([module]))


@dataclass(frozen=True)
class Places:
    """Where a model can be checkpointed.

    Attributes:
        switches: Hugging Face models with a switch of their own.
        blocks: the repeated blocks outside of these.
        hidden: whether compiled code runs through blocks that it was made without knowing.
    """

    switches: list[nn.Module]
    blocks: list[nn.Module]
    hidden: bool

    @contextmanager
    def checkpointed(self) -> Iterator[None]:
        """As `checkpointed`, for a context that is entered for every micro-batch."""
        entered: list[nn.Module] = []
        with uncompiled() if self.hidden else nullcontext():
            try:
                for switch, modules in ((_switch_on, self.switches), (_wrap, self.blocks)):
                    for module in modules:
                        _enter(module, switch)
                        entered.append(module)
                yield
            finally:
                for module in reversed(entered):
                    _leave(module)


def checkpointed(inner: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Blocks that run forward inside, with gradients, keep only their inputs; afterwards the modules are as before.

    Hugging Face models are switched by their own switch, which knows about their caches, and left alone where it is on.
    Blocks inside of several such contexts, of one thread or of threads in turn, are checkpointed once.

    Raises:
        ModelError: there is nothing to checkpoint.

    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    >>> model, rows = nn.TransformerEncoder(layer, 4), torch.randn(2, 3, 8)
    >>> with checkpointed(inner_modules([model])):
    ...     outputs = model(rows)
    >>> outputs.sum().backward()
    >>> "forward" in vars(model.layers[0]), model.layers[0].linear1.weight.grad is None
    (False, False)
    """
    return places_of(inner).checkpointed()


def places_of(inner: Sequence[nn.Module]) -> Places:
    """The Hugging Face models with a switch of their own, and the repeated blocks outside of these.

    Raises:
        ModelError: there are neither, or torch.jit has compiled a part of a block.
    """
    own = [module for module in inner if _has_switch(module)]
    theirs = set(inner_modules(own))
    below = {module for outer in own for module in inner_modules(outer.children())}
    switches = [module for module in own if module not in below]
    blocks = [block for block in repeated_blocks(inner) if theirs.isdisjoint(inner_modules([block]))]
    if not switches and not blocks:
        raise ModelError(
            ASKED,
            "no repeated blocks: the model holds no two modules of one class beside each other that hold layers",
            "leave checkpoint out, put what repeats into modules of one class, or take a smaller micro_batch_size",
        )
    for module in inner_modules(blocks):
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                ASKED,
                f"{names_of(inner)[module]} is compiled by torch.jit, which may save other tensors the second time",
                "pass the model that was scripted, or leave checkpoint out",
            )
    return Places(switches, blocks, _hidden_in_compiled(inner, blocks))


def refuse_meeting(inner: Sequence[nn.Module]) -> None:
    """Batch norm over the whole batch needs all micro-batches at once, and a second forward would be alone.

    Raises:
        ModelError: a block holds batch norm in training mode.
    """
    inside = inner_modules(repeated_blocks(inner))
    layer = next((module for module in inside if by_batch(module)), None)
    if layer is not None:
        raise ModelError(
            f"{ASKED} with batch_norm='exact'",
            f"{names_of(inner)[layer]} is batch norm in a block, whose second forward would not meet the other "
            "micro-batches",
            "leave checkpoint out (activations wait on the host already), or pass batch_norm='local'",
        )


def _has_switch(module: nn.Module) -> bool:
    """Whether this is a Hugging Face model that can be told with which function to checkpoint its blocks."""
    switch = getattr(type(module), "_set_gradient_checkpointing", None)
    if switch is None or not getattr(module, "supports_gradient_checkpointing", False):
        return False
    takes = "gradient_checkpointing_func" in inspect.signature(switch).parameters
    return takes and any(hasattr(each, PLACES[0]) for each in module.modules())


def _enter(module: nn.Module, switch: Callable[[nn.Module], PutBack]) -> None:
    with _lock:
        if module in _switched:
            _switched[module].append(_switched[module][0])
        else:
            _switched[module] = [switch(module)]


def _leave(module: nn.Module) -> None:
    with _lock:
        put_back = _switched[module].pop()
        if not _switched[module]:
            del _switched[module]
            put_back()


def _switch_on(model: Any) -> PutBack:
    """Hugging Face: every layer that is written for it checkpoints itself; no cache, which would be filled twice."""
    inner = inner_modules([model])
    modules = [module for module in inner if PLACES[0] in vars(module) or hasattr(type(module), PLACES[0])]
    if any(getattr(module, PLACES[0]) for module in modules):
        return lambda: None  # the user's own
    owners: list[Any] = [vars(module).get("config") for module in inner]
    configs = [config for config in {id(each): each for each in owners}.values() if getattr(config, "use_cache", False)]
    held = [_held(module, name) for module in modules for name in PLACES]
    held += [_held(config, "use_cache") for config in configs]

    def put_back() -> None:
        for each in held:
            each()

    try:
        model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=run_again)
        for config in configs:
            config.use_cache = False
    except BaseException:
        put_back()
        raise
    return put_back


def _held(owner: Any, name: str) -> PutBack:
    """What puts an attribute of the object itself back, or takes it away again."""
    value = vars(owner).get(name, MISSING)

    def put_back() -> None:
        if value is MISSING:
            vars(owner).pop(name, None)
        else:
            vars(owner)[name] = value

    return put_back


def _wrap(block: nn.Module) -> PutBack:
    name = "_compiled_call_impl" if getattr(block, "_compiled_call_impl", None) is not None else "forward"
    function = getattr(block, name)
    put_back = _held(block, name)

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return call_again(block, function, args, kwargs)

    vars(block)[name] = forward
    return put_back


def _hidden_in_compiled(inner: Sequence[nn.Module], blocks: Sequence[nn.Module]) -> bool:
    """Whether compiled code holds blocks; a compiled block is no such code."""
    compiled = [module for module in inner if is_compiled(module) and module not in blocks]
    return bool(compiled) and not set(inner_modules(compiled)).isdisjoint(blocks)
