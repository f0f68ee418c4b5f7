"""How far two gradients are apart, how far rounding may drive them, and whether other weights would make them equal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from bigbatch.errors import OptionError

Gradients = Mapping[str, Tensor | None]

_SMALL_SHARE = 1e-3
_CHUNK = 1 << 20


def _wide(gradient: Tensor, device: torch.device) -> Tensor:
    """The gradient as one row of float64 numbers; complex numbers become pairs."""
    dense = gradient.detach()
    dense = dense.to_dense() if dense.layout != torch.strided else dense
    flat = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return flat.reshape(-1).to(device).to(torch.float64)


def _place(gradient: Tensor) -> torch.device:
    """Where float64 can be computed: the gradient's own device, but the CPU for MPS, which lacks float64."""
    return torch.device("cpu") if gradient.device.type == "mps" else gradient.device


def _norms(a: Tensor | None, b: Tensor | None) -> tuple[float, float]:
    """(norm of a - b, norm of b) for one parameter; infinite where one is missing or the shapes differ."""
    if a is None and b is None:
        return 0.0, 0.0
    if a is None or b is None or a.shape != b.shape:
        return math.inf, math.inf if b is None else float(torch.linalg.vector_norm(_wide(b, _place(b))))
    right = _wide(b, _place(b))
    return float(torch.linalg.vector_norm(_wide(a, _place(b)) - right)), float(torch.linalg.vector_norm(right))


def _all_norms(a: Gradients, b: Gradients) -> dict[str, tuple[float, float]]:
    return {name: _norms(a.get(name), b.get(name)) for name in dict.fromkeys([*b, *a])}


def _ratio(difference: float, reference: float) -> float:
    """difference / reference; 0/0 is 0, and whatever is not finite is infinitely far away."""
    if not (math.isfinite(difference) and math.isfinite(reference)):
        return math.inf
    if difference == 0.0:
        return 0.0
    return difference / reference if reference > 0.0 else math.inf


def relative_difference(a: Gradients, b: Gradients) -> float:
    """||a - b|| / ||b|| over all entries of all parameters together, added up in float64.

    Args:
        a: name -> gradient, or None for a parameter that got none; a name that is missing means None.
        b: the reference, of the same form.

    Returns:
        0 where both are equal, also where both are zero; infinity where a gradient is None on one side only, shapes
        differ, a number is not finite, or the reference is zero and `a` is not.

    >>> import torch
    >>> relative_difference({"w": torch.tensor([3.0, 5.0])}, {"w": torch.tensor([3.0, 4.0])})
    0.2
    """
    pairs = _all_norms(a, b).values()
    return _ratio(math.hypot(*(pair[0] for pair in pairs)), math.hypot(*(pair[1] for pair in pairs)))


def worst(a: Gradients, b: Gradients) -> tuple[str, float]:
    """The parameter that is farthest off, and by how much.

    A parameter's difference is measured against its own norm in the reference `b`, but at least against a thousandth of
    the whole gradient's norm. Otherwise a parameter whose true gradient is exactly zero (a bias before a norm) would
    always be the worst: it holds rounding alone, and rounding is large beside nothing. The price: a parameter with less
    than a thousandth of the norm is blamed less than its own relative difference, though never acquitted.

    Returns:
        (name, difference); the first name of `b` where all are equal, ("", 0.0) where there are no parameters.

    >>> import torch
    >>> right = {"weight": torch.tensor([100.0]), "bias": torch.tensor([0.0])}
    >>> worst({"weight": torch.tensor([101.0]), "bias": torch.tensor([1e-6])}, right)
    ('weight', 0.01)
    """
    norms = _all_norms(a, b)
    floor = _SMALL_SHARE * math.hypot(*(norm for _, norm in norms.values() if math.isfinite(norm)))
    blame = {name: _ratio(difference, max(norm, floor)) for name, (difference, norm) in norms.items()}
    name = max(blame, key=blame.__getitem__, default="")
    return name, blame.get(name, 0.0)


