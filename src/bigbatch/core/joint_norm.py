"""Batch norm over a whole batch that lies in pieces: y_k = weight x̂_k + bias, x̂_k = (x_k - mean) / sqrt(var + eps).

`mean` and `var` are those of all pieces together: var = Σ n_k (var_k + (mean_k - mean)²) / n (Chan, Golub and LeVeque,
1983), which never subtracts two large numbers. Autograd sees three kinds of nodes,

    x_k ── enter ──(x_k)──────────────────── leave ── y_k        one of each for every piece
             └──(mean_k, var_k)── meet ──(carrier)────┘          one for all pieces

and every tensor as large as a piece is made for one piece at a time. On the way back `leave` reduces its piece to
Σ g_k and Σ g_k x̂_k and hands g_k on as it is; autograd adds the sums of all pieces; they are what `meet` gives to bias
and weight; `enter` ends with weight / sqrt(var + eps) (g_k - Σ g / n - x̂_k Σ g x̂ / n).
What flows back between the nodes is not the derivative of what they computed; only from x_k to y_k it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bigbatch.errors import ModelError


@dataclass
class Entered:
    """One piece between `enter` and `leave`, held by nothing but its owner.

    Attributes:
        x: the input, until the piece leaves.
        statistics: its own mean and biased variance, [2, C].
        count: values a channel.
        joint: empty until the pieces meet; its backward waits for what stands here then.
    """

    x: Tensor
    statistics: Tensor
    count: int
    joint: list[Joint]


@dataclass(frozen=True)
class Joint:
    """The numbers of all pieces together, [C] each and outside of any graph; `scale` is weight / sqrt(var + eps)."""

    mean: Tensor
    var: Tensor
    scale: Tensor
    eps: float
    count: int


@dataclass(frozen=True)
class Met:
    """What a piece needs to leave: the joint numbers, weight and bias, and the tensor through which gradients meet."""

    joint: Joint
    weight: Tensor | None
    bias: Tensor | None
    carrier: Tensor


def enter(x: Tensor) -> Entered:
    """Measures one piece.

    Args:
        x: [N, C] or [N, C, ...]. It is neither copied nor written to.

    >>> enter(torch.tensor([[1.0], [3.0]])).statistics.tolist()
    [[2.0], [1.0]]
    """
    joint: list[Joint] = []
    through, statistics = _Enter.apply(x, joint)  # type: ignore[no-untyped-call]
    return Entered(through, statistics, x.numel() // x.size(1), joint)


def meet(
    entered: Sequence[Entered], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Met:
    """Puts the statistics of all pieces together.

    Args:
        entered: all pieces of the batch.
        weight: [C], or None for ones; its gradient comes once, for all pieces.
        bias: [C], or None for zeros.
        eps: is added to the variance.

    Raises:
        ValueError: the batch has one value a channel, so that it has no variance; PyTorch says the same.

    >>> met = meet([enter(torch.tensor([[1.0], [3.0]])), enter(torch.tensor([[8.0]]))])
    >>> met.joint.mean.tolist(), [round(value, 4) for value in met.joint.var.tolist()]
    ([4.0], [8.6667])
    """
    counts, statistics = [piece.count for piece in entered], [piece.statistics for piece in entered]
    if sum(counts) == 1:
        found = entered[0].x.size()
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {found}")
    with torch.no_grad():
        mean, var = together(counts, statistics)
        wide_weight, wide_bias = (None if given is None else given.to(mean.dtype) for given in (weight, bias))
        scale = (var + eps).rsqrt()
        joint = Joint(mean, var, scale if wide_weight is None else scale * wide_weight, eps, sum(counts))
    for piece in entered:
        piece.joint.append(joint)
    carrier = _Meet.apply(joint, weight, bias, *statistics)  # type: ignore[no-untyped-call]
    return Met(joint, wide_weight, wide_bias, carrier)


def together(counts: Sequence[int], statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of all pieces, [C] each, of every piece's count and (mean, biased variance) [2, C]."""
    means, variances = torch.stack(list(statistics)).unbind(1)
    shares = [count / sum(counts) for count in counts]  # as numbers: a tensor of them would wait for the device
    mean = means[0] + _weighed(means - means[0], shares)
    return mean, _weighed(variances + (means - mean).square(), shares)


def _weighed(rows: Tensor, shares: Sequence[float]) -> Tensor:
    return torch.stack(list(torch._foreach_mul(rows.unbind(), shares))).sum(0)


