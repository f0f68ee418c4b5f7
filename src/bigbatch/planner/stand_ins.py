"""Fake parameters and buffers stand in for a model's own while a step runs that computes and copies nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import is_lazy

from bigbatch.core.models import names_of
from bigbatch.core.tree import map_leaves
from bigbatch.errors import ModelError

SLOTS = ("_parameters", "_buffers")


@contextmanager
def stand_ins(inner: Sequence[nn.Module], mode: FakeTensorMode) -> Iterator[None]:
    """For as long as the block lasts, fakes of the same shape, dtype and layout stand where the modules hold tensors.

    A tensor that two modules hold has one fake. The modules stay the same objects, so that closures and plain functions
    find them too; what a forward writes to their attributes is taken back.
    """
    fakes: dict[int, Tensor] = {}
    before = [(module, dict(vars(module)), [dict(vars(module)[slot]) for slot in SLOTS]) for module in inner]
    try:
        for module, _, held in before:
            for slot, tensors in zip(SLOTS, held, strict=True):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        vars(module)[slot][name] = fakes.setdefault(id(tensor), stand_in(tensor, mode))
        yield
    finally:
        for module, attributes, held in before:
            for slot, tensors in zip(SLOTS, held, strict=True):
                attributes[slot].clear()
                attributes[slot].update(tensors)
            vars(module).clear()
            vars(module).update(attributes)


def refuse_lazy(inner: Sequence[nn.Module]) -> None:
    """Refuses a model whose weights have no shapes yet."""
    for module, name in names_of(inner).items():
        if any(is_lazy(tensor) for slot in SLOTS for tensor in vars(module)[slot].values()):
            found = f"{name} is lazy and has not seen its first batch, so that its weights have no shape"
            raise ModelError("the memory of a model was asked for", found, "run the model once on one sample")


def stand_in(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake on the CPU with the tensor's shape, strides and dtype; a parameter if it is one."""
    with mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        if not isinstance(tensor, nn.Parameter):
            return fake.requires_grad_(tensor.requires_grad)
        parameter = nn.Parameter(fake, requires_grad=tensor.requires_grad)
        if parameter.is_floating_point() and tensor.grad_dtype != tensor.dtype:
            parameter.grad_dtype = tensor.grad_dtype
        return parameter


def faked(tree: Any, mode: FakeTensorMode) -> Any:
    """The same structure with a fake on the CPU for every tensor."""

    def fake(leaf: Any) -> Any:
        return mode.from_tensor(leaf.detach().cpu()) if isinstance(leaf, Tensor) else leaf

    return map_leaves(fake, tree)
