"""Predicted peak memory is what the allocator gives: models of six kinds, in every way that applies to them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import plan_peaks
from bigbatch.planner import predict
from plan_models import CASES
from plan_peaks import OPTIMIZERS, Compared, compared, counted, ways_of

BY_NAME = {case.name: case for case in CASES}
CHOSEN = ("perceptron", "byte decoder, padded", "GroupNorm CNN", "LSTM", "normed perceptron", "two views")
SETTINGS = [(name, way) for name in CHOSEN for way in ways_of(BY_NAME[name])]
NEAR = 0.05


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Operators take work space for each thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def found(name: str, way: str, *optimizers: str) -> list[Compared]:
    """At the size that is farthest from those that the planner runs."""
    case = BY_NAME[name]
    return list(compared(case, way, ways_of(case)[way], case.sizes[-1:], optimizers or OPTIMIZERS))


@pytest.mark.parametrize(("name", "way"), SETTINGS)
def test_the_prediction_is_near_the_count(name: str, way: str) -> None:
    for one in found(name, way):
        assert abs(one.error) < NEAR, one
        assert one.counted <= one.accepted, one


def test_every_way_is_among_the_settings() -> None:
    assert {way for _, way in SETTINGS} == {"plain", "checkpointed", "recompute"}


def test_a_planner_that_forgets_gradients_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    right = predict.fixed_of

    def forgetful(job: Any, *options: Any) -> predict.Fixed:
        return replace(right(job, *options), gradients=0, gathered=0)

    for module in (predict, plan_peaks):
        monkeypatch.setattr(module, "fixed_of", forgetful)
    assert all(one.error < -NEAR for one in found("perceptron", "plain", "AdamW"))


def test_a_planner_that_forgets_what_operators_take_for_themselves_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict.Scratch, "of", lambda self, func, args, kwargs: (0, []))
    assert all(one.error < -NEAR for one in found("LSTM", "plain", "SGD"))


def test_a_way_that_was_not_run_misses() -> None:
    case = BY_NAME["byte decoder, padded"]
    ways = ways_of(case)
    checkpointed = counted(case, ways["checkpointed"], case.sizes[-1], "SGD")
    assert found(case.name, "plain", "SGD")[-1].predicted > (1 + NEAR) * checkpointed


def test_what_threads_take_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    case = BY_NAME["normed perceptron"]
    setting = case, ways_of(case)["plain"], case.sizes[-1], "SGD"
    all_of_it = counted(*setting)
    monkeypatch.setattr(plan_peaks, "counted_in_threads", nullcontext)
    assert counted(*setting) < (1 - NEAR) * all_of_it


def test_counts_repeat() -> None:
    case = BY_NAME["GroupNorm CNN"]
    setting = case, ways_of(case)["recompute"], case.sizes[0], "AdamW"
    assert counted(*setting) == counted(*setting)


def test_the_zoo_is_large_and_mixed() -> None:
    assert len(BY_NAME) == len(CASES) >= 24
    assert {case.kind for case in CASES} >= {"text", "vision", "audio", "recurrent", "batch norm", "contrastive"}
    assert not any({2, 4} & set(case.sizes) for case in CASES)  # sizes that the planner runs
