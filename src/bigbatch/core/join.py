"""The outputs of all micro-batches as the outputs of the whole batch: every tensor is joined along its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.tree import children, leaves, rebuild
from bigbatch.errors import SplitError

ASKED = "the outputs of all micro-batches were asked for as one batch"
RETURN = "have the model return only what the loss needs, with samples along the first axis"


def join(outputs: Sequence[Any], samples: Sequence[int], path: str = "outputs") -> Any:
    """Joins what the model returned for micro-batches of `samples` samples each.

    >>> join([{"y": torch.zeros(2, 5)}, {"y": torch.zeros(1, 5)}], [2, 1])["y"].shape
    torch.Size([3, 5])
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        return _join_tensors(outputs, samples, path)
    parts = [children(output) for output in outputs]
    if parts[0] is None:
        return _join_leaves(outputs, path)
    if any(type(output) is not type(first) for output in outputs):
        raise SplitError(
            ASKED, f"{path} is a {type(first).__name__} in one micro-batch and something else in another", RETURN
        )
    if isinstance(first, list) and _one_a_sample(parts, samples, path):
        return [item for output in outputs for item in output]
    names = [[name for name, _ in part or ()] for part in parts]
    if any(found != names[0] for found in names):
        raise SplitError(ASKED, f"{path} has the fields {names[0]} in one micro-batch and others in another", RETURN)
    columns = zip(*[[child for _, child in part or ()] for part in parts], strict=True)
    joined = [join(column, samples, path + name) for name, column in zip(names[0], columns, strict=True)]
    return rebuild(first, joined)


def _join_tensors(outputs: Sequence[Any], samples: Sequence[int], path: str) -> Tensor:
    for output, size in zip(outputs, samples, strict=True):
        found = f"a {type(output).__name__}" if not isinstance(output, Tensor) else f"shape {tuple(output.shape)}"
        if not isinstance(output, Tensor) or output.dim() == 0 or output.size(0) != size:
            raise SplitError(ASKED, f"{path} has {found} for a micro-batch of {size} samples", RETURN)
    if any(output.shape[1:] != outputs[0].shape[1:] for output in outputs):
        shapes = sorted({tuple(output.shape[1:]) for output in outputs})
        raise SplitError(
            ASKED,
            f"{path} has the shapes {' and '.join(map(str, shapes))} behind the first axis, in different micro-batches",
            "pad to one length for the whole batch; an axis that follows the number of samples ties samples together",
        )
    return torch.cat(list(outputs))


def _join_leaves(outputs: Sequence[Any], path: str) -> Any:
    first = outputs[0]
    if first is None or isinstance(first, str | bytes | int | float | bool):
        if all(type(output) is type(first) and output == first for output in outputs):
            return first
        raise SplitError(ASKED, f"{path} is {first!r} in one micro-batch and something else in another", RETURN)
    raise SplitError(ASKED, f"{path} is a {type(first).__name__}, which has no samples", RETURN)


def _one_a_sample(parts: Sequence[Any], samples: Sequence[int], path: str) -> bool:
    """Whether a list holds one item for each sample, rather than fields that hold all samples each."""
    one_each = all(len(part) == size for part, size in zip(parts, samples, strict=True))
    fields = all(_holds_rows(child, size) for part, size in zip(parts, samples, strict=True) for _, child in part)
    if one_each and fields:
        raise SplitError(
            ASKED,
            f"{path} is a list that may hold one item for each of {samples[0]} samples or {samples[0]} fields",
            "return a tuple of fields, or one tensor",
        )
    return one_each


def _holds_rows(output: Any, size: int) -> bool:
    """Whether there are tensors in it and each of them has one row a sample."""
    if isinstance(output, Tensor):
        return output.dim() > 0 and output.size(0) == size
    inner = [child for child in leaves(output) if isinstance(child, Tensor)]
    return bool(inner) and all(_holds_rows(child, size) for child in inner)


def axes_like(outputs: Any, size: int) -> bool:
    """Whether some axis behind the first is as long as the micro-batch, and so might follow the number of samples."""
    if isinstance(outputs, Tensor):
        return size in outputs.shape[1:]
    parts = children(outputs)
    return parts is not None and any(axes_like(child, size) for _, child in parts)