def rounding_bound(terms: int, dtype: torch.dtype, condition: float = 1.0, confidence: float = 6.0) -> float:
    """How large the relative error of a sum can become by rounding alone, save for an unlucky accident.

    exp(confidence * sqrt(n) * u + n * u^2 / (1 - u)) - 1 for n terms and unit roundoff u = eps / 2, times the condition
    number sum|terms| / |sum|. It takes rounding errors to be independent with mean zero; for n roundings it then holds
    with a probability of at least 1 - 2 n exp(-confidence^2 (1 - u)^2 / 2), which for 6 is 1 - 3e-8 n.
    Source: Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5),
    2019.

    Args:
        terms: how many numbers are added up one after another.
        dtype: the floating-point type that they are added up in.
        condition: at least 1; how much the terms cancel.
        confidence: lambda in the paper.

    Returns:
        the bound, infinite where it overflows.

    Raises:
        OptionError: terms is negative, condition below 1, confidence not positive, or dtype not a floating-point type.

    >>> f"{rounding_bound(10_000, torch.float32):.1e}"
    '3.6e-05'
    """
    if terms < 0 or not condition >= 1.0 or not confidence > 0.0 or not (dtype.is_floating_point or dtype.is_complex):
        raise OptionError(
            f"a rounding bound for terms={terms}, dtype={dtype}, condition={condition}, confidence={confidence}",
            "terms must not be negative, condition at least 1, confidence positive and dtype a floating-point type",
            "pass such values",
        )
    u = torch.finfo(dtype).eps / 2
    try:
        return condition * math.expm1(confidence * math.sqrt(terms) * u + terms * u * u / (1 - u))
    except OverflowError:
        return math.inf


def _chunks(whole: Gradients, pieces: Sequence[Gradients]) -> Iterator[tuple[Tensor, Tensor]]:
    """(stretch [E] of the whole gradient, the same stretch of all pieces [K, E]), at most a million entries in all."""
    size = max(1, _CHUNK // (len(pieces) + 1))
    for name in dict.fromkeys([*whole, *(name for piece in pieces for name in piece)]):
        rows = [gradients.get(name) for gradients in (whole, *pieces)]
        like = next((row for row in rows if row is not None), None)
        if like is None:
            continue
        place = _place(like)
        flat = [(torch.zeros_like(like) if row is None else row).detach() for row in rows]
        flat = [row if row.layout == torch.strided else row.to_dense() for row in flat]
        for stretch in zip(*(torch.split(row.reshape(-1), size) for row in flat), strict=True):
            table = torch.stack([_wide(part, place) for part in stretch])
            yield table[0], table[1:]


def explain_by_weights(whole: Gradients, pieces: Sequence[Gradients]) -> tuple[list[float], float]:
    """Weights c_k that bring sum_k c_k g_k as near to the whole gradient as can be, and what then remains.

    A remainder near rounding says: the pieces hold the right gradient and only their weights were wrong. A remainder
    far above it says: no weights help, the samples are tied together (batch norm, contrastive losses) or the random
    numbers differ. A gradient that is None counts as zero.

    What it cannot say: pieces whose gradients are nearly multiples or sums of each other can be weighed in many ways
    with the same result. Then the remainder still holds, but the weights are one choice among many (the shortest of
    them, pieces scaled to one length) and must not be read as what went wrong. With as many pieces as the parameters
    have entries, the remainder is always zero and proves nothing.

    Args:
        whole: name -> gradient of the whole batch.
        pieces: the same for each of K micro-batches.

    Returns:
        (the K weights, ||whole - sum_k c_k g_k|| / ||whole||); nan and infinity where a number is not finite.

    >>> import torch
    >>> pieces = [{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}]
    >>> weights, rest = explain_by_weights({"w": torch.tensor([3.0, 1.0])}, pieces)
    >>> [round(weight, 6) for weight in weights], rest < 1e-12
    ([3.0, 0.5], True)
    """
    count = len(pieces)
    gram, match = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for target, table in _chunks(whole, pieces):
        gram += (table @ table.T).cpu()
        match += (table @ target).cpu()
    if not (gram.isfinite().all() and match.isfinite().all()):
        return [math.nan] * count, math.inf
    length = gram.diagonal().sqrt()
    scale = torch.where(length > 0, 1 / length, 0.0)  # pieces of one length: small micro-batches are not lost
    system = gram * scale[:, None] * scale
    weights = scale * torch.linalg.lstsq(system, (scale * match)[:, None], driver="gelsd").solution[:, 0]
    rest = size = 0.0
    for target, table in _chunks(whole, pieces):
        rest = math.hypot(rest, float(torch.linalg.vector_norm(target - weights.to(table.device) @ table)))
        size = math.hypot(size, float(torch.linalg.vector_norm(target)))
    return weights.tolist(), _ratio(rest, size)
