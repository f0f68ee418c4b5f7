"""Random numbers that depend on a seed, an operator's place in the forward and a sample's place in the batch alone.

Samples are drawn in blocks: block k of an operator holds samples [k * size, (k + 1) * size) of the batch and comes from
one generator, whose seed is a hash of (seed, place, k). A micro-batch draws the blocks that it touches, whole, and
keeps its own samples. What costs a few microseconds, the seeding, is so paid once a block, and the size of a block
depends on the elements of one sample, never on the micro-batch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.random_operators import MIXERS

Fill = Callable[[Tensor, torch.Generator], object]

_SHARED = -1  # the block of numbers that all samples share


def block_size(elements: int, device: torch.device) -> int:
    """Samples of one block, for samples of so many elements: about as long to draw as the seeding takes.

    >>> [block_size(n, torch.device("cpu")) for n in (1, 100, 2048, 10**6)]
    [256, 16, 1, 1]
    """
    enough = 2**11 if device.type == "cpu" else 2**19  # elements
    return 1 << min(8, max(0, (enough // max(elements, 1)).bit_length() - 1))


@dataclass(frozen=True)
class Numbers:
    """The numbers of the operator at `place`, for samples [first, first + samples) of the batch."""

    seed: int
    place: int
    first: int
    samples: int

    def generator(self, generator: torch.Generator, block: int = _SHARED) -> torch.Generator:
        """The generator, at the start of a block's numbers."""
        text = struct.pack("<Qqq", self.seed % 2**64, self.place, block)
        return generator.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little"))

    def fill(self, target: Tensor, axis: int | None, fill: Fill) -> None:
        """Fills the target, in the order of logical indices within a sample, whatever its strides are.

        Args:
            target: of any strides; `axis` holds its samples, each as so many neighbours.
            axis: None where all samples share the numbers.
            fill: fills a contiguous tensor by a generator.
        """
        generator = torch.Generator(target.device)
        if axis is None or self.samples == 0:
            whole = (
                target if target.is_contiguous() else torch.empty_like(target, memory_format=torch.contiguous_format)
            )
            fill(whole, self.generator(generator))
            if whole is not target:
                target.copy_(whole)
            return
        rows = target if axis == 0 else target.unflatten(axis, (self.samples, -1)).movedim(axis, 0)  # type: ignore[no-untyped-call]
        each = target.shape[0] // self.samples if axis == 0 else 1
        size = block_size(target.numel() // self.samples, target.device)
        straight = rows.is_contiguous()
        spare = None
        for block in range(self.first // size, -(-(self.first + self.samples) // size)):
            begin = block * size - self.first
            low, high = max(begin, 0), min(begin + size, self.samples)
            part = rows.narrow(0, low * each, (high - low) * each)
            self.generator(generator, block)
            if straight and high - low == size:
                fill(part, generator)
                continue
            if spare is None:
                spare = rows.new_empty((size * each, *rows.shape[1:]))
            fill(spare, generator)
            part.copy_(spare.narrow(0, (low - begin) * each, (high - low) * each))

    def one_by_one(self, func: Any, bound: Mapping[str, Any], out: Tensor, axis: int) -> str | None:
        """Runs an operator for each sample alone, as the numbers that it takes depend on its arguments.

        Args:
            func: an operator with one result and an argument `generator`.
            bound: its arguments; tensors among them end in axes like the result's.
            out: its result for all samples, to be overwritten.
            axis: the result's axis of samples.

        Returns:
            The reason why this cannot be done; None if it is done.
        """
        generator, each = torch.Generator(out.device), out.shape[axis] // self.samples
        cut = {}
        for name, value in bound.items():
            if isinstance(value, Tensor):
                own = axis - out.dim() + value.dim()
                if own >= 0 and value.shape[own] == out.shape[axis]:
                    cut[name] = (value, own)
                elif own >= 0 and value.shape[own] != 1:
                    return f"{name} of shape {tuple(value.shape)} cannot be cut as the result {tuple(out.shape)}"
        if not cut:
            return "it draws for all samples at once"
        for sample in range(self.samples):
            own_bound = {n: v.narrow(a, sample * each, each).contiguous() for n, (v, a) in cut.items()}
            seeded = self.generator(generator, self.first + sample)
            out.narrow(axis, sample * each, each).copy_(func(**{**bound, **own_bound, "generator": seeded}))
        return None


@dataclass(frozen=True)
class Filling:
    """A random operator as the filling of a tensor: what to fill, by what, and its results once that is filled."""

    target: Tensor
    fill: Fill
    finish: Callable[[Tensor], Any] = lambda filled: filled


def _uniform(bound: Mapping[str, Any]) -> Fill:
    return lambda tensor, generator: tensor.uniform_(generator=generator)


def _normal(bound: Mapping[str, Any]) -> Fill:
    mean, std = bound.get("mean", 0.0), bound.get("std", 1.0)
    return lambda tensor, generator: tensor.normal_(mean, std, generator=generator)


def _integers(bound: Mapping[str, Any]) -> Fill:
    low, high = int(bound.get("low", 0)), int(bound["high"])
    return lambda tensor, generator: tensor.random_(low, high, generator=generator)


def _coins(bound: Mapping[str, Any]) -> Fill:
    return lambda tensor, generator: flip_coins(tensor, float(bound["p"]), generator)


def flip_coins(tensor: Tensor, p: float, generator: torch.Generator) -> None:
    """Ones with chance p, else zeros, in a contiguous tensor.

    For many numbers on the CPU this is nearly twice as fast as `bernoulli_`, which spends 64 random bits on each: 32
    bits are compared to p, which is thereby rounded to a multiple of 2^-32.
    """
    many = tensor.numel() >= 2**14  # where four more calls are paid for
    if tensor.device.type != "cpu" or not many or not 0.0 < p < 1.0:
        tensor.bernoulli_(p, generator=generator)
        return
    limit = min(round(p * 2**32) - 2**31, 2**31 - 1)
    for part in tensor.view(-1).split(2**15):  # type: ignore[no-untyped-call]  # fits the cache
        bits = torch.empty((len(part) + 1) // 2, dtype=torch.int64, device=tensor.device)
        bits.random_(-(2**63), None, generator=generator)
        torch.lt(bits.view(torch.int32)[: len(part)], limit, out=part)


_MAKERS: dict[str, Callable[[Mapping[str, Any]], Fill]] = {
    "aten::rand": _uniform,
    "aten::rand_like": _uniform,
    "aten::randn": _normal,
    "aten::randn_like": _normal,
    "aten::normal": _normal,
    "aten::randint": _integers,
    "aten::randint_like": _integers,
    "aten::bernoulli": _coins,
}


def filling_of(func: Any, bound: Mapping[str, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Filling | None:
    """The operator as a filling, without a number being drawn; None where its numbers depend on tensors."""
    name = func._schema.name
    if name == "aten::native_dropout":
        return _dropout(name, bound)
    if name in MIXERS:
        return _leaky_relu(name, bound)
    if name == "aten::bernoulli_" and isinstance(bound["p"], float):
        return Filling(args[0], _coins(bound))
    if name.endswith("_") and "generator" in bound and not any(isinstance(a, Tensor) for a in args[1:]):
        return Filling(args[0], lambda tensor, generator: func(tensor, *args[1:], **{**kwargs, "generator": generator}))
    made = name in _MAKERS and not any(isinstance(bound.get(part), Tensor) for part in ("mean", "std", "p", "out"))
    if not made or (name == "aten::bernoulli" and "p" not in bound):
        return None
    options: dict[str, Any] = {key: bound.get(key) for key in ("dtype", "layout", "device", "pin_memory")}
    if "size" in bound:
        whole_numbers = name == "aten::randint" and not isinstance(options["dtype"], torch.dtype)
        target = torch.empty(bound["size"], **{**options, **({"dtype": torch.int64} if whole_numbers else {})})
    else:
        target = torch.empty_like(bound["self"], **options, memory_format=bound.get("memory_format"))
    return Filling(target, _MAKERS[name](bound))


def _dropout(name: str, bound: Mapping[str, Any]) -> Filling:
    source, keep = bound["input"], 1.0 - bound["p"]
    mask = torch.empty(source.shape, dtype=torch.bool, device=source.device)
    finish = lambda filled: (MIXERS[name](source, filled, bound), filled)  # noqa: E731
    return Filling(mask, _coins({"p": keep}), finish)


def _leaky_relu(name: str, bound: Mapping[str, Any]) -> Filling:
    source, low, high = bound["self"], float(bound["lower"]), float(bound["upper"])

    def finish(slopes: Tensor) -> Any:
        noise = torch.where(source <= 0, slopes, 1.0)
        out = MIXERS[name](source, noise, bound)
        if name.endswith("_functional"):
            return out, noise
        bound["noise"].copy_(noise)
        written = source if name.endswith("_") else bound.get("out")
        return out if written is None else written.copy_(out)

    slopes = torch.empty_like(source, memory_format=torch.contiguous_format)
    return Filling(slopes, lambda tensor, generator: tensor.uniform_(low, high, generator=generator), finish)
