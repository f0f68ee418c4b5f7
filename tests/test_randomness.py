"""randomness="by_sample" behind both doors: one gradient, whatever the split, the engine, a retry, a second forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, MicroBatched, verify, windows
from bigbatch.core import sample_numbers
from bigbatch.errors import OptionError

N, T, D = 24, 5, 8


class Noisy(nn.Module):
    """Drops whole samples and adds noise, as stochastic depth and diffusion models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.empty(len(x), 1, 1, dtype=x.dtype).bernoulli_(0.7)
        return x + kept * self.layer(x + 0.1 * torch.randn_like(x)).tanh()


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 16, dropout=0.3, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(D, 3))


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(T * D, 12),
        nn.BatchNorm1d(12),
        nn.Dropout(0.4),
        nn.Linear(12, 3 * T),
        nn.Unflatten(1, (T, 3)),
    )


def noisy() -> nn.Module:
    return nn.Sequential(Noisy(), Noisy(), nn.Dropout1d(0.2), nn.Linear(D, 3))


MODELS = [transformer, normed, noisy]


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().double()


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    numbers = {"generator": generator, "dtype": torch.float64}
    return torch.randn(N, T, D, **numbers), torch.randn(N, T, 3, **numbers)


def unknown(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(outputs, targets)


def gradient(build: Callable[[], nn.Module], way: str, size: Any, **options: Any) -> Tensor:
    """The gradient of one batch with the same seed before it; `options` are those of the door."""
    model, (inputs, targets) = made(build), batch()
    options = {"randomness": "by_sample", **options}
    torch.manual_seed(5)
    if way == "sequential":
        Accumulator(model, nn.MSELoss(), micro_batch_size=size, **options).backward(inputs, targets)
    elif way == "joint":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            Accumulator(model, unknown, micro_batch_size=size, **options).backward(inputs, targets)
    else:
        activations = {} if size == "auto" else {"activations": way}
        unknown(MicroBatched(model, size, **activations, **options)(inputs), targets).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def same(found: Tensor, wanted: Tensor) -> bool:
    return bool((found - wanted).norm() <= 1e-12 * wanted.norm())


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("way", ["sequential", "joint", "recompute", "offload", "keep"])
def test_the_gradient_does_not_depend_on_the_split(build: Callable[[], nn.Module], way: str) -> None:
    whole = gradient(build, "sequential", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # everything is followed
        for size in (1, 3, 7, 16, N):
            assert same(gradient(build, way, size), whole), size


@pytest.mark.parametrize("build", [transformer, noisy])
def test_global_numbers_do_depend_on_it(build: Callable[[], nn.Module]) -> None:
    """The sabotage: without the option another split is another gradient."""
    whole = gradient(build, "sequential", None, randomness="global")
    assert not same(gradient(build, "sequential", 3, randomness="global"), whole)


def test_numbers_that_forget_the_place_of_the_sample_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = sample_numbers.Numbers
    monkeypatch.setattr("bigbatch.core.by_sample.Numbers", lambda seed, place, first, n: numbers(seed, place, 0, n))
    assert not same(gradient(transformer, "sequential", 3), gradient(transformer, "sequential", None))


@pytest.mark.parametrize("way", ["sequential", "joint", "recompute"])
@pytest.mark.parametrize("build", MODELS)
def test_a_retry_draws_the_same(build: Callable[[], nn.Module], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, linear, failures = gradient(build, "sequential", None), F.linear, 0

    def refused(x: Tensor, *rest: Any) -> Tensor:
        nonlocal failures
        if torch.is_grad_enabled() and len(x) > N // 3:
            failures += 1
            raise torch.OutOfMemoryError("injected")
        return linear(x, *rest)

    monkeypatch.setattr(F, "linear", refused)
    assert same(gradient(build, way, "auto"), whole) and failures


def test_windows_and_seeds() -> None:
    """A window's micro-batches are numbered through; the seed follows the global generator, which moves once."""
    inputs, targets = batch()
    delivered = list(zip(inputs.split((10, 9, 5)), targets.split((10, 9, 5)), strict=True))
    (window,) = windows(delivered, accum_steps=3)
    model = made(transformer)
    whole = gradient(transformer, "sequential", None)
    after = torch.rand(1)
    torch.manual_seed(5)
    accumulator = Accumulator(model, nn.MSELoss(), micro_batch_size=4, randomness="by_sample")
    accumulator.backward(window)
    assert torch.equal(torch.rand(1), after)
    first = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    assert same(first, whole)
    model.zero_grad()
    accumulator.backward(window)  # another batch has other masks
    assert not same(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]), whole)


def test_what_cannot_be_followed_is_named_once() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(D, 3), torch.Generator()

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x + torch.rand(x.shape, generator=self.generator, dtype=x.dtype))

    accumulator = Accumulator(made(Own), nn.MSELoss(), micro_batch_size=4, randomness="by_sample")
    with pytest.warns(UserWarning, match="aten::rand.*handed") as caught:
        for _ in range(2):
            accumulator.backward(*batch())
    assert len(caught) == 1


def test_an_unknown_option_is_refused() -> None:
    for make in (lambda: Accumulator(nn.Linear(1, 1), nn.MSELoss(), randomness="dice"),
                 lambda: MicroBatched(nn.Linear(1, 1), 2, randomness="dice")):  # fmt: skip
        with pytest.raises(OptionError, match="by_sample"):
            make()


@pytest.mark.parametrize("build", MODELS)
def test_a_proof_of_numbers_by_sample(build: Callable[[], nn.Module]) -> None:
    model, (inputs, targets) = made(build), batch()
    options = {"micro_batch_size": 5, "randomness": "by_sample"}
    verdict = verify(model, nn.MSELoss(), inputs, targets, **options)
    assert verdict.equal and not verdict.notes, str(verdict)
    wrapped = MicroBatched(copy.deepcopy(model), 5, randomness="by_sample")
    assert verify(wrapped, unknown, inputs, targets).equal
    wrong = verify(model, nn.MSELoss(), inputs, targets[:, :, :1].expand(-1, -1, 3) * 2, reduction="sum", **options)
    assert not wrong.equal
