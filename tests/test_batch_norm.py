"""Batch norm over the whole batch: micro-batches give its gradient and move its statistics as one forward does."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import architectures
import laws
import norm_architectures
import norm_models
from bigbatch import Accumulator, MicroBatched
from bigbatch.core.batch_norm import BATCH_NORM
from bigbatch.errors import BigBatchError, ModelError
from laws import Case, N, Result
from norm_architectures import ARCHITECTURES, SAMPLES
from norm_models import BY_NAME, C, D, H, around, gradient_error, network, norm, plain, rows

GRADIENT, BUFFER, OFF = 1e-10, 1e-12, 1e-3  # relative
WAYS = ("sequential", "joint", "recompute")
SIZES = {"sequential": 2, "recompute": 3}  # of five samples: 2 + 2 + 1 and 3 + 2
UNTIED = "standardised weights"  # plain accumulation is right here
OWN = ["ResNet", "RegNet", "MobileNetV1", "MobileNetV2", "EfficientNet", "LeViT", "MobileViT", "CvT", "SwiftFormer",
       "TextNet", "HGNetV2", "SegFormer"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share out a handful of numbers only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def in_double() -> Iterator[None]:
    with architectures.in_double():
        yield


@functools.cache
def expected_of(name: str) -> Result:
    case = norm_architectures.CASES[name]
    return laws.whole_batch(case, laws.made(case), laws.batch_of(case))


def assert_same(found: Result, expected: Result) -> None:
    """The loss, the gradient as a whole and each weight's that is no mere rounding, every buffer; counts are equal."""
    assert abs(float(found.loss - expected.loss)) <= GRADIENT * abs(float(expected.loss))
    without = [name for name, gradient in expected.gradients.items() if gradient is None]
    assert without == [name for name, gradient in found.gradients.items() if gradient is None]
    assert gradient_error(found, expected) <= GRADIENT
    given = {name: gradient for name, gradient in expected.gradients.items() if gradient is not None}
    largest = max(gradient.norm().item() for gradient in given.values())
    for name, gradient in given.items():
        apart, size = (found.gradients[name] - gradient).norm().item(), gradient.norm().item()
        assert apart <= GRADIENT * max(size, 1e-3 * largest), f"{name} is off by {apart:.3e} of {size:.3e}"
    assert found.buffers.keys() == expected.buffers.keys()
    for name, buffer in expected.buffers.items():
        if not buffer.is_floating_point():
            assert torch.equal(found.buffers[name], buffer), f"{name} is {found.buffers[name]}, not {buffer}"
        elif buffer.numel():  # a mean may be nothing but rounding, beside a variance of one
            apart = (found.buffers[name] - buffer).abs().max().item()
            assert apart <= BUFFER * max(1.0, buffer.abs().max().item()), f"{name} is off by {apart:.3e}"


def run(case: Case, way: str, size: int) -> Result:
    return laws.micro_batches(case, laws.made(case), laws.batch_of(case), way, size)


# --- Real architectures


def test_there_are_enough_architectures() -> None:
    assert len(ARCHITECTURES) >= 60


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_are_in_training_mode_and_nothing_is_dropped(name: str) -> None:
    modules = [*norm_architectures.built(name)[0].modules()]
    assert any(isinstance(module, BATCH_NORM) and module.training for module in modules)
    assert all(module.p == 0 for module in modules if isinstance(module, nn.modules.dropout._DropoutNd))


@pytest.mark.parametrize("way", SIZES)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_equals_its_whole_batch(name: str, way: str, in_double: None) -> None:
    assert_same(run(norm_architectures.CASES[name], way, SIZES[way]), expected_of(name))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_plain_accumulation_is_far_off(name: str, in_double: None) -> None:
    assert gradient_error(plain(norm_architectures.CASES[name], 3), expected_of(name)) > OFF


@pytest.mark.parametrize("name", OWN)
def test_a_model_that_returns_its_own_loss(name: str, in_double: None) -> None:
    chosen, inputs, outputs = norm_architectures.built(name)
    model = copy.deepcopy(chosen.model)
    size = outputs[0].shape[2:]  # none, or those of a picture
    labels = torch.randint(0, architectures.CLASSES, (SAMPLES, *(4 * side for side in size)))
    if size:
        labels[0, 3:], labels[2, :, 9:] = 255, 255
    batch = {**inputs, "labels": labels}
    before = copy.deepcopy(model.state_dict())
    loss, expected = architectures.whole_batch(model, batch)
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(before)
    found = Accumulator(model, None, micro_batch_size=2).backward(batch)
    assert abs(float(found - loss)) <= GRADIENT * abs(float(loss))
    assert architectures.distance(architectures.gradients(model), expected) <= GRADIENT
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, after[key], rtol=BUFFER, atol=BUFFER, msg=key)


