"""The loss adds up: g = Σ_k w_k ∇loss_k, one micro-batch's forward and backward after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

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
    constant, at_hand, wide = True, False, torch.float32
    losses: list[float | Tensor] = []
    used: list[Count] = []
    seeds: dict[Count, Tensor] = {}  # even pieces have at most two different weights
    for piece, weight, share in zip(pieces, weights, shares, strict=True):
        with buffers.lent(share, piece.samples) if buffers.originals else NOTHING:
            loss = loss_of(piece)
            if type(loss) is not Tensor or loss.dim():
                loss = scalar(loss)
            if not losses:
                at_hand, device = is_at_hand(loss, weight), loss.device
            wide = torch.promote_types(wide, loss.dtype)
            seed = seeds.get(weight)
            if seed is None:
                seed = seeds[weight] = weight_like(weight, loss)
            if loss.requires_grad:  # a micro-batch without a target may have a constant loss
                loss.backward(gradient=scale(seed) if scale else seed)  # type: ignore[no-untyped-call]
                constant = False
            if done is not None:
                done(piece)
        losses.append(loss.item() if at_hand else loss.detach())
        used.append(weight if at_hand else seed)
        del loss  # on the CPU a mean squared error lies in a storage as large as the outputs
    if constant:
        torch.zeros((), device=device).backward()  # type: ignore[no-untyped-call]  # PyTorch's own error says why
    return weighed_sum(losses, used, wide)


def weight_like(weight: Count, loss: Tensor) -> Tensor:
    """The weight as the gradient that `loss.backward` takes: 0-d, of the loss's dtype and device."""
    if isinstance(weight, Tensor):
        return weight.to(loss)
    return torch.full((), weight, dtype=loss.dtype, device=loss.device)


def is_at_hand(loss: Tensor, weight: Count) -> bool:
    """Whether the loss can be read as a number: less work than an operator and, on the CPU, no waiting."""
    return loss.is_cpu and not isinstance(weight, Tensor)


def weighed_sum(losses: Sequence[Any], weights: Sequence[Any], wide: torch.dtype) -> Tensor:
    """Σ_k w_k loss_k; a micro-batch of weight zero adds nothing, even where its mean is 0/0.

    Args:
        losses: numbers, or 0-d tensors.
        weights: the same.
        wide: the dtype of the sum: that of the losses, float32 at least.
    """
    if not isinstance(losses[0], Tensor):
        total = sum(weight * loss for weight, loss in zip(weights, losses, strict=True) if weight)
        return torch.full((), total, dtype=wide)
    loss = torch.stack(list(losses)).to(wide)
    if len(set(map(id, weights))) == 1:
        one: Tensor = weights[0].to(wide)
        return loss.sum() * one
    weight = torch.stack(list(weights)).to(wide)
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
