"""What a plan foresees for a run with a memory budget: bytes of a batch at any micro-batch size."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bigbatch.planner.plan import base_of
from bigbatch.planner.predict import job_of, predicted
from bigbatch.planner.scratch import Scratch
from bigbatch.training.ways import Job, samples_of


def foreseen(job: Job, batch: tuple[Any, Any], autocast: torch.dtype | None) -> Callable[[int], float] | None:
    """`bytes(micro_batch_size)` of a batch beside weights, optimizer state and inputs; None where no plan can be made.

    Args:
        job: what is trained, with its own model and loss.
        batch: the first batch.
        autocast: the precision of the run.
    """
    reduction = "auto" if job.activations is not None else job.reduction
    try:
        planned = job_of(job.model, job.loss_fn, *batch, reduction=reduction)
        way, _ = base_of(planned, autocast, job.device.type == "cuda")
        if job.activations is not None:  # the recipe asks for the other door
            there = job.activations if job.device.type == "cuda" or job.activations == "recompute" else "keep"
            way = replace(way, engine="lockstep" if way.engine == "lockstep" else "joined", activations=there)
            planned = replace(planned, rule=None)
        # On the CPU a budget is counted tensor by tensor, without what operators take for themselves.
        prediction = predicted(planned, way, scratch=Scratch(None) if job.device.type == "cpu" else None)
    except Exception:  # the first size is then found by trying one sample
        return None
    samples, fixed = samples_of(batch), prediction.fixed

    def window(micro_batch_size: int) -> float:
        peak = prediction.at(micro_batch_size, math.ceil(samples / micro_batch_size))
        return peak.bytes - fixed.parameters - fixed.buffers - peak.kinds["inputs"]

    return window
