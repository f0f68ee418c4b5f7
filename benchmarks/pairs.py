"""Two ways of doing the same, timed in turn on a noisy machine: the ratio of neighbours, and the median of ratios."""

from __future__ import annotations

import gc
import json
import multiprocessing
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def paired(ours: Callable[[], object], theirs: Callable[[], object], pairs: int, inner: int = 1) -> list[float]:
    """Time of ours / time of theirs, `pairs` times, in an order that alternates; `inner` calls make one timing."""
    for _ in range(3):
        ours(), theirs()
    ratios = []
    gc.collect()
    gc.disable()  # a collection falls on one side of a pair only
    try:
        for turn in range(pairs):
            order = (ours, theirs) if turn % 2 == 0 else (theirs, ours)
            first, second = (_seconds(function, inner) for function in order)
            ratios.append(first / second if turn % 2 == 0 else second / first)
    finally:
        gc.enable()
    return ratios


def _seconds(function: Callable[[], object], inner: int) -> float:
    start = time.perf_counter()
    for _ in range(inner):
        function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def in_fresh_processes(run: Callable[[str], float], name: str, runs: int = 7) -> list[float]:
    """`run(name)` in several processes, one after the other: where memory happens to lie is settled once a process,
    and moves a ratio of small networks by several hundredths."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        return list(pool.map(run, [name] * runs))


def write(name: str, what: str, figures: dict[str, Any]) -> dict[str, Any]:
    """One figure as one JSON, with the machine that it was measured on."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine() + " CPU"
    record = {"figure": name, "what": what, "device": device, "torch": torch.__version__.split("+")[0], **figures}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items() if not isinstance(value, list)))
    return record
