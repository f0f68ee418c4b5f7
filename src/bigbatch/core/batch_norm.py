"""Batch norm ties samples together: whether a batch's micro-batches have to meet, or may each normalise alone."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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
    torch.native_batch_norm: OPERATOR,
    torch.ops.aten.batch_norm: OPERATOR,
    torch.ops.aten.batch_norm.default: OPERATOR,
}
KERNELS = frozenset(  # what all of these, and others, end in
    f"aten::{name}"
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("_native_batch_norm_legit", "_native_batch_norm_legit_functional"),
        *("_batch_norm_with_update", "_batch_norm_with_update_functional"),
    )
)
ON_THE_WAY = {__file__, F.__file__, torch.overrides.__file__, torch._ops.__file__}
OPTIONS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def by_batch(module: nn.Module) -> bool:
    """Whether a layer normalises by the statistics of the samples at hand."""
    if isinstance(module, torch.jit.ScriptModule):
        name = getattr(module, "original_name", "")
        return "BatchNorm" in name and (module.training or getattr(module, "running_mean", None) is None)
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


def line_of_caller(more: frozenset[str] = frozenset()) -> str:
    """The first line of code outside of `torch.nn.functional` (and of `more` files) that led here."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in ON_THE_WAY | more:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


class Sighted(BaseException):
    """A batch norm that has met nobody."""


class Lookout(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stops a forward whose batch norm would see one micro-batch: one outside of all layers, in compiled code, ...

    Args:
        joint: whether micro-batches meet; they do so in threads of their own.
        put_back: puts random numbers back to where the attempt began.

    Attributes:
        where: the line of code that the batch norm was called from, once there was one.
    """

    supports_higher_order_operators = True

    def __init__(self, joint: bool, put_back: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.joint, self.put_back = joint, put_back
        self.where: str | None = None
        self.caller = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if normalises(func, args, kwargs or {}) and not (self.joint and threading.get_ident() == self.caller):
            self.where = self.where or line_of_caller()
            raise Sighted
        return func(*args, **(kwargs or {}))


def normalises(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether an operator normalises by the statistics of the samples at hand; instance norm ends in the same ones."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name not in KERNELS:
        return False
    given = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    return bool(given.get("training", True)) and not (given["input"].size(0) == 1 and _inside(F.instance_norm))


def _inside(function: Any) -> bool:
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return frame.f_code is function.__code__


def uncompiled() -> AbstractContextManager[object]:
    """Compiled code shows nobody its batch norms, so it runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes seconds
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


class BatchNorm:
    """How one door treats batch norm.

    Args:
        mode: "exact" or "local".
        modules: where batch norm layers may be.
    """

    def __init__(self, mode: str, modules: Sequence[nn.Module]) -> None:
        self.mode, self.modules = mode, modules
        self.told: set[str] = set()  # a notice is given once
        self.hidden: set[Any] = set()  # kinds of batches with a batch norm outside of all layers
        self.looked: set[Any] = set()  # kinds of batches that a lookout has seen go through
        self.lookout: Lookout | None = None
        self.attempt: ExitStack | None = None  # what is entered here ends with the attempt

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
        kind = _kind_of(inner, bool(layers))
        joint = bool(layers) or kind in self.hidden
        if self.attempt is not None and (kind, joint) not in self.looked:
            self.lookout = Lookout(joint, snapshot(generators_of(inner)))
            self.attempt.enter_context(uncompiled())
            self.attempt.enter_context(self.lookout)
        return joint

    def sighted(self, attempt: Callable[[], Answer], inner: Sequence[nn.Module]) -> Answer:
        """Runs an attempt at a batch. The first one of a kind looks out for batch norms that would see a part of it.

        If there is one, everything is put back and the attempt begins anew, knowing it.

        Raises:
            ModelError: one cannot meet the others.
        """
        while True:
            self.lookout = None
            try:
                with ExitStack() as self.attempt:
                    answer = attempt()
            except BaseException:
                if self.lookout is None or self.lookout.where is None:
                    raise
            finally:
                self.attempt = None
            layers = any(map(by_batch, inner))
            kind = _kind_of(inner, layers)
            if self.lookout is None:
                return answer
            if self.lookout.where is None:
                self.looked.add((kind, self.lookout.joint))
                return answer
            if self.lookout.joint:
                raise ModelError(
                    ASKED,
                    f"a batch norm that runs inside one operator or inside torch.jit, at {self.lookout.where}",
                    "call torch.nn.functional.batch_norm from Python, or pass batch_norm='local'",
                )
            self.hidden.add(kind)
            self.lookout.put_back()

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


def _kind_of(inner: Sequence[nn.Module], layers: bool) -> tuple[bool, bool]:
    return bool(inner) and inner[0].training, layers
