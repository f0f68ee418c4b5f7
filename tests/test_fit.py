"""The automatic size: simulated devices that refuse, errors that are or are not out of memory, budgets as written."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch.core.live import Live
from bigbatch.core.split import even_borders
from bigbatch.errors import OptionError
from bigbatch.fit import budget as budget_file
from bigbatch.fit.budget import budget_bytes
from bigbatch.fit.curve import Seen, carry, fitting_size
from bigbatch.fit.oom import free_cached, is_out_of_memory, let_go
from bigbatch.fit.tune import Tuner

CPU = torch.device("cpu")
BUDGET = 10**9
Fail = Callable[[Tuner, int, float], Tuner]


@dataclass(frozen=True)
class Device:
    """A card of 10**9 bytes: fixed + slope × size × cost**power, and a + b × size + c × size² seconds a piece."""

    samples: int
    fixed: float
    slope: float
    power: int
    a: float
    b: float
    c: float
    time_noise: float = 0.02
    memory_noise: float = 0.01

    def bytes_of(self, size: int, cost: float) -> float:
        return self.fixed + self.slope * size * cost**self.power

    def seconds_of(self, size: int) -> float:
        borders = even_borders(self.samples, size)
        sizes = [end - start for start, end in zip(borders, borders[1:], strict=False)]
        return sum(self.a + self.b * size + self.c * size**2 for size in sizes)

    def best_seconds(self, cost: float) -> float:
        """The fastest whole window among sizes that fit with three percent to spare."""
        sizes = {max(even_borders(self.samples, size)[1], 1) for size in range(1, self.samples + 1)}
        return min(self.seconds_of(s) for s in sizes if s == 1 or self.bytes_of(s, cost) <= 0.97 * BUDGET)


@dataclass
class Run:
    """What happened: the sizes that fitted, one a window, and the most tries in a row that did not fit."""

    sizes: list[int]
    failures: int
    worst_row: int
    tuner: Tuner


def simulate(
    device: Device,
    costs: list[float],
    tuner: Tuner,
    seed: int = 0,
    budget: int | None = BUDGET,
    counted: bool = True,
    fail: Fail = Tuner.failed,
) -> Run:
    """One window a cost; a size that exceeds the card is refused, and the window is tried again."""
    rng, run = random.Random(seed), Run([], 0, 0, tuner)
    for cost in costs:
        for row in range(30):
            size = run.tuner.choose(device.samples, cost, budget)
            assert 1 <= size <= device.samples and size == even_borders(device.samples, size)[1]
            peak = device.bytes_of(size, cost) * (1 + device.memory_noise * rng.uniform(-1, 1))
            if peak <= BUDGET or size == 1:  # one sample always fits in these tests
                break
            run.failures, run.worst_row = run.failures + 1, max(run.worst_row, row + 1)
            run.tuner = fail(run.tuner, size, cost)
        seconds = device.seconds_of(size) * (1 + device.time_noise * rng.uniform(-1, 1))
        run.tuner = run.tuner.measured(size, cost, seconds, device.samples, int(peak) if counted else None)
        run.sizes.append(size)
    return run


def reached(device: Device, run: Run, cost: float) -> float:
    """Samples a second after twenty windows (the median of seven), beside the best possible."""
    speeds = sorted(device.best_seconds(cost) / device.seconds_of(size) for size in run.sizes[20:27])
    return speeds[len(speeds) // 2]


@st.composite
def devices(draw: st.DrawFn) -> tuple[Device, float]:
    samples = draw(st.integers(1, 600))
    cost, power = draw(st.sampled_from([1.0, 10.0, 512.0])), draw(st.sampled_from([1, 2]))
    share, fitting = draw(st.floats(0.0, 0.8)), draw(st.floats(1.1, 2.0)) * samples ** draw(st.floats(0.0, 1.0))
    a, b = 10 ** draw(st.floats(-3, 0)), 10 ** draw(st.floats(-4, -1))
    c = draw(st.sampled_from([0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3]))
    slope = (1 - share) * BUDGET / fitting / cost**power
    return Device(samples, share * BUDGET, slope, power, a, b, c), cost


@given(devices(), st.integers(0, 10**6))
def test_reaches_the_best_speed_within_twenty_windows(drawn: tuple[Device, float], seed: int) -> None:
    device, cost = drawn
    run = simulate(device, [cost] * 27, Tuner(), seed)
    assert reached(device, run, cost) >= 0.95
    assert run.worst_row <= 1


@given(devices(), st.integers(0, 10**6))
def test_without_a_budget_failures_are_enough(drawn: tuple[Device, float], seed: int) -> None:
    device, cost = drawn
    run = simulate(device, [cost] * 27, Tuner(), seed, budget=None, counted=False)
    assert reached(device, run, cost) >= 0.9


@given(devices(), st.floats(0.4, 2.5), st.integers(0, 10**6))
def test_a_wrong_prediction_is_outgrown(drawn: tuple[Device, float], factor: float, seed: int) -> None:
    device, cost = drawn
    tuner = Tuner.first(device.bytes_of(1, cost) - device.fixed, device.fixed).choose  # the right one
    assert device.bytes_of(tuner(device.samples, cost, BUDGET), cost) <= BUDGET * 1.001 or device.samples == 1
    wrong = Tuner.first(factor * (device.bytes_of(1, cost) - device.fixed), 0.5 * device.fixed)
    run = simulate(device, [cost] * 27, wrong, seed)
    assert run.worst_row <= 1 or factor < 1
    assert reached(device, run, cost) >= 0.95


SLOW_START = Device(256, 0.1 * BUDGET, 0.9 * BUDGET / 100, 1, 0.1, 0.001, 0.0)


def test_a_tuner_that_never_learns_is_caught() -> None:
    assert simulate(SLOW_START, [1.0] * 27, Tuner(), budget=None, fail=lambda tuner, *_: tuner).worst_row > 1
    right = simulate(SLOW_START, [1.0] * 27, Tuner())
    assert reached(SLOW_START, right, 1.0) >= 0.95 and right.worst_row <= 1
    assert reached(SLOW_START, Run([16] * 27, 0, 0, Tuner()), 1.0) < 0.95  # the cautious start alone


@given(st.lists(st.integers(5, 60), min_size=30, max_size=60), st.sampled_from([1, 2]), st.integers(0, 10**6))
def test_lengths_that_change_never_fail_twice_in_a_row(lengths: list[int], power: int, seed: int) -> None:
    device = Device(64, 0.2 * BUDGET, 0.8 * BUDGET / 20 / 30**power, power, 0.01, 0.001, 0.0)
    run = simulate(device, [float(length) for length in lengths], Tuner(), seed)
    assert run.worst_row <= 1 and run.failures <= 3


def test_longer_samples_are_foreseen() -> None:  # B43: rows × length², length 10 for a hundred windows, then 30
    device = Device(64, 0.0, BUDGET / 3600, 2, 0.01, 0.001, 0.0, memory_noise=0.0)
    run = simulate(device, [10.0] * 100 + [30.0] * 20, Tuner())
    assert max(run.sizes[:100]) >= 32 and run.sizes[100] <= 4 and run.sizes[-1] in (3, 4) and run.failures == 0
    ignorant = simulate(device, [1.0] * 10, run.tuner.measured(32, 1.0, 1.0, 64, None))
    assert ignorant.sizes[-1] > 32  # short samples take more room back
    blind = simulate(device, [10.0] * 100 + [30.0] * 20, Tuner(), budget=None, counted=False)
    assert blind.failures >= 1 and blind.sizes[-1] <= 4


def test_the_state_of_the_optimizer_is_reserved() -> None:  # B41: 100 = 10 + 10 + 20 + 5 × 12
    assert Tuner.first(5, 10 + 10 + 20).choose(1000, 1.0, 100) == 12
    assert Tuner.first(5, 10 + 10).choose(1000, 1.0, 100) == 16  # forgotten: the first step would not fit
    assert Tuner.first(5, 40).choose(7, 1.0, 100) == 7  # never more than the batch has
    kept = Tuner.first(5, 40).measured(12, 1.0, 1.0, 12, 100).failed(20, 1.0)
    assert [item.size for item in kept.seen] == [12]  # the last good size is not thrown away


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_failure_changes_the_cut_and_not_the_batch(samples: int, fits: int) -> None:  # B42
    tuner, tries = Tuner(), []
    while (size := tuner.choose(samples, 1.0, None)) > fits:
        tries.append(size)
        tuner = tuner.failed(size, 1.0)
    assert all(later <= max(1, earlier // 2) for earlier, later in zip(tries, [*tries[1:], size], strict=False))
    assert even_borders(samples, size)[-1] == samples and size <= max(1, fits)


@given(st.integers(2, 300), st.integers(1, 300), st.integers(1, 4))
def test_a_failed_size_rests_and_rests_longer(samples: int, fits: int, rounds: int) -> None:
    fits = min(fits, samples - 1)
    tuner, refused = Tuner(), {}
    for window in range(60):
        while (size := tuner.choose(samples, 1.0, None)) > fits:
            since = [window - at for failed, at in refused.items() if failed <= size]
            assert all(gap >= 8 for gap in since)
            refused[size] = window
            tuner = tuner.failed(size, 1.0)
            assert max(tuner.failures, key=lambda item: item.window).wait < tuner.wait
        tuner = tuner.measured(size, 1.0, 1 / size, samples, None)


def test_it_settles() -> None:
    for seed in range(20):
        run = simulate(SLOW_START, [1.0] * 200, Tuner(), seed)
        changes = sum(a != b for a, b in zip(run.sizes[30:], run.sizes[31:], strict=False))
        assert changes <= 4
    tuner = run.tuner
    size = tuner.choose(256, 1.0, BUDGET)
    slow = tuner.measured(size, 1.0, 10 * SLOW_START.seconds_of(size), 256, None)
    assert slow.home == tuner.home  # one window that was slow by chance moves nothing


@given(devices(), st.integers(0, 20), st.integers(0, 10**6))
def test_the_record_travels_through_json(drawn: tuple[Device, float], windows: int, seed: int) -> None:
    device, cost = drawn
    tuner = simulate(device, [cost] * windows, Tuner.first(1000, 10), seed, budget=None).tuner.failed(3, cost)
    back = Tuner.from_dict(json.loads(json.dumps(tuner.to_dict())))
    assert back == tuner and back.choose(50, cost, BUDGET) == tuner.choose(50, cost, BUDGET)


def test_the_record_does_not_grow() -> None:
    tuner = Tuner()
    for length in range(1, 500):
        tuner = tuner.measured(8, float(length), 1.0, 8, length).failed(4, 1000.0 - length)
    assert len(tuner.seen) <= 64 and len(tuner.failures) <= 64


@given(st.floats(1, 1e3), st.floats(1, 1e3), st.floats(1, 100), st.sampled_from([1, 2]), st.floats(0, 0.9), st.data())
def test_memory_is_never_foreseen_too_low(
    cost: float, to: float, size: float, power: int, share: float, data: st.DataObject
) -> None:
    assert carry(size, cost, to) * to**power <= size * cost**power * (1 + 1e-9)
    slope, fixed = (1 - share) * BUDGET / 50 / cost**power, share * BUDGET
    sizes = data.draw(st.lists(st.integers(2, 40), min_size=1, max_size=4, unique=True))
    seen = [Seen(s, cost, 1.0, 1, fixed + slope * s * cost**power, 0) for s in sizes]
    found = fitting_size(seen, to, BUDGET, 0.0)
    assert found is not None and fixed + slope * found * to**power <= BUDGET * (1 + 1e-9)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: you tried to ..."),
    RuntimeError("[enforce fail] . DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
    MemoryError("Unable to allocate 7.45 GiB for an array"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`"),
    RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB, max allowed: 18.13 GB)"),
]
OTHERS = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    ValueError("CUDA out of memory"),
    KeyboardInterrupt("CUDA out of memory"),
]


def raised_from(outer: BaseException, inner: BaseException, explicit: bool) -> BaseException:
    try:
        try:
            raise inner
        except BaseException as error:
            raise outer from (error if explicit else None) if explicit else outer
    except BaseException as error:
        return error


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=str)
def test_out_of_memory_by_any_name(error: BaseException) -> None:  # B40
    assert is_out_of_memory(error)
    assert is_out_of_memory(raised_from(ValueError("layer 3"), raised_from(ValueError("x"), error, True), True))


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)
    assert not is_out_of_memory(raised_from(type(error)(*error.args), OUT_OF_MEMORY[0], False))


def test_the_cpu_allocator_itself() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_ring_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert not is_out_of_memory(one)
    let_go(one)


class Explodes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        held = grads[0] * ctx.saved_tensors[0]
        try:
            raise torch.OutOfMemoryError(f"CUDA out of memory {held.shape}")
        except RuntimeError as error:
            kept = error  # a frame that keeps its own error: a ring that only the collector would break
            raise RuntimeError("the second layer failed") from kept


def failing_try(model: nn.Module, x: Tensor) -> None:
    hidden = model(x)
    loss = Explodes.apply(hidden).square().sum()
    loss.backward()


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("free", [True, False])
def test_nothing_of_a_failed_try_is_alive(free: bool) -> None:  # B37
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), torch.randn(4, 8)
    diary: list[BaseException] = []
    with Live():
        model(x)  # the first operators of a process import modules, whose own knots only the collector unties
    with no_collector(), Live() as live:
        for _ in range(3):
            try:
                failing_try(model, x)
            except RuntimeError as error:
                diary.append(error)
                assert is_out_of_memory(error)
                if free:
                    let_go(error)
                    assert live.live_bytes == 0
        assert (live.live_bytes == 0) is free
    assert len(diary) == 3 and "second layer" in str(diary[0]) and isinstance(diary[0].__cause__, RuntimeError)


def test_an_error_that_the_caller_handles_keeps_its_traceback() -> None:
    def users(label: str) -> None:
        raise ValueError(label)

    try:
        users("the user's own")
    except ValueError as own:
        try:
            failing_try(nn.Linear(8, 8), torch.randn(4, 8))
        except RuntimeError as error:
            let_go(error)
        assert own.__traceback__ is not None and own.__traceback__.tb_next is not None
        assert own.__traceback__.tb_next.tb_frame.f_locals["label"] == "the user's own"


def test_budgets_as_people_write_them() -> None:
    assert budget_bytes("2GiB", CPU) == 2**31 and budget_bytes(1000, CPU) == 1000
    assert budget_bytes(None, CPU) is None and budget_bytes(None) is None
    whole = budget_bytes(1.0, CPU)
    assert whole is not None and whole > 2**27
    assert budget_bytes(0.5, CPU) == budget_bytes("0.5", CPU) == int(whole * 0.5)
    free_cached(CPU)


@pytest.mark.parametrize("memory", [0, -1, 0.0, 1.5, -0.5, float("nan"), "much", "0", "1.5", "0.0", True, "."])
def test_budgets_that_cannot_be_meant(memory: Any) -> None:
    with pytest.raises(OptionError, match="memory="):
        budget_bytes(memory, CPU)


def test_a_container_has_less_than_its_machine(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("4096\n")
    (tmp_path / "max").write_text("max\n")
    monkeypatch.setattr(budget_file, "CONTAINER_LIMITS", (tmp_path / "none", tmp_path / "max", tmp_path / "memory.max"))
    assert budget_bytes(0.5, CPU) == 2048
    with pytest.raises(OptionError, match="does not tell its size"):
        budget_bytes(0.5, torch.device("meta"))


@pytest.mark.gpu
def test_budgets_on_cuda() -> None:
    device = torch.device("cuda", 0)
    total = torch.cuda.mem_get_info(device)[1]
    free = budget_bytes(None, device)
    held = torch.zeros(2**26, dtype=torch.uint8, device=device)
    less = budget_bytes(None, device)
    assert free is not None and less is not None and 2**26 <= free - less <= 2**28 and free <= total
    del held
    assert 0.45 * total <= (budget_bytes(0.5, device) or 0) <= 0.55 * total
    free_cached(device)
