"""What every test stands on: one thread a worker, seeded draws, and a GPU only where there is one."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, settings

if "PYTEST_XDIST_WORKER" in os.environ:  # Workers that each start a thread a core only wait for one another.
    torch.set_num_threads(1)


class TorchDraws:
    """Torch's generator in the form that hypothesis seeds before every example."""

    def seed(self, value: int) -> None:
        torch.manual_seed(value)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


torch_draws = TorchDraws()  # hypothesis keeps a weak reference only
hypothesis.register_random(torch_draws)
settings.register_profile(
    "bigbatch",
    deadline=None,
    max_examples=50,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],  # a busy machine is no fault of a test
)
settings.load_profile("bigbatch")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Every test draws the same numbers, alone or in company."""
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Skip what is marked `gpu` where CUDA is missing."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
