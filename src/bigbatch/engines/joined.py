"""The outputs of all micro-batches, joined: behind checkpoints, or behind one node that adds up gradients itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.batch import Batch
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.sums import is_low
from bigbatch.engines import recompute, replayed
from bigbatch.engines.again import Tries


def outputs(
    batch: Batch,
    forward: Callable[[Piece], Any],
    parameters: Sequence[Tensor],
    splitter: Splitter,
    *,
    activations: str,
    kept: int,
    check: Callable[[Any], None] | None,
    grad_dtype: torch.dtype | None,
    tries: Tries | None = None,
    by_sample: bool = False,
) -> Any:
    """Arguments as in `replayed.run`; with `tries`, a backward that runs out of memory is tried again.

    Where gradients of low-precision parameters are to be added up in float32, autograd cannot be left to do it: one
    backward through many micro-batches adds them up in the dtype that the parameter takes.
    """
    low = any(p.requires_grad and is_low(p) and p.grad_dtype == p.dtype for p in parameters)
    in_float32 = grad_dtype is None and low and len(batch.pieces) > 1
    if torch.is_grad_enabled() and (in_float32 or tries is not None):
        tries = tries or Tries()
        return replayed.run(
            *(batch, forward, parameters, splitter, tries),
            activations=activations,
            kept=kept,
            check=check,
            by_sample=by_sample,
        )
    return recompute.run(batch, forward, activations, kept, check)