def leave(met: Met, entered: Entered) -> Tensor:
    """The normalised piece, in the dtype and the memory format of its input, which `entered` holds no longer.

    >>> pieces = [enter(torch.tensor([[1.0], [3.0]])), enter(torch.tensor([[8.0]]))]
    >>> met = meet(pieces)
    >>> [[round(value, 3) for value in leave(met, piece).flatten().tolist()] for piece in pieces]
    [[-1.019, -0.34], [1.359]]
    """
    x = entered.x
    del entered.x
    out: Tensor = _Leave.apply(x, met.carrier, met)  # type: ignore[no-untyped-call]
    return out


@torch.no_grad()
def move(running_mean: Tensor | None, running_var: Tensor | None, met: Met, momentum: float) -> None:
    """Moves running statistics towards the batch's, in place; the variance is the unbiased one, as in PyTorch.

    >>> mean, met = torch.zeros(1), meet([enter(torch.tensor([[1.0], [3.0]]))])
    >>> move(mean, None, met, momentum=0.5)
    >>> mean.tolist()
    [1.0]
    """
    count = met.joint.count
    for running, now in ((running_mean, met.joint.mean), (running_var, met.joint.var * (count / (count - 1)))):
        if running is not None:
            wide = torch.promote_types(running.dtype, now.dtype)
            running.copy_(torch.lerp(running.to(wide), now.to(wide), momentum))


def format_of(x: Tensor) -> torch.memory_format:
    """The memory format of a piece. The native backward on the CPU needs its gradient in the same one: told apart by
    their strides, which those of a single sample leave open, it adds up other numbers (torch 2.13)."""
    if not x.is_contiguous() and x.dim() in (4, 5):
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        if x.is_contiguous(memory_format=last):
            return last
    return torch.contiguous_format


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, joint: list[Joint]) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.joint = joint
        ctx.set_materialize_grads(False)  # a piece whose output nothing uses still has the share that the sums give it
        # The native kernel measures in the dtype of the running statistics; these move by nothing and are dropped.
        dtype = torch.promote_types(x.dtype, torch.float32)
        if not x.numel():
            return x, x.new_zeros(2, x.size(1), dtype=dtype)
        running_mean, running_var = x.new_zeros(2, x.size(1), dtype=dtype).unbind()
        mean, var = torch.batch_norm_update_stats(x, running_mean, running_var, momentum=0.0)
        return x, torch.stack((mean, var))

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, sums: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        (joint,) = ctx.joint
        offset, slope = sums.unbind()
        # Half precision is widened first, or the two terms would be rounded apart and then once more together.
        out = F.batch_norm(x.to(sums.dtype), joint.mean, joint.var, slope, offset, eps=joint.eps)
        if grad is not None:
            out.addcmul_(grad.to(sums.dtype), joint.scale.view(-1, *[1] * (x.dim() - 2)))
        return out.to(x.dtype), None


class _Meet(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Joint, weight: Tensor | None, bias: Tensor | None, *statistics: Tensor) -> Tensor:
        ctx.joint, ctx.pieces = joint, len(statistics)
        return torch.zeros_like(statistics[0])

    @staticmethod
    def backward(ctx: Any, sums: Tensor) -> tuple[Tensor | None, ...]:
        bias_grad, weight_grad = (total.clone() for total in sums)  # they become .grad, so they share no memory
        _, of_weight, of_bias, *_ = ctx.needs_input_grad
        shares = sums * (-ctx.joint.scale / ctx.joint.count)
        return None, weight_grad if of_weight else None, bias_grad if of_bias else None, *[shares] * ctx.pieces


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, carrier: Tensor, met: Met) -> Tensor:
        ctx.save_for_backward(
            x.detach()
        )  # the memory that `enter` saved; with its history, a write has a murky message
        ctx.joint = joint = met.joint
        if not x.numel():  # the native kernels divide by its size
            return x.clone()
        return F.batch_norm(x, joint.mean, joint.var, met.weight, met.bias, eps=joint.eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise ModelError(
                "a gradient that can be differentiated again (create_graph=True) was asked for",
                "a batch norm over all micro-batches, whose gradient has no derivative here",
                "leave create_graph out, or put the model's batch norms into eval mode",
            )
        (x,), joint = ctx.saved_tensors, ctx.joint
        # With given statistics the native kernel's gradients of weight and bias are the two sums, made in one pass;
        # the weight that it asks for lends them its dtype only.
        if not x.numel():
            return grad, ctx.joint.mean.new_zeros(2, x.size(1)), None
        numbers = (joint.scale, joint.mean, joint.var, None, None, False, joint.eps)
        laid_out = grad.contiguous(memory_format=format_of(x))
        _, with_x, alone = torch.ops.aten.native_batch_norm_backward(laid_out, x, *numbers, [False, True, True])
        return grad, torch.stack((alone, with_x)), None
