"""Rows of one field and its cut at given borders: field[borders[k] : borders[k + 1]], for every kind of tensor."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

SHARED = (
    str, bytes, bytearray, numbers.Number, Enum, slice, type(None), type(...),
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.jagged)
Ragged = dict[tuple[int, int], list[tuple[Tensor, "Tensor | None"]]]


def refusal(leaf: Any) -> str | None:
    """Why a leaf cannot be cut, or None if it can be cut or is shared by its nature.

    >>> refusal(torch.eye(2).to_sparse_csc()), refusal(0.5), refusal(object())
    ('a tensor of layout torch.sparse_csc', None, 'an object of class object')
    """
    if isinstance(leaf, Tensor):
        return None if leaf.layout in LAYOUTS else f"a tensor of layout {leaf.layout}"
    if isinstance(leaf, (PackedSequence, *SHARED)) or callable(leaf) or is_array(leaf):
        return None
    return f"an object of class {type(leaf).__qualname__}"


def rows(leaf: Any) -> int | None:
    """Samples that a leaf would hold if its samples come first; None if it can only be shared.

    >>> rows(torch.zeros(4, 2)), rows(torch.tensor(0.7)), rows("camera-3")
    (4, None, None)
    """
    if isinstance(leaf, Tensor):
        return int(leaf.size(0)) if leaf.dim() else None
    if isinstance(leaf, PackedSequence):
        return int(leaf.batch_sizes[0])
    return int(leaf.shape[0]) if is_array(leaf) and len(leaf.shape) else None


def is_array(leaf: Any) -> bool:
    """A numpy array or its like: `shape`, `dtype` and slices. A class has the same names but is no array."""
    return not isinstance(leaf, type) and isinstance(getattr(leaf, "shape", None), tuple) and hasattr(leaf, "dtype")


def is_float_vector(leaf: Any) -> bool:
    """Whether a leaf is a row of floats, as class weights and priors are."""
    if isinstance(leaf, Tensor):
        return leaf.dim() == 1 and leaf.is_floating_point()
    return is_array(leaf) and len(leaf.shape) == 1 and getattr(leaf.dtype, "kind", "") == "f"


def cut_leaf(leaf: Any, borders: Sequence[int], ragged: Ragged) -> list[Any]:
    """The pieces of one leaf with `rows(leaf) == borders[-1]`; views wherever the layout allows them.

    Args:
        leaf: tensor, PackedSequence or array, samples first.
        borders: [0, ..., samples].
        ragged: filled with the offsets of jagged tensors, so that fields which share offsets share them afterwards
            (PyTorch adds jagged tensors only if their offsets are one object).
    """
    spans = list(pairwise(borders))
    if len(spans) == 1:
        return [leaf]
    if isinstance(leaf, PackedSequence):
        return cut_packed(leaf, spans)
    if not isinstance(leaf, Tensor):
        return [leaf[first:end] for first, end in spans]
    if leaf.layout == torch.jagged:
        return cut_jagged(leaf, spans, ragged)
    if leaf.is_nested:
        parts = leaf.unbind()
        return [torch.nested.as_nested_tensor(list(parts[first:end])) for first, end in spans]
    return CUTS[leaf.layout](leaf, spans)


def cut_strided(tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Views of consecutive rows. Without a gradient to carry, autograd need not know that they are views: a model may
    then change its micro-batch in place, as it may change the whole batch, and each piece counts its own changes."""
    if tensor.requires_grad or type(tensor) is not Tensor:
        return list(tensor.split_with_sizes(sizes))
    return list(torch.unsafe_split_with_sizes(tensor, sizes))


def cut_spans(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    return cut_strided(tensor, [end - first for first, end in spans])


def cut_packed(packed: PackedSequence, spans: Sequence[tuple[int, int]]) -> list[PackedSequence]:
    """Each piece packed again from its own sequences, in the batch's original order.

    Step t of the sequence at place p lies in row `starts[t] + p` of the data, so rows are picked without padding.
    """
    sizes = packed.batch_sizes
    steps, starts = torch.arange(len(sizes)), sizes.cumsum(0) - sizes
    lengths = (sizes[:, None] > torch.arange(int(sizes[0]))).sum(0)  # of the sequence at each place
    unsorted = packed.unsorted_indices
    places = torch.arange(len(lengths)) if unsorted is None else unsorted.cpu()
    pieces = []
    for first, end in spans:
        order = torch.arange(end - first)
        if unsorted is not None:
            order = lengths[places[first:end]].argsort(descending=True, stable=True)
        own = places[first:end][order]
        alive = lengths[own] > steps[: int(lengths[own[0]]), None]  # [steps, sequences]: step by step, as packed data
        picked = (starts[: len(alive), None] + own)[alive].to(packed.data.device)
        indices = None if unsorted is None else order.to(packed.data.device)
        back = None if unsorted is None else order.argsort().to(packed.data.device)
        pieces.append(PackedSequence(packed.data.index_select(0, picked), alive.sum(1), indices, back))
    return pieces


def cut_jagged(nested: Any, spans: Sequence[tuple[int, int]], ragged: Ragged) -> list[Tensor]:
    """Rows of a jagged tensor: values between two offsets, as views. Rows with `lengths()` may leave gaps."""
    offsets, lengths, axis = nested.offsets(), nested.lengths(), nested._ragged_idx
    key = (id(offsets), id(lengths))
    if key not in ragged:
        own_lengths = [None if lengths is None else lengths[first:end] for first, end in spans]
        ragged[key] = [(offsets[a : z + 1] - offsets[a], own) for (a, z), own in zip(spans, own_lengths, strict=True)]
    starts, values, pieces = offsets.tolist(), nested.values(), []
    for (first, end), (own_offsets, own_lengths_k) in zip(spans, ragged[key], strict=True):
        own_values = values.narrow(axis - 1, starts[first], starts[end] - starts[first])
        piece = torch.nested.nested_tensor_from_jagged(own_values, own_offsets, own_lengths_k, jagged_dim=axis)
        pieces.append(piece)
    return pieces


def cut_coo(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    rows_of = [torch.arange(first, end, device=tensor.device) for first, end in spans]
    return [tensor.index_select(0, picked) for picked in rows_of]


def cut_csr(tensor: Tensor, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Rows of a CSR matrix: the values between two row pointers; of a stack of matrices: whole matrices."""
    pointers, columns, values = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    starts = pointers.tolist()
    pieces = []
    for first, end in spans:
        shape = (end - first, *tensor.shape[1:])
        if pointers.dim() > 1:
            parts = (pointers[first:end], columns[first:end], values[first:end])
        else:
            inside = slice(starts[first], starts[end])
            parts = (pointers[first : end + 1] - pointers[first], columns[inside], values[inside])
        pieces.append(torch.sparse_csr_tensor(*parts, size=shape, check_invariants=True))
    return pieces


CUTS: dict[torch.layout, Callable[[Tensor, Sequence[tuple[int, int]]], list[Tensor]]] = {
    torch.strided: cut_spans,
    torch.sparse_coo: cut_coo,
    torch.sparse_csr: cut_csr,
}
