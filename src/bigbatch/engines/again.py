"""Parts of a backward that runs its forward again: leaves of a graph, rows of outputs, autocast as it was."""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.tree import children, leaves, map_leaves
from bigbatch.errors import MicroBatchTooLarge, ModelError


@dataclass(frozen=True)
class Tries:
    """What a failed try is told from, and what becomes of it; left out, there is one try.

    Attributes:
        on_failure: told the samples of each piece that did not fit in the backward.
        is_oom: whether an error says that memory ran out.
        let_go: makes an error release every tensor of the failed try.
        around: entered around each try of the backward, to measure it.
    """

    on_failure: Callable[[int], object] = lambda samples: None
    is_oom: Callable[[BaseException], bool] = lambda error: False
    let_go: Callable[[BaseException], object] = lambda error: None
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(tree) if isinstance(leaf, Tensor)]


def leaves_behind(outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """The leaves that require a gradient and that some output depends on, by their ids.

    >>> weight, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    >>> leaves_behind([(weight * 2).exp(), other.detach()]) == {id(weight): weight}
    True
    """
    found = {id(output): output for output in outputs if output.requires_grad and output.grad_fn is None}
    waiting: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found


def held_elsewhere(found: dict[int, Tensor], key: int) -> bool:
    """Whether a leaf was there before the forward: a name holds it, where a leaf made inside has its graph alone.

    >>> there = torch.ones(2, requires_grad=True)
    >>> output = there * torch.ones(2, requires_grad=True)
    >>> found = leaves_behind([output])
    >>> sorted(held_elsewhere(found, key) for key in found)
    [False, True]
    """

    def references(leaves: dict[int, Tensor], key: int) -> int:
        return sys.getrefcount(leaves[key])

    output = torch.zeros((), requires_grad=True).exp()  # its graph has to live for as long as it is looked at
    alone = leaves_behind([output])
    least = references(alone, *alone)
    if references(found, key) > least:
        gc.collect()  # a knot of a finished forward's frames is no name
    return references(found, key) > least


def known_leaves(outputs: Any, known: Collection[int], batch: Any) -> dict[int, Tensor]:
    """The leaves behind a micro-batch's outputs whose ids are known; what its forward made itself is left out.

    Raises:
        ModelError: a leaf would get no gradient, and nobody would notice.
    """
    found = leaves_behind(tensors_in(outputs))
    its_own = {id(tensor) for tensor in tensors_in((outputs, batch))}
    for key in found.keys() - set(known) - its_own:
        if held_elsewhere(found, key):
            raise ModelError(
                "the gradient of everything that the outputs depend on was asked for",
                f"a tensor of shape {tuple(found[key].shape)} that requires one, in neither parameters nor batch",
                "make it an nn.Parameter of the model, pass it with the batch, or detach it",
            )
    return {key: leaf for key, leaf in found.items() if key in known}


def rows_of(outputs: Any, values: Sequence[Tensor | None], samples: int, first: int, last: int) -> list[Tensor | None]:
    """The parts of values (one for each tensor of the outputs, in order) that belong to samples [first, last).

    >>> outputs = {"y": torch.arange(3), "names": ["a", "b", "c"], "boxes": [torch.ones(i) for i in range(3)]}
    >>> [part.tolist() for part in rows_of(outputs, tensors_in(outputs), 3, 1, 3)]
    [[1, 2], [1.0], [1.0, 1.0]]
    """
    waiting = iter(values)

    def parts(node: Any) -> Iterator[Tensor | None]:
        if isinstance(node, Tensor):
            value = next(waiting)
            yield None if value is None else value[first:last]
        elif isinstance(node, list) and one_a_sample(node, samples):
            for i, item in enumerate(node):
                own = [next(waiting) for _ in tensors_in(item)]
                yield from own if first <= i < last else ()
        else:
            for _, child in children(node) or ():
                yield from parts(child)

    return list(parts(outputs))


def one_a_sample(node: list[Any], samples: int) -> bool:
    """Whether a list of outputs holds one item for each sample, rather than fields; joining refused what is both."""
    rows = [[t.dim() > 0 and t.size(0) == samples for t in tensors_in(item)] for item in node]
    return len(node) == samples and not all(own and all(own) for own in rows)


def same_outputs(outputs: Sequence[Tensor], expected: Sequence[Tensor | None], eps: float) -> bool:
    """Whether outputs agree up to rounding; numbers that sit together in another way round otherwise.

    Other random numbers, or a layer that looks at all samples at hand, differ by more than √eps.
    """
    if len(outputs) != len(expected):
        return False
    for output, other in zip(outputs, expected, strict=True):
        if other is None or output.shape != other.shape:
            return False
        if output.is_floating_point():
            unit = math.sqrt(max(eps, torch.finfo(output.dtype).eps))
            found, wanted = output.detach().double(), other.double()
            if bool((found - wanted).norm() > unit * wanted.norm()):
                return False
    return True


def push(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], into: Sequence[Tensor]) -> None:
    """Runs one piece's graph backward, into the `.grad` of the given leaves and of no others."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs], inputs=into)


def linked(trees: Sequence[Any], tensors: Iterable[Tensor]) -> list[Any]:
    """The same structures with other tensors, in order."""
    waiting = iter(tensors)
    return [map_leaves(lambda leaf: next(waiting) if isinstance(leaf, Tensor) else leaf, tree) for tree in trees]


@dataclass(frozen=True)
class Autocast:
    """Autocast as it is now, for each kind of device that the model may compute on.

    Attributes:
        kinds: device type, whether autocast is on there, and its dtype.
        cached: whether casts of weights are remembered.
    """

    kinds: tuple[tuple[str, bool, torch.dtype], ...]
    cached: bool

    @classmethod
    def now(cls, device: torch.device | None) -> Autocast:
        types = {"cpu", device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"}
        kinds = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in sorted(types)
            if torch.amp.is_autocast_available(kind)
        ]
        return cls(tuple(kinds), torch.is_autocast_cache_enabled())

    @contextmanager
    def again(self, graph: bool) -> Iterator[None]:
        """The same autocast; casts made without a graph are not remembered, for a forward with one would use them."""
        with ExitStack() as stack:
            for kind, on, dtype in self.kinds:
                stack.enter_context(torch.autocast(kind, dtype, on, self.cached and graph))
            yield

    def eps(self) -> float:
        """The rounding unit of the coarsest dtype that autocast computes in; 0 where it is off."""
        return max((torch.finfo(dtype).eps for _, on, dtype in self.kinds if on), default=0.0)


def autocast(dtype: torch.dtype | None, device: torch.device | None) -> AbstractContextManager[object]:
    """Autocast to a dtype for one micro-batch; None leaves it as it is.

    Casts of weights are its own: one that several micro-batches share would add up their gradients in its own dtype.
    Those that are made without a graph are not remembered at all.
    """
    torch.clear_autocast_cache()
    if dtype is None:
        return nullcontext()
    kind = device.type if device is not None else "cpu"
    return torch.autocast(kind, dtype=dtype, cache_enabled=torch.is_grad_enabled())


def cannot_be_cut(samples: int, unfollowed: Sequence[str]) -> MicroBatchTooLarge:
    different = "its outputs come out otherwise in smaller pieces (batch norm, or numbers drawn outside PyTorch)"
    why = f"the model draws numbers that cannot be drawn again in parts ({unfollowed[0]})" if unfollowed else different
    return MicroBatchTooLarge(
        f"the backward of a micro-batch of {samples} samples was asked for in smaller pieces, for memory ran out",
        why,
        "pass a smaller micro_batch_size",
    )
