"""A run with a memory budget begins where a plan says that it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.fit.curve import planned
from bigbatch.fit.tune import Tuner
from bigbatch.recipes import load
from bigbatch.training.settings import decide
from bigbatch.training.setup import accelerator_for, first_and_last, prepared
from bigbatch.training.ways import job_of


@given(st.integers(1, 100), st.integers(0, 5000), st.integers(1, 300), st.integers(1, 500), st.integers(0, 40_000))
def test_the_first_size_is_the_largest_that_fits(slope: int, fixed: int, bend: int, samples: int, room: int) -> None:
    def predict(size: int) -> float:
        return max(fixed + slope * size, 2 * slope * (size - bend) + fixed + slope * bend)

    each, fixed_bytes = planned(predict, samples, room)
    size = Tuner.first(each, fixed_bytes).choose(samples, 1.0, room)
    fits = [size for size in range(1, samples + 1) if predict(size) <= room]
    assert predict(size) <= room or size == 1
    assert not fits or -(-samples // size) == -(-samples // max(fits))  # as few even pieces as fit


@pytest.mark.parametrize(("name", "memory"), [("digits", "6MiB"), ("stdlib-lm", "24MiB"), ("digit-pairs", "8MiB")])
def test_a_run_begins_within_its_budget_and_without_a_probe(
    name: str, memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(name, 0)
    settings = decide(recipe.defaults, {"memory": memory, "cpu": True})
    accelerator = accelerator_for(settings, tmp_path)
    job = job_of(recipe, accelerator.device)
    parts = prepared(recipe, settings, job, accelerator)
    sizer = parts.way.sizer
    assert sizer is not None and sizer.predict is not None
    seen: list[Any] = []
    monkeypatch.setattr("bigbatch.fit.sizer.course_of", lambda *given: seen.append(given))
    parts.way(*first_and_last(recipe, settings)[0])
    peak = sizer.tuner.seen[-1]
    assert not seen and peak.peak_bytes is not None
    assert abs(sizer.predict(peak.size) / peak.peak_bytes - 1) < 0.15
