"""Counted live bytes equal sizes worked out by hand, and the allocator's own events."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from bigbatch.core.live import Live


def mlp() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.GELU())], nn.Linear(64, 4))


def step(model: nn.Module, x: Tensor) -> None:
    model(x).square().mean().backward()
    for parameter in model.parameters():
        parameter.grad = None


def test_what_autograd_keeps_is_counted() -> None:
    x = torch.randn(1000, requires_grad=True)
    with Live() as live:
        y = (x * 2).exp().sum()
        assert live.live_bytes == 4000 + 4  # the result of exp is saved, the product is not; one number for the sum
        assert live.peak_bytes == 8000
        live.reset_peak()
        assert live.peak_bytes == 4004
        y.backward()
        assert live.live_bytes == 4000 + 4  # exp is gone, x.grad has come
    x.grad = None
    assert live.live_bytes == 4  # a death after the block counts as well
    del y
    assert live.live_bytes == 0


def test_linear_layer_by_hand() -> None:
    model = nn.Linear(8, 3)
    with Live() as live:
        x = torch.zeros(5, 8)
        out = model(x)
        assert live.live_bytes == 4 * (5 * 8 + 5 * 3)
        out.backward(torch.ones(5, 3))
        assert live.live_bytes == 4 * (5 * 8 + 5 * 3 + 8 * 3 + 3)


def test_views_and_in_place_results_count_once() -> None:
    outside = torch.zeros(100)
    with Live() as live:
        outside.view(10, 10).t().add_(1)
        assert live.live_bytes == 0
        inside = torch.zeros(100)
        views = [inside[:50], inside.view(4, 25).add_(1), inside.detach()]
        assert live.live_bytes == 400
        del inside, views[1:]
        assert live.live_bytes == 400  # the last view keeps the whole storage
        del views
    assert live.live_bytes == live._known.__len__() == 0


def test_literals_are_born_inside() -> None:
    with Live() as live:
        kept = torch.tensor([1.0, 2.0, 3.0])
    assert live.live_bytes == kept.nbytes == 12


def test_a_storage_that_grows_or_shrinks() -> None:
    with Live() as live:
        x = torch.zeros(10)
        x.resize_(1000)
        assert live.live_bytes == 4000
        x.untyped_storage().resize_(0)
        x.set_(x.untyped_storage(), 0, (0,), (1,))  # the next operator that meets it
        assert live.live_bytes == 0 and live.peak_bytes == 4000


def test_agrees_with_the_allocator() -> None:
    model = mlp()
    step(model, torch.randn(512, 64))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step(model, torch.randn(512, 64))
    now = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    with Live() as live:
        step(model, torch.randn(512, 64))
    assert peak > 1_000_000 and live.peak_bytes == pytest.approx(peak, rel=0.02)
    with Live() as half:
        step(model, torch.randn(256, 64))
    assert half.peak_bytes != pytest.approx(peak, rel=0.02)


def test_predicted_without_computing() -> None:
    with Live() as real:
        step(mlp(), torch.randn(128, 64))
    with FakeTensorMode(), Live() as above:
        step(mlp(), torch.randn(128, 64))
    with Live() as below, FakeTensorMode():
        step(mlp(), torch.randn(128, 64))
    gc.collect()
    assert above.peak_bytes == below.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)


def test_checkpointed_micro_batches_need_less() -> None:
    model, x = mlp(), torch.randn(512, 64)
    with Live() as whole:
        step(model, x)
    cut = nn.Module()
    cut.forward = lambda x: torch.cat([checkpoint(model, piece, use_reentrant=False) for piece in x.split(64)])
    with Live() as pieces:
        step(cut, x)
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    assert pieces.peak_bytes < whole.peak_bytes / 3
    assert pieces.live_bytes == whole.live_bytes == 0


def test_no_growth_and_a_kept_tensor_is_seen() -> None:
    model, x, kept, peaks = mlp(), torch.randn(32, 64), [], set()
    with Live() as live:
        for _ in range(50):
            live.reset_peak()
            step(model, x)
            peaks.add(live.peak_bytes)
        assert live.live_bytes == 0 and len(peaks) == 1
        for times in range(1, 4):
            kept.append(model(x).detach())
            assert live.live_bytes == times * 32 * 4 * 4


@pytest.mark.filterwarnings("ignore:.*beta state", "ignore:.*prototype stage")
def test_sparse_nested_and_other_layouts() -> None:
    with Live() as live:
        sparse = torch.eye(4).to_sparse()
        assert live.live_bytes == 4 * (2 * 8 + 4)
        rows = torch.eye(4).to_sparse_csr() * 2
        assert live.live_bytes > 4 * (2 * 8 + 4) + 4 * (8 + 4)  # PyTorch keeps more than the indices it shows
        del sparse, rows
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]) * 2
        assert live.live_bytes == 6 * 3 * 4
        del nested
        jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
        before = live.live_bytes
        double = jagged * 2
        assert live.live_bytes == before + 6 * 3 * 4
        del jagged, double
        torch.ones(4, 4).to_mkldnn()
        torch.vmap(lambda row: row * 2)(torch.ones(4, 4))


def test_one_device_only() -> None:
    with Live(device="meta") as live, Live() as everything:
        kept = torch.ones(5), torch.ones(7, device="meta")
    assert live.live_bytes == kept[1].nbytes == 28
    assert everything.live_bytes == 48


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.booleans()), max_size=20))
def test_any_order_of_births_and_deaths(plan: list[tuple[int, bool]]) -> None:
    alive: list[Tensor] = []
    expected = []
    with Live() as live:
        for size, drop in plan:
            if drop and alive:
                alive.pop(size % len(alive))
            else:
                alive.append(torch.zeros(size))
            expected.append(sum(x.nbytes for x in alive))
            assert live.live_bytes == expected[-1]
    assert live.peak_bytes == max(expected, default=0)