# --- Awkward models


def pairs() -> list[tuple[str, str]]:
    return [(case.name, way) for case in norm_models.CASES for way in case.ways_to_run() if way in WAYS]


@pytest.mark.parametrize(("name", "way"), pairs())
def test_a_model_equals_its_whole_batch(name: str, way: str) -> None:
    laws.equals_the_whole_batch(BY_NAME[name], way, (1, 3, 4, N))


@pytest.mark.parametrize("way", ["sequential", "joint"])
@pytest.mark.parametrize("name", ["images", "average over all batches", "U-Net", "tokens without padding"])
def test_a_window_is_one_batch(name: str, way: str) -> None:
    laws.equals_the_whole_batch_in_windows(BY_NAME[name], way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["images", "average over all batches", "shared by two places", "functional"])
def test_statistics_move_once_a_batch(name: str, way: str) -> None:
    laws.buffers_move_once(BY_NAME[name], way)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name != UNTIED])
def test_plain_accumulation_is_far_off_here_too(name: str) -> None:
    case = BY_NAME[name]
    expected, _ = laws.expected_of(case, laws.batch_of(case))
    assert gradient_error(plain(case, 3), expected) > max(OFF, 1.5 * case.tolerance)


@pytest.mark.parametrize("name", ["images", "Siamese"])
def test_errors_stand_beside_each_other(name: str) -> None:
    ours, by_hand = norm_models.errors(BY_NAME[name])
    assert ours <= GRADIENT and by_hand > OFF


def test_samples_that_weights_alone_tie_are_left_as_they_are() -> None:
    ours, by_hand = norm_models.errors(BY_NAME[UNTIED])
    assert ours <= BUFFER and by_hand <= BUFFER


@pytest.mark.filterwarnings("ignore:batch_norm='local'")
def test_statistics_of_a_micro_batch_are_caught() -> None:
    case = BY_NAME["images"]
    job = laws.made(case)
    door = Accumulator(job.model, job.loss_fn, micro_batch_size=4, batch_norm="local")
    found = laws.left(job, door.backward(*laws.batch_of(case)))
    expected, _ = laws.expected_of(case, laws.batch_of(case))
    with pytest.raises(AssertionError):
        assert_same(found, expected)


@pytest.mark.parametrize("spoilt", ["gradient", "mean", "count"])
def test_the_comparison_notices(spoilt: str) -> None:
    case = BY_NAME["images"]
    expected, _ = laws.expected_of(case, laws.batch_of(case))
    found = copy.deepcopy(expected)
    assert_same(found, expected)
    if spoilt == "gradient":
        found.gradients["0.1.weight"] *= 1 + 1e-9
    elif spoilt == "mean":
        found.buffers["0.1.running_mean"] += 1e-11
    else:
        found.buffers["0.1.num_batches_tracked"] += 1
    with pytest.raises(AssertionError):
        assert_same(found, expected)


# --- A user's own loop


def grads(*models: nn.Module) -> list[Tensor | None]:
    return [p.grad for model in models for p in model.parameters()]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def in_float64(make: Callable[[], nn.Module]) -> nn.Module:
    with laws.in_float64(1):
        return make()


def test_a_step_of_a_discriminator_and_of_a_generator() -> None:
    """Two batches through the same norms, one after the other, and a generator with norms of its own behind them."""
    judge, maker = (in_float64(network(norm(1), nn.LeakyReLU)) for _ in range(2))
    real, noise = (torch.randn(N, D, dtype=torch.float64) for _ in range(2))

    def step(judge: Any, maker: Any) -> None:
        made = F.pad(maker(noise), (0, D - C))
        (F.softplus(-judge(real)[:, 0]).mean() + F.softplus(judge(made.detach())[:, 0]).mean()).backward()
        F.softplus(-judge(made)[:, 0]).mean().backward()

    plain_models = copy.deepcopy((judge, maker))
    step(*plain_models)
    step(MicroBatched(judge, 3), MicroBatched(maker, 4))
    close(grads(judge, maker), grads(*plain_models))
    close([*judge.buffers(), *maker.buffers()], [b for model in plain_models for b in model.buffers()])


def test_inputs_that_require_a_gradient_get_it() -> None:
    case = BY_NAME["images"]
    job, inputs = laws.made(case), laws.batch_of(case)[0].requires_grad_()
    (expected,) = torch.autograd.grad(job.model(inputs).std(0).sum(), inputs)
    (found,) = torch.autograd.grad(MicroBatched(job.model, 3)(inputs).std(0).sum(), inputs)
    close(found, expected)


