"""Sharding over ranks, by arithmetic: each rank holds its share, and gathers one block's weights at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from bigbatch.core.models import inner_modules, parameters_of
from bigbatch.engines.blocks import repeated_blocks
from bigbatch.planner.ladder import Step
from bigbatch.planner.ledger import bytes_of_all
from bigbatch.planner.trace import Job

SHARDING = ("optimizer", "gradients", "full")  # stages 1, 2 and 3 of ZeRO (Rajbhandari et al., 2020)
GATHERED = 2  # blocks whose weights are whole at once: the one that runs and the next


def sharded(step: Step, job: Job, ranks: int, sharding: str) -> Step:
    """A step with its fixed bytes shared between ranks. bigbatch refuses to run it until it supports several processes.

    Gradients are gathered over the window, so they are shared from stage 2 on; the weights of two blocks are whole.
    """
    fixed, stage = step.prediction.fixed, 1 + SHARDING.index(sharding)
    whole = largest_block(job.inner) * GATHERED if stage == 3 else 0
    shared = replace(
        fixed,
        parameters=fixed.parameters // ranks + whole if stage == 3 else fixed.parameters,
        gradients=fixed.gradients // ranks if stage > 1 else fixed.gradients,
        gathered=fixed.gathered // ranks if stage > 1 else fixed.gathered,
        state=fixed.state // ranks,
        step=fixed.step // ranks,
    )
    share = 1 / ranks if stage > 1 else 1.0
    prediction = replace(step.prediction, fixed=shared, gradient_share=share)
    return replace(step, name=f"sharded over {ranks} ranks ({sharding})", prediction=prediction, door="fully_shard")


def largest_block(inner: Sequence[nn.Module]) -> int:
    """Bytes of the weights that are gathered at once: the largest repeated block's, or all."""
    blocks = repeated_blocks(inner)
    sizes = [bytes_of_all(parameters_of(inner_modules([block]))) for block in blocks]
    return max(sizes, default=bytes_of_all(parameters_of(inner)))
