"""The loss adds up: g = Σ_k w_k ∇loss_k, one micro-batch's forward and backward after the other."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from bigbatch.core.buffers import Buffers
from bigbatch.core.split import Piece
from bigbatch.core.weigh import Count
from bigbatch.errors import LossError

NOTHING = nullcontext()


def run(
    pieces: Iterable[Piece],
    weights: Sequence[Count],
    shares: Sequence[float],
    loss_of: Callable[[Piece], Tensor],
    buffers: Buffers,
    scale: Callable[[Tensor], Tensor] | None = None,
    done: Callable[[Piece], None] | None = None,
) -> Tensor:
    """Runs every micro-batch and adds its weighed gradient to `.grad`; returns the batch's loss, detached, 0-d.

    The weight goes into `loss.backward(gradient=w_k)`, which costs no operator of its own.

    Args:
        pieces: the micro-batches, on the model's device.
        weights: w_k of each.
        shares: each one's share of the batch's samples, by which buffers move.
        loss_of: forward and loss of one micro-batch, a scalar.
        buffers: the buffers of the modules at hand.
        scale: multiplies a weight by the loss scale of a GradScaler.
        done: called after each micro-batch's backward.
    """
    constant, large = True, False
    losses: list[Tensor] = []
    used: list[Tensor] = []
    seeds: dict[Count, Tensor] = {}  # even pieces have at most two different weights
    for piece, weight, share in zip(pieces, weights, shares, strict=True):
        with buffers.lent(share, piece.samples) if buffers.originals else NOTHING:
            loss = loss_of(piece)
            if type(loss) is not Tensor or loss.dim():
                loss = scalar(loss)
            if not losses:  # on the CPU a mean squared error lies in a storage as large as the outputs
                large = loss.untyped_storage().nbytes() > loss.element_size()
            seed = seeds.get(weight)
            if seed is None:
                seed = seeds[weight] = weight_like(weight, loss)
            if loss.requires_grad:  # a micro-batch without a target may have a constant loss
                loss.backward(gradient=scale(seed) if scale else seed)  # type: ignore[no-untyped-call]
                constant = False
            if done is not None:
                done(piece)
        losses.append(loss.detach().clone() if large else loss.detach())
        used.append(seed)
    if constant:
        losses[-1].backward()  # type: ignore[no-untyped-call]  # PyTorch's own error says what is missing
    return weighed_sum(losses, used)


def weight_like(weight: Count, loss: Tensor) -> Tensor:
    """The weight as the gradient that `loss.backward` takes: 0-d, of the loss's dtype and device."""
    if isinstance(weight, Tensor):
        return weight.to(loss)
    return torch.full((), weight, dtype=loss.dtype, device=loss.device)


@torch.no_grad()
def weighed_sum(losses: list[Tensor], weights: list[Tensor]) -> Tensor:
    """Σ_k w_k loss_k, in float32 at least; a micro-batch of weight zero adds nothing, even where its mean is 0/0."""
    first = losses[0]
    if type(first) is Tensor and first.device.type == "cpu":  # nothing to wait for, and no operator in between
        known = {id(weight): weight.item() for weight in weights}
        pairs = [(known[id(weight)], loss.item()) for weight, loss in zip(weights, losses, strict=True)]
        wide = functools.reduce(torch.promote_types, {loss.dtype for loss in losses}, torch.float32)
        return torch.full((), sum(weight * loss for weight, loss in pairs if weight), dtype=wide)
    loss = torch.stack(losses)
    if loss.dtype in (torch.float16, torch.bfloat16):
        loss = loss.float()
    if len(set(map(id, weights))) == 1:
        return loss.sum() * weights[0].to(loss.dtype)
    weight = torch.stack(weights).to(loss.dtype)
    return torch.where(weight == 0, 0.0, loss * weight).sum()


def scalar(loss: object) -> Tensor:
    """The loss as a 0-d tensor, or an error that says why it is none."""
    asked = "a scalar loss was asked of the loss function"
    if not isinstance(loss, Tensor):
        raise LossError(asked, f"it returned a {type(loss).__name__}", "return a 0-d tensor")
    if loss.numel() != 1:
        raise LossError(
            asked,
            f"it returned shape {tuple(loss.shape)}",
            "reduce it with .mean() or .sum() (reduction='none' does not)",
        )
    return loss if loss.dim() == 0 else loss.reshape(())