def test_a_plain_function_as_the_model() -> None:
    model = in_float64(network(norm(1), nn.Tanh))
    inputs, targets = torch.randn(N, D, dtype=torch.float64), torch.randint(0, C, (N,))

    def training_step(inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(model(inputs), targets)

    expected = copy.deepcopy(model)
    F.cross_entropy(expected(inputs), targets).backward()
    Accumulator(training_step, None, micro_batch_size=3, reduction="mean").backward((inputs, targets))
    close(grads(model), grads(expected))
    close([*model.buffers()], [*expected.buffers()])


def test_no_gradient_is_asked_for() -> None:
    """Statistics alone, as when they are measured again after weights were averaged."""
    model = in_float64(network(norm(1, momentum=None), nn.Tanh))
    expected, inputs = copy.deepcopy(model), torch.randn(N, D, dtype=torch.float64)
    with torch.no_grad():
        close(MicroBatched(model, 3)(inputs), expected(inputs))
    close([*model.buffers()], [*expected.buffers()])


def test_frozen_layers_stay_as_they_are() -> None:
    model = in_float64(network(norm(1), nn.Tanh, norm(1))).eval()
    before = [buffer.clone() for buffer in model.buffers()]
    inputs, targets = torch.randn(N, D, dtype=torch.float64), torch.randint(0, C, (N,))
    expected = copy.deepcopy(model)
    F.cross_entropy(expected(inputs), targets).backward()
    Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    close(grads(model), grads(expected))
    assert all(torch.equal(*pair) for pair in zip(model.buffers(), before, strict=True))


# --- What may be refused, but never be wrong in silence


def checkpointed(model: Any, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda h: model.norm(h).tanh(), x, use_reentrant=reentrant)


def sparse(model: Any, x: Tensor) -> Tensor:
    """Ends in `torch.batch_norm`, which `torch.nn.functional` would have called."""
    layer = model.norm
    weights = (layer.weight, layer.bias, layer.running_mean, layer.running_var)
    return torch.batch_norm(x, *weights, True, 0.1, layer.eps, False).tanh()


def scripted() -> nn.Module:
    return torch.jit.script(network(norm(1), nn.Tanh)())


DOUBTFUL = {
    "a checkpoint around it": around(lambda m, x: checkpointed(m, x, False), norm=norm(1)),
    "a reentrant checkpoint around it": around(lambda m, x: checkpointed(m, x, True), norm=norm(1)),
    "torch.batch_norm": around(sparse, norm=norm(1)),
    "a scripted model": scripted,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DOUBTFUL)
def test_right_or_refused(name: str, way: str) -> None:
    case = Case(name, DOUBTFUL[name], rows, nn.CrossEntropyLoss)
    expected, _ = laws.expected_of(case, laws.batch_of(case))
    try:
        found = run(case, way, 3)
    except BigBatchError:
        return
    assert_same(found, expected)


def test_a_second_derivative_is_right_or_refused() -> None:
    model = in_float64(network(norm(1), nn.Tanh))
    inputs = torch.randn(N, D, dtype=torch.float64, requires_grad=True)

    def penalty(forward: Any) -> list[Tensor | None]:
        (slope,) = torch.autograd.grad(forward(inputs).sin().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        return grads(model)

    expected = penalty(model)
    model.zero_grad()
    try:
        found = penalty(MicroBatched(model, 3))
    except (BigBatchError, RuntimeError) as error:
        assert "derivative" in str(error) or "differentiable" in str(error)
        return
    close(found, expected)


class Branches(nn.Module):
    """Each micro-batch takes the way of its first sample."""

    def __init__(self, ways: dict[int, list[str]]) -> None:
        super().__init__()
        self.first, self.last, self.ways = nn.Linear(D, H), nn.Linear(H, C), ways
        self.left, self.right = norm(1)(), norm(1)()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for name in self.ways[int(x[0, 0])]:
            hidden = getattr(self, name)(hidden).tanh()
        return self.last(hidden)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("other", "named"),
    [(["right", "left"], ("left", "right")), (["left"], ("right",)), (["left", "right", "left"], ("left",)),
     ([], ("left",))],
)  # fmt: skip
def test_micro_batches_that_part_are_refused_by_name(other: list[str], named: tuple[str, ...], way: str) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        inputs, targets = rows()
        inputs[:, 0] = torch.arange(N) >= 5
        return inputs, targets

    case = Case("branches", lambda: Branches({0: ["left", "right"], 1: other}), batch, nn.CrossEntropyLoss)
    job = laws.made(case)
    before = {name: buffer.clone() for name, buffer in job.buffers().items()}
    with pytest.raises(ModelError) as caught:
        laws.micro_batches(case, job, laws.batch_of(case), way, 5)
    assert all(name in str(caught.value) for name in named)
    assert all(p.grad is None for p in job.model.parameters())
    assert all(torch.equal(buffer, before[name]) for name, buffer in job.buffers().items())
