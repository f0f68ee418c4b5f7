"""Batch norm ties samples together: whether a batch's micro-batches have to meet, or may each normalise alone."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from bigbatch.core.compiled import any_compiled, uncompiled
from bigbatch.core.models import generators_of, names_of
from bigbatch.core.rng import snapshot
from bigbatch.errors import ModelError

Answer = TypeVar("Answer")
BATCH_NORM = nn.modules.batchnorm._BatchNorm
MODES = ("exact", "local")
ASKED = "batch norm over the whole batch was asked for"
LOCAL = (
    "batch_norm='local': {} normalises by the statistics of each micro-batch, so the gradient differs from the whole "
    "batch's. Running statistics move once, by the mean over micro-batches."
)
FUNCTION = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
OPERATOR = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
CAUGHT: dict[Any, Sequence[str]] = {
    F.batch_norm: FUNCTION,
    torch.batch_norm: OPERATOR,
    torch.ops.aten.batch_norm: OPERATOR,
    torch.ops.aten.batch_norm.default: OPERATOR,
}
KERNELS = frozenset(  # what all of these end in; a model may call one by itself
    [
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("_batch_norm_with_update", "_batch_norm_with_update_functional"),
    ]
)
scripted: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
OPTIONS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def by_batch(module: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of the samples at hand."""
    if isinstance(module, torch.jit.ScriptModule):
        if "BatchNorm" in getattr(module, "original_name", ""):
            return module.training or getattr(module, "running_mean", None) is None
        return module.training and _calls_batch_norm(module)
    return isinstance(module, BATCH_NORM) and (module.training or module.running_mean is None)


def arguments_of(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of a batch norm in training mode, by their names; None for every other call.

    >>> rows = torch.zeros(2, 1)
    >>> arguments_of(F.batch_norm, (rows, None, None), {"training": True})["eps"], arguments_of(F.relu, (rows,), {})
    (1e-05, None)
    """
    names = CAUGHT.get(func)
    if names is None:
        return None
    given = {**OPTIONS, **dict(zip(names, args, strict=False)), **kwargs}
    return given if given["training"] else None


def is_kernel(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether this is a call of a kernel of batch norm, in training mode.

    >>> rows = torch.zeros(2, 1)
    >>> is_kernel(torch.native_batch_norm, (rows, None, None, None, None, True, 0.1, 1e-5), {})
    True
    """
    if getattr(func, "__name__", "").partition(".")[0] not in KERNELS:
        return False
    flags = (value for value in (*args, *kwargs.values()) if isinstance(value, bool))
    return next(flags, True)  # `training` is the first flag, or there is none


class Sighted(BaseException):
    """A batch norm that no module of the model owned up to."""


class Lookout(TorchFunctionMode):
    """Stops a forward that comes to a batch norm in training mode."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if arguments_of(func, args, kwargs) is not None or is_kernel(func, args, kwargs):
            raise Sighted
        return func(*args, **kwargs)


class BatchNorm:
    """How one door treats batch norm.

    Args:
        mode: "exact" or "local".
        modules: where batch norm layers may be.
    """

    def __init__(self, mode: str, modules: Sequence[nn.Module]) -> None:
        self.mode, self.modules = mode, modules
        self.told: set[str] = set()  # a notice is given once
        self.hidden: dict[Any, bool] = {}  # whether a call outside of all layers was sighted, in train or eval mode

    def is_joint(self, inner: Sequence[nn.Module], micro_batches: int) -> bool:
        """Whether the micro-batches of a batch have to meet.

        Raises:
            ModelError: they have to, and a layer can only be run alone.
        """
        if micro_batches == 1:
            return False
        layers = [module for module in inner if by_batch(module)]
        if self.mode == "local":
            self._tell(layers)
            return False
        for layer in layers:
            if isinstance(layer, torch.jit.ScriptModule):
                name = names_of(inner)[layer]
                found = f"{name} is compiled by torch.jit, which shows nobody its batch norms"
                raise ModelError(ASKED, found, "pass the model that was scripted, or freeze it with .eval()")
        return bool(layers) or self.hidden.get(_mode_of(inner), False)

    def sighted(self, attempt: Callable[[], Answer], inner: Sequence[nn.Module]) -> Answer:
        """Runs an attempt at a batch; the first one looks out for batch norms that no layer tells of.

        If there is one, everything is put back and the attempt begins anew, knowing it.
        """
        mode = _mode_of(inner)
        if self.mode == "local" or mode in self.hidden or any(map(by_batch, inner)):
            return attempt()
        put_back = snapshot(generators_of(inner))
        try:
            with uncompiled() if any_compiled(inner) else nullcontext(), Lookout():
                answer = attempt()
            self.hidden[mode] = False
            return answer
        except Sighted:
            self.hidden[mode] = True
        put_back()
        return attempt()

    def _tell(self, layers: Iterable[nn.Module]) -> None:
        wanted = set(layers)
        names = [
            name or type(module).__name__
            for outer in (self.modules if wanted else ())
            for name, module in outer.named_modules()
            if module in wanted
        ]
        found = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        if found and found not in self.told:
            self.told.add(found)
            warnings.warn(LOCAL.format(found), stacklevel=5)


def _mode_of(inner: Sequence[nn.Module]) -> bool:
    return bool(inner) and inner[0].training


def _calls_batch_norm(module: torch.jit.ScriptModule) -> bool:
    """Whether the code that torch.jit has made of a module calls batch norm itself, and not by way of a layer."""
    if module not in scripted:
        code = str(getattr(module, "graph", ""))
        scripted[module] = "aten::batch_norm(" in code or 'name="batch_norm"' in code
    return scripted[module]
