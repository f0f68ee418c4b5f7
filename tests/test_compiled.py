"""torch.compile x both doors x randomness="by_sample" x grad_dtype: equal to the model as it was written."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, MicroBatched
from bigbatch.core import by_sample
from bigbatch.core.by_sample import BySample
from bigbatch.core.compiled import runs_uncompiled, uncompiled
from bigbatch.engines import replay

BF16, FP32 = torch.bfloat16, torch.float32
N = 12
needs_compiler = pytest.mark.skipif(
    shutil.which("c++") is None or sys.platform == "win32", reason="the inductor makes C++ and needs a compiler for it"
)
DOORS: list[Any] = [
    pytest.param("door 1", {}, id="door 1"),
    *(pytest.param("door 2", {"activations": how}, id=f"door 2, {how}") for how in ("recompute", "offload", "keep")),
]


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Network(nn.Module):
    """Its forward is no code that other tests compile."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.one, self.drop, self.two = nn.Linear(8, 16), nn.Dropout(p), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.drop(self.one(x).relu()))


def network(dtype: torch.dtype, p: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return Network(p).to(dtype)


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(N, 8, generator=generator).to(dtype), torch.randn(N, 4, generator=generator).to(dtype)


def gradient(model: nn.Module, door: str, size: int, dtype: torch.dtype, times: int = 1, **options: Any) -> Tensor:
    """That of the last of some batches; each begins with the same seed."""
    inputs, targets = batch(dtype)
    accumulator = Accumulator(model, nn.MSELoss(), micro_batch_size=size, **options) if door == "door 1" else None
    wrapped = MicroBatched(model, size, **options) if door == "door 2" else None
    for _ in range(times):
        model.zero_grad()
        torch.manual_seed(5)
        if accumulator is not None:
            accumulator.backward(inputs, targets)
        else:
            F.mse_loss(wrapped(inputs), targets).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def off(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).norm() / other.double().norm())


class Runs:
    """A backend that counts how often what it compiled is run."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, _: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            self.count += 1
            return graph.forward(*args)

        return run


WAYS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "model": lambda model, backend: torch.compile(model, backend=backend),
    "full graph": lambda model, backend: torch.compile(model, backend=backend, fullgraph=True),
    "in place": lambda model, backend: (model.compile(backend=backend), model)[1],
    "a part": lambda model, backend: (setattr(model, "drop", torch.compile(model.drop, backend=backend)), model)[1],
}


@pytest.mark.parametrize(
    ("way", "backend"), [pytest.param("model", "inductor", marks=needs_compiler), *((way, "eager") for way in WAYS)]
)
@pytest.mark.parametrize(("door", "options"), DOORS[:2])
def test_numbers_by_sample_are_those_of_the_whole_batch(
    door: str, options: dict[str, Any], way: str, backend: str
) -> None:
    whole = gradient(network(torch.float64, 0.5), door, N, torch.float64, randomness="by_sample", **options)
    model = WAYS[way](network(torch.float64, 0.5), backend)
    model(batch(torch.float64)[0])  # compiled before, with numbers that nobody sees
    with pytest.warns(UserWarning, match="compiled model"):
        found = gradient(model, door, 5, torch.float64, times=2, randomness="by_sample", **options)
    assert off(found, whole) < 1e-12


def test_numbers_that_the_compiled_code_draws_are_caught() -> None:
    """Sabotage: by_sample as it would be around compiled code whose operators it did not see."""
    whole = gradient(network(torch.float64, 0.5), "door 1", N, torch.float64, randomness="by_sample")
    found = gradient(network(torch.float64, 0.5), "door 1", 5, torch.float64)
    assert off(found, whole) > 1e-2


def test_a_model_that_ran_by_sample_is_compiled_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch never compiles what it has once met under a dispatch mode; without `uncompiled` it would meet it."""
    runs = Runs()
    for sabotaged in (False, True):
        torch.compiler.reset()
        model, runs.count = torch.compile(network(torch.float64, 0.5), backend=runs), 0
        if sabotaged:
            monkeypatch.setattr(by_sample, "uncompiled", contextlib.nullcontext)
        with BySample(0, 0, N):
            model(batch(torch.float64)[0])
        assert runs.count == 0
        model(batch(torch.float64)[0])
        assert runs.count == (0 if sabotaged else 1)


@pytest.mark.parametrize("backend", [pytest.param("inductor", marks=needs_compiler), "eager"])
@pytest.mark.parametrize("grad_dtype", [FP32, None])
@pytest.mark.parametrize(("door", "options"), DOORS)
def test_gradients_add_up_in_float32(
    door: str, options: dict[str, Any], grad_dtype: torch.dtype | None, backend: str
) -> None:
    model = network(BF16)
    exact = gradient(network(torch.float64), "door 1", N, torch.float64)
    ways = [gradient(network(BF16), door, 1, BF16, times=2, grad_dtype=grad_dtype, **options)]
    ways.append(gradient(torch.compile(model, backend=backend), door, 1, BF16, 2, grad_dtype=grad_dtype, **options))
    assert {p.grad.dtype for p in model.parameters()} == {grad_dtype or BF16}
    plain, found = (off(way, exact) for way in ways)
    assert found < 1.5 * plain + 1e-3
    assert plain < 0.02


@pytest.mark.parametrize("dtype", [FP32, torch.float64])
def test_the_first_backward_of_a_compiled_model(dtype: torch.dtype) -> None:
    """The first forward runs as it was written, on the lookout for batch norms; so does its second forward."""
    expected = gradient(network(dtype), "door 1", N, dtype)
    found = gradient(torch.compile(network(dtype), backend="aot_eager"), "door 2", 5, dtype)
    assert off(found, expected) < (1e-5 if dtype == FP32 else 1e-12)


def test_a_second_forward_that_is_compiled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sabotage: compiled code saves other tensors for its backward."""
    monkeypatch.setattr(replay, "runs_uncompiled", lambda: False)
    with pytest.raises(torch.utils.checkpoint.CheckpointError):
        test_the_first_backward_of_a_compiled_model(FP32)


def test_blocks_of_two_threads_may_overlap() -> None:
    """The last one to be left makes PyTorch compile again, whichever came first."""
    runs = Runs()
    function = torch.compile(lambda x: x * 2 + 1, backend=runs)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with uncompiled():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with uncompiled():
        thread.start()
        assert inside.wait(10)
    assert runs_uncompiled()
    function(torch.ones(2))
    assert runs.count == 0
    leave.set()
    thread.join()
    assert not runs_uncompiled()
    function(torch.ones(2))
    assert runs.count == 1


def test_an_error_ends_it() -> None:
    runs = Runs()
    function = torch.compile(lambda x: x * 3 - 1, backend=runs)
    with pytest.raises(ValueError, match="planted"), uncompiled():
        raise ValueError("planted")
    function(torch.ones(2))
    assert runs.count == 1 and not runs_uncompiled()


def test_the_notice_is_given_once() -> None:
    model = torch.compile(network(torch.float64, 0.5), backend="eager")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        gradient(model, "door 1", 5, torch.float64, times=3, randomness="by_sample")
    assert sum("compiled model" in str(one.message) for one in told) == 1
