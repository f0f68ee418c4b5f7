"""A model that returns its own loss is asked what that loss L is divided by.

Hugging Face models take a mean over target tokens (after the shift of a causal model, or without one) or over samples,
and many let the caller state the denominator as `num_items_in_batch`. Which of these holds cannot be read off the
labels, and an auxiliary term that is none of them must not be averaged in silence. So the model itself is asked, on one
or two samples a and b of the first window, as it is being trained but without gradients:

- with `num_items_in_batch`: L(n) = L(1) / n, and L(1) / L() is the count;
- without: L(a, b) + L(b, a) = 2 (w_a L(a, a) + w_b L(b, b)) with the weights w of a mean, and L(a, a) is no 2 L(a).

Every forward starts from the same random numbers, and a sample keeps its row on both sides of the second equation. So
it sees the same dropout and the same rounding on both, and the equations hold to the last digits of the loss's dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bigbatch.core.batch_norm import by_batch
from bigbatch.core.buffers import Buffers
from bigbatch.core.candidates import Candidate, Question, agreed, alike, counts_of, doubt, together, told_apart
from bigbatch.core.models import call, inner_modules
from bigbatch.core.move import to_device
from bigbatch.core.rng import preserved_rng
from bigbatch.core.rules import Rule, loss_of, samples
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.tree import map_leaves
from bigbatch.errors import LossError, SplitError

LEAST, MOST = 2, 8  # questions that are put to a model
MANY = 2**16  # a loss that is divided by so many shows every term that is not
STATE = 'state reduction="mean", "sum" or a count function, or use MicroBatched with the loss outside of the model'


class OwnLoss:
    """What is known so far of one model's own loss.

    Args:
        model: returns the loss, alone or as `loss_of` finds it.
        modules: the modules behind the model.
        splitter: cuts samples out of a window.
        count: `count(inputs, targets)`, where the user has stated what the loss is divided by; the model is then
            asked only whether it has to be handed the total.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        modules: Sequence[nn.Module],
        splitter: Splitter,
        count: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self.model, self.modules, self.splitter = model, modules, splitter
        self.stated = None if count is None else lambda inputs, targets, _: count(inputs, targets)
        self.open: list[Candidate] = []  # several that weigh every window seen so far alike
        self.eps = 0.0

    def rule(self, pieces: Sequence[Piece], device: torch.device | None) -> Rule:
        """The rule for this window; the model is asked at the first, and again where answers that agreed part ways.

        Raises:
            LossError: the model's loss is no mean over anything that the batch lets one count.
        """
        if len(pieces) == 1:  # one micro-batch is the whole batch: the model divides as it always does
            return Rule("total", samples, loss_of)
        if not self.open or not agreed(self.open, pieces):
            inner = inner_modules(self.modules)
            loss = self._asker(Buffers(inner), device)
            with evaluating(module for module in inner if by_batch(module)):  # accepted as batch_norm="local"
                self.open = self._answers(pieces, inner, loss)
        count = self.open[0].count
        if self.open[0].handed:
            return Rule("counted", count, loss_of, lambda total: {"num_items_in_batch": total})
        return Rule("mean", count, loss_of)

    def _answers(
        self, pieces: Sequence[Piece], inner: Sequence[nn.Module], loss: Callable[..., float]
    ) -> list[Candidate]:
        counts = counts_of(self.model, pieces[0].inputs) if self.stated is None else [self.stated]
        singles = told_apart([one for p in pieces for one in self.splitter.pieces(p.inputs, None, 1)], counts)
        handed = self._uses_items(singles, loss)
        candidates = [c for c in self.open or [Candidate(count, handed) for count in counts] if c.handed == handed]
        if self.stated is not None:
            return candidates
        questions: list[Question] = [(single,) for single in singles]
        if not handed:
            questions = [alike(first, second) for first, second in combinations(singles, 2)]
        asked = 0
        for _ in range(MOST):
            if not questions or not candidates or (asked >= LEAST and agreed(candidates, pieces)):
                break
            questions.sort(key=lambda question: doubt(candidates, question), reverse=True)
            question = questions.pop()
            fitting = (
                self._counted(candidates, question[0], loss)
                if handed
                else self._mean(candidates, question, inner, loss)
            )
            if fitting is not None:
                candidates, asked = fitting, asked + 1
        return self._decided(candidates, asked, pieces)

    def _decided(self, candidates: list[Candidate], asked: int, pieces: Sequence[Piece]) -> list[Candidate]:
        if asked and candidates and agreed(candidates, pieces):
            return candidates
        if not asked:
            raise refusal("the first window has no samples that give a finite loss and can be run together")
        if candidates:
            raise refusal("several denominators fit all samples of the first window, and weigh this one differently")
        raise refusal("it is no mean over samples or target tokens (an auxiliary term, or another reduction?)")

    def _uses_items(self, singles: Sequence[Piece], loss: Callable[..., float]) -> bool:
        """Whether the loss is divided by `num_items_in_batch`; a loss that is so in part is refused."""
        if not takes_items(self.model):
            return False
        for single in singles:
            try:
                one, many = (loss(single.inputs, num_items_in_batch=items) for items in (1, MANY))
            except TypeError:  # a forward that hands its keyword arguments on may find no taker for this one
                return False
            if not isfinite(one) or one == many == 0:  # no target in this sample
                continue
            if self._close(one, many, one):
                return False
            if self._close(one, many * MANY, one):
                return True
            found = f"handed 1 and {MANY} items, it gave {one:.6g} and {many:.6g}: a part of it is not divided by them"
            raise refusal(found)
        return False

    def _counted(
        self, candidates: list[Candidate], single: Piece, loss: Callable[..., float]
    ) -> list[Candidate] | None:
        summed, mean = loss(single.inputs, num_items_in_batch=1), loss(single.inputs)
        if not isfinite(mean) or summed == 0:
            return None
        return [c for c in candidates if self._close(summed, mean * float(c.counts([single])[0]), summed)]

    def _mean(
        self, candidates: list[Candidate], pair: Question, inner: Sequence[nn.Module], loss: Callable[..., float]
    ) -> list[Candidate] | None:
        a, b = pair
        try:
            aa, ab, ba, bb = (loss(together(x, y, pair)) for x, y in ((a, a), (a, b), (b, a), (b, b)))
        except SplitError:
            return None
        if not all(map(isfinite, (aa, ab, ba, bb))):
            return None
        if self.eps > torch.finfo(torch.float32).eps:
            raise refusal("it comes in a low precision that hides other terms; have the model return it in float32")
        try:
            with evaluating(inner):
                once, twice = loss(a.inputs), loss(together(a, a, pair))
        except LossError:  # some models have a loss in training mode only
            once, twice = loss(a.inputs), aa
        if abs(twice - once) > abs(twice - 2 * once):
            raise refusal(f"it adds up: one sample gives {once:.6g}, the same sample twice {twice:.6g}")
        fitting = []
        for candidate in candidates:
            w_a, w_b = (float(weight) for weight in candidate.weights(pair))
            if self._close(ab + ba, 2 * (w_a * aa + w_b * bb), max(map(abs, (aa, ab, ba, bb)))):
                fitting.append(candidate)
        return fitting

    def _close(self, found: float, expected: float, loss: float) -> bool:
        """Equal but for the rounding of a loss in its own dtype."""
        return abs(found - expected) <= (2 if self.eps > 1e-4 else 64) * self.eps * abs(loss)

    def _asker(self, buffers: Buffers, device: torch.device | None) -> Callable[..., float]:
        """The model's loss on some inputs, without a gradient; whatever the forward moves is put back."""

        def loss(inputs: Any, **extra: Any) -> float:
            there = copied(inputs if device is None else to_device(inputs, device))
            with torch.no_grad(), preserved_rng(), buffers.replayed():
                found = loss_of(call(self.model, there, extra))
            if found.numel() != 1:
                raise refusal(f"it has the shape {tuple(found.shape)}")
            self.eps = torch.finfo(found.dtype).eps
            return float(found)

        return loss


def copied(tree: Any) -> Any:
    """The tree with copies of its tensors, for a forward that may write to its inputs; one tensor stays one tensor."""
    copies: dict[int, Any] = {}

    def copy(leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return leaf._replace(data=leaf.data.detach().clone())
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return map_leaves(copy, tree)


def refusal(found: str) -> LossError:
    return LossError("the denominator of the model's own loss was asked for", found, STATE)


def takes_items(model: Any) -> bool:
    """Whether the forward may take `num_items_in_batch`, by name or among its keyword arguments."""
    parameters = inspect.signature(model.forward if isinstance(model, nn.Module) else model).parameters
    return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """The modules in evaluation mode, for a while."""
    held = [(module, module.training) for module in modules]
    try:
        for module, _ in held:
            module.training = False
        yield
    finally:
        for module, mode in held:
            module.training = mode
