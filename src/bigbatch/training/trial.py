"""Seeing is believing: a whole batch that a memory limit really refuses, and the same batch in micro-batches that fit.

A child process limits its own address space, so the refusal is the allocator's and nobody's arithmetic. The handwritten
digits are repeated until the batch is large beside what the allocator rounds and keeps.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bigbatch.accumulator import Accumulator
from bigbatch.errors import MicroBatchTooLarge
from bigbatch.fit.oom import is_out_of_memory
from bigbatch.recipes.digits import network, pictures

RECIPE = "digits"
SAMPLES = 8000  # the whole batch needs about 310 MiB, counted
BUDGET_MIB = 240  # far from that and from the 80 MiB of 2000 samples, so that no rounding of the allocator decides
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        samples: samples of the batch.
        budget_mib: what the child could use beside its imports, the model and the batch.
        refusal: the allocator's words to the whole batch.
        micro_batch_size: samples of the largest micro-batch of the step that fitted.
        retries: sizes that were tried before.
        why_not: why there is nothing to see; None where there is.
    """

    samples: int = SAMPLES
    budget_mib: int = BUDGET_MIB
    refusal: str | None = None
    micro_batch_size: int | None = None
    retries: int | None = None
    why_not: str | None = None

    def rows(self) -> dict[str, str]:
        """Names and values as a person reads them.

        >>> Trial(why_not="a memory limit needs Linux").rows()
        {'tried for real': 'not tried: a memory limit needs Linux'}
        """
        if self.why_not is not None:
            return {"tried for real": f"not tried: {self.why_not}"}
        batch = f"{self.samples} samples under a limit of {self.budget_mib} MiB"
        tries = "1 size" if self.retries == 1 else f"{self.retries} sizes"
        size = f"at most {self.micro_batch_size} samples after {tries} that did not fit"
        return {
            "tried for real, one whole batch": f"{batch}: {self.refusal}",
            "tried for real, automatic size": f"the same batch and limit: fitted, {size}",
        }

    def to_dict(self) -> dict[str, Any]:
        """The same for machines."""
        return dict(vars(self))


def tried(note: Callable[[str], None], samples: int = SAMPLES, budget_mib: int = BUDGET_MIB) -> Trial:
    """Tries both in a child process; whatever goes wrong there is told, and stops nobody.

    Args:
        note: called with a sentence when something begins or ends.
        samples: samples of the batch: the digits, repeated.
        budget_mib: MiB that the child may use for one step, beside what it holds before.
    """
    note(f"trying a batch of {samples} samples (the digits, repeated) for real under a limit of {budget_mib} MiB")
    trial = _tried(Trial(samples, budget_mib))
    for name, value in trial.rows().items():
        note(f"{name}: {value}")
    return trial


def _tried(trial: Trial) -> Trial:
    if platform.system() != "Linux":
        return replace(trial, why_not="a limit of a process's memory needs Linux")
    try:
        found = _in_a_child(trial)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return replace(trial, why_not=f"a child process ended oddly ({error})")
    if "refusal" not in found:
        return replace(trial, why_not="the limit was large enough for the whole batch")
    if "retries" not in found:
        return replace(trial, why_not="the limit was too small for the smallest micro-batch")
    return replace(trial, **found)


def _in_a_child(trial: Trial) -> dict[str, Any]:
    """What `steps_under_limit` found in a fresh process.

    Raises:
        OSError, subprocess.SubprocessError, ValueError: it could not be started, took too long, or said nothing.
    """
    code = f"from bigbatch.training.trial import child; child({trial.samples}, {trial.budget_mib})"
    # One thread and one arena: each further one would take address space that nobody counts.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, timeout=PATIENCE_S, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1] if done.stdout else "")
    return found


def child(samples: int, budget_mib: int) -> None:
    """What the child process does: two steps, and one line of JSON about them."""
    print(json.dumps(steps_under_limit(samples, budget_mib)))


def steps_under_limit(samples: int, budget_mib: int) -> dict[str, Any]:
    """One step at once by plain PyTorch, one with an automatic size, under a limit that stays with this process.

    Args:
        samples: samples of the batch.
        budget_mib: MiB beside what the process holds when model and batch are there.

    Returns:
        "refusal", the allocator's words, if the whole batch did not fit; "micro_batch_size" and "retries" if it did
        fit in micro-batches.
    """
    import resource

    torch.set_num_threads(1)
    data, _ = pictures()
    picked = torch.arange(samples) % len(data)
    inputs, targets = (tensor[picked] for tensor in data.tensors)
    model, loss_fn = network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn(model(inputs[:2]), targets[:2]).backward()  # what is loaded at a first step is loaded before the limit
    optimizer.step()
    optimizer.zero_grad()
    accumulator = Accumulator(model, loss_fn, micro_batch_size="auto")
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * os.sysconf("SC_PAGE_SIZE") + budget_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    found: dict[str, Any] = {}
    try:
        loss_fn(model(inputs), targets).backward()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        found["refusal"] = allocators_words(str(error))
    optimizer.zero_grad()
    with suppress(MicroBatchTooLarge):
        accumulator.backward(inputs, targets)
        optimizer.step()
    if accumulator.report is not None:
        found |= {name: getattr(accumulator.report, name) for name in ("micro_batch_size", "retries")}
    return found


def allocators_words(text: str) -> str:
    """The part of an allocator's error that a person can use.

    >>> allocators_words("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    ...     "you tried to allocate 65536000 bytes. Error code 12 (Cannot allocate memory)")
    "can't allocate memory: you tried to allocate 65536000 bytes"
    """
    line = (text.strip().splitlines() or ["no words"])[0]
    return line.split("DefaultCPUAllocator: ")[-1].split(". Error code")[0]
