"""Door 1 keeps what its docstring promises: options, reports, hooks, plain functions, refusals by name."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, BigBatchError, StepReport, accumulator, windows
from bigbatch.core.held import held
from bigbatch.engines import sequential
from bigbatch.errors import LossError, ModelError, OptionError, SplitError

N, D, C = 10, 4, 3


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C)).double()


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(N, D, dtype=torch.float64), torch.randint(0, C, (N,))


def grads(*modules: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for module in modules for parameter in module.parameters()]


def right(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] = F.cross_entropy
) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of the whole batch; a loss with weights of its own comes after the model."""
    model, loss_fn = copy.deepcopy((model, loss_fn))
    loss = loss_fn(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach(), grads(model, *([loss_fn] if isinstance(loss_fn, nn.Module) else []))


def close(found: Any, expected: Any, rtol: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=rtol, atol=1e-14, check_dtype=False)


def unknown(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets) + outputs.std(0).sum()


def test_close_can_fail(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss, expected = right(model, batch)
    with pytest.raises(AssertionError):
        close(expected[0] * (1 + 1e-10), expected[0])
    model.double()
    Accumulator(model, lambda o, t: F.cross_entropy(o, t), reduction="sum", micro_batch_size=4).backward(*batch)
    with pytest.raises(AssertionError):
        close(grads(model), expected)  # a mean that is called a sum


# --- What comes back


def test_report(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    door = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    assert door.report is None
    loss = door.backward(*batch)
    assert loss.dim() == 0 and not loss.requires_grad
    report = door.report
    assert isinstance(report, StepReport) and report.seconds > 0
    assert (report.samples, report.micro_batches, report.micro_batch_size, report.denominator) == (N, 3, 4, N)
    assert (report.retries, report.peak_bytes) == (0, None)
    assert report.to_dict()["samples"] == N and "micro_batches" in str(report)


def test_report_of_a_window_and_of_terms(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    def loss_fn(outputs: Tensor, targets: Tensor, counts: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") / counts["rows"] + outputs.abs().sum() / counts["all"]

    def count(inputs: Tensor, targets: Tensor) -> dict[str, Any]:
        return {"rows": len(targets), "all": torch.tensor(2 * len(targets))}

    door = Accumulator(model, loss_fn, reduction=count, micro_batch_size=3)
    (window,) = windows([(batch[0][:4], batch[1][:4]), (batch[0][4:], batch[1][4:])], accum_steps=2)
    loss = door.backward(window)
    expected = right(model, batch, lambda o, t: loss_fn(o, t, {"rows": torch.tensor(N), "all": torch.tensor(2 * N)}))
    close((loss, grads(model)), expected)
    assert door.report.to_dict()["denominator"] == {"rows": N, "all": 2 * N}
    assert (door.report.micro_batches, door.report.micro_batch_size) == (4, 3)


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), unknown])
@pytest.mark.filterwarnings("ignore:bigbatch does not know")
def test_on_outputs(loss_fn: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    seen: list[tuple[Tensor, Tensor]] = []
    Accumulator(model, loss_fn, micro_batch_size=4).backward(*batch, on_outputs=lambda o, t: seen.append((o, t)))
    outputs, targets = (torch.cat(parts) for parts in zip(*seen, strict=True))
    close(outputs, model(batch[0]).detach())
    assert not outputs.requires_grad and torch.equal(targets, batch[1])


@pytest.mark.parametrize("samples", [1, 3])
def test_a_batch_smaller_than_a_micro_batch(samples: int, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    few = batch[0][:samples], batch[1][:samples]
    door = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    loss = door.backward(*few)
    close((loss, grads(model)), right(model, few))
    assert (door.report.micro_batches, door.report.micro_batch_size) == (1, samples)


# --- Losses


def test_an_unknown_loss_is_exact_with_one_hint(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.warns(UserWarning, match="does not know this loss's denominator") as caught:
        door = Accumulator(model, unknown, micro_batch_size=4)
        for _ in range(2):
            loss = door.backward(*batch)
    assert len(caught) == 1 and caught[0].filename == __file__
    expected = right(model, batch, unknown)
    close((loss, grads(model)), (expected[0], [2 * gradient for gradient in expected[1]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accumulator(model, nn.CrossEntropyLoss())
        Accumulator(model, unknown, reduction="mean")


@pytest.mark.parametrize("reduction", ["median", 3, None])
def test_an_unknown_reduction_is_refused(reduction: Any, model: nn.Module) -> None:
    with pytest.raises(OptionError, match="reduction="):
        Accumulator(model, unknown, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum", lambda i, t: len(t), "auto"])
@pytest.mark.filterwarnings("ignore:bigbatch does not know")
def test_a_loss_that_is_no_scalar_is_refused(reduction: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    for value, found in ((torch.ones(2, requires_grad=True), r"shape \(2,\)"), (3.0, "float")):
        door = Accumulator(model, lambda *arguments, value=value: value, reduction=reduction, micro_batch_size=4)
        with pytest.raises(LossError, match=found):
            door.backward(*batch)
        assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(LossError, match="reduction='none'"):
        Accumulator(model, nn.CrossEntropyLoss(reduction="none"))


@pytest.mark.parametrize("count", [lambda i, t: "3", lambda i, t: torch.ones(2), lambda i, t: None])
def test_a_count_that_is_no_number_is_refused(count: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    door = Accumulator(model, lambda o, t, n: o.sum() / n, reduction=count, micro_batch_size=4)
    with pytest.raises(LossError, match="count function"):
        door.backward(*batch)


class Warm(nn.Module):
    """A loss with a temperature to learn, and a centre that follows the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))
        self.register_buffer("centre", torch.zeros(C, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        with torch.no_grad():
            self.centre.lerp_(outputs.mean(0), 0.1)
        return F.cross_entropy((outputs) * self.log_temperature.exp(), targets)


@pytest.mark.parametrize("reduction", ["mean", "auto"])
@pytest.mark.filterwarnings("ignore:bigbatch does not know")
def test_a_loss_with_parameters(reduction: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss_fn, other = Warm(), Warm()
    loss = Accumulator(model, loss_fn, reduction=reduction, micro_batch_size=3).backward(*batch)
    close((loss, grads(model, loss_fn)), right(model, batch, Warm()))
    other(model(batch[0]), batch[1])
    close(loss_fn.centre, other.centre)  # moved once


def test_an_error_after_an_unknown_loss_moves_no_buffer(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss_fn = Warm()
    centre = loss_fn.centre
    with pytest.warns(UserWarning):
        door = Accumulator(model, loss_fn, micro_batch_size=3)
    handle = model[2].weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        door.backward(*batch)
    handle.remove()
    assert loss_fn.centre is centre and not centre.any()
    assert all(parameter.grad is None for parameter in (*model.parameters(), *loss_fn.parameters()))


def test_a_micro_batch_without_a_target_may_have_a_constant_loss(model: nn.Module, batch: Any) -> None:
    rows, labels = batch[0], batch[1].clone()
    labels[:4] = -100

    def loss_fn(outputs: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        there = targets != -100
        return (
            F.cross_entropy(outputs[there], targets[there], reduction="sum") / count if there.any() else torch.zeros(())
        )

    expected = right(model, (rows, labels))
    door = Accumulator(model, loss_fn, reduction=lambda _, targets: (targets != -100).sum(), micro_batch_size=2)
    close((door.backward(rows, labels), grads(model)), expected)
    with pytest.raises(RuntimeError, match="does not require grad"):
        door.backward(rows, torch.full_like(labels, -100))


# --- Plain functions in place of a model


def steps(model: nn.Module) -> dict[str, Any]:
    class Trainer:
        def __init__(self) -> None:
            self.net = model

        def step(self, rows: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(self.net(rows), labels)

        __call__ = step

    def closure(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(rows), labels)

    def by_argument(net: nn.Module, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(net(rows), labels)

    trainer, held = Trainer(), {"nets": [model]}
    return {
        "closure": closure,
        "method": trainer.step,
        "object": trainer,
        "partial": functools.partial(by_argument, model),
        "lambda over an object": lambda *b: trainer.step(*b),
        "lambda over a function": lambda *b: closure(*b),
        "lambda over containers": lambda *b: by_argument(held["nets"][0], *b),
    }


NAMES = ["closure", "method", "object", "partial", "lambda over an object", "lambda over a function"]


@pytest.mark.parametrize("name", [*NAMES, "lambda over containers"])
def test_a_training_step(name: str, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    expected = right(model, batch)
    step = steps(model)[name]
    door = Accumulator(step, None, reduction="mean", micro_batch_size=4)
    assert door.modules == [model]
    close((door.backward(batch), grads(model)), expected)


def test_a_training_step_whose_module_is_named(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    hidden = iter([model] * 9)

    def step(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(next(hidden)(rows), labels)

    expected = right(model, batch)
    with pytest.raises(OptionError, match=r"modules=\[\.\.\.\]"):
        Accumulator(step, None, reduction="mean")
    door = Accumulator(step, None, reduction="mean", micro_batch_size=4, modules=[model])
    close((door.backward(batch), grads(model)), expected)


def test_a_training_step_that_divides_by_the_count(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    def step(rows: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return F.cross_entropy(model(rows), labels, reduction="sum") / count

    expected = right(model, batch)
    door = Accumulator(step, None, reduction=lambda inputs, _: len(inputs[1]), micro_batch_size=4)
    close((door.backward(batch), grads(model)), expected)


def test_a_training_step_without_a_stated_reduction_is_refused(model: nn.Module) -> None:
    with pytest.raises(OptionError, match="whose denominator nobody stated"):
        Accumulator(steps(model)["closure"], None)


def test_a_training_step_over_a_window(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    expected = right(model, batch)
    (window,) = windows([(batch[0][:7], batch[1][:7]), (batch[0][7:], batch[1][7:])], accum_steps=4)
    loss = Accumulator(steps(model)["closure"], None, reduction="mean").backward(window)
    close((loss, grads(model)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_parameter_that_is_named_and_found_is_added_once(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.zeros(1, dtype=dtype))
    door = Accumulator(
        lambda rows: (weight * rows).sum(),
        None,
        micro_batch_size=1,
        reduction="sum",
        modules=[nn.ParameterList([weight])],
    )
    for times in (1, 2):
        door.backward(torch.ones(4, dtype=dtype))
        assert weight.grad == 4 * times


def test_the_search_for_modules_is_bounded(model: nn.Module) -> None:
    def found(*sources: Any) -> list[nn.Module]:
        return list(held({str(i): source for i, source in enumerate(sources)}).modules.values())

    deep: Any = model
    for _ in range(9):
        deep = [deep]
    assert found(lambda: deep) == [] and found(lambda: [model] * 2, F.cross_entropy) == [model]
    many, ring = [0] * 2000 + [model], {}
    ring["self"] = ring
    assert found(lambda: (many, ring)) == []


# --- Precision


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), unknown])
@pytest.mark.filterwarnings("ignore:bigbatch does not know")
def test_scaler(loss_fn: Any, model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss, expected = right(model, batch, loss_fn)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = Accumulator(model, loss_fn, micro_batch_size=4, scaler=scaler).backward(*batch)
    close(found, loss)
    close(grads(model), [1024 * gradient for gradient in expected])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.unscale_(optimizer)
    close(grads(model), expected)


def test_autocast(batch: tuple[Tensor, Tensor]) -> None:
    model = nn.Sequential(nn.Linear(D, 6), nn.Tanh(), nn.Linear(6, C))
    rows, labels = batch[0].float(), batch[1]
    plain = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(plain(rows), labels)
    expected.backward()
    seen: list[torch.dtype] = []
    door = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4, autocast=torch.bfloat16)
    loss = door.backward(rows, labels, on_outputs=lambda o, t: seen.append(o.dtype))
    assert seen == [torch.bfloat16] * 3 and all(p.grad.dtype == torch.float32 for p in model.parameters())
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-2, atol=0)
    torch.testing.assert_close(grads(model), grads(plain), rtol=0.05, atol=5e-3)


@pytest.mark.parametrize("way", [nn.MSELoss(), lambda o, t: F.mse_loss(o, t)])
@pytest.mark.filterwarnings("ignore:bigbatch does not know")
def test_autocast_around_the_call_is_replayed(way: Any) -> None:
    model = nn.Linear(D, C)
    rows, goals = torch.randn(N, D), torch.randn(N, C)
    with torch.autocast("cpu", torch.bfloat16):
        Accumulator(model, way, micro_batch_size=3).backward(rows, goals)
    found = grads(model)
    model.zero_grad()
    Accumulator(model, way, micro_batch_size=3, autocast=torch.bfloat16).backward(rows, goals)
    torch.testing.assert_close(found, grads(model), rtol=2e-2, atol=2e-3)  # one cast of the weights, or one each


def test_grad_dtype() -> None:
    model = nn.Linear(D, C).bfloat16()
    rows, goals = torch.randn(64, D).bfloat16(), torch.randn(64, C).bfloat16()

    def run(dtype: torch.dtype | None) -> list[Tensor]:
        model.zero_grad()
        for parameter in model.parameters():
            parameter.grad_dtype = torch.bfloat16
        Accumulator(model, nn.MSELoss(), micro_batch_size=1, grad_dtype=dtype).backward(rows, goals)
        return grads(model)

    wide, narrow = run(torch.float32), run(torch.bfloat16)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert {gradient.dtype for gradient in wide} == {torch.float32}
    assert {gradient.dtype for gradient in narrow} == {torch.bfloat16}
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    F.mse_loss(exact(rows.double()), goals.double()).backward()
    far = [sum((g.double() - e).norm() for g, e in zip(found, grads(exact), strict=True)) for found in (wide, narrow)]
    assert far[0] < far[1] / 2


# --- Hooks, closures, shared parts


def test_an_optimizer_that_steps_inside_backward_steps_once(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    """Hooks that step and clear each gradient at once, and one that clips it first: both see the whole batch's."""

    def trained(run: Any) -> list[Tensor]:
        own = copy.deepcopy(model)
        for parameter in own.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(parameter: nn.Parameter, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        run(own)
        run(own)
        assert all(parameter.grad is None for parameter in own.parameters())
        return [parameter.detach() for parameter in own.parameters()]

    loss_fn = nn.CrossEntropyLoss()
    whole = trained(lambda own: loss_fn(own(batch[0]), batch[1]).backward())
    ours = trained(lambda own: Accumulator(own, loss_fn, micro_batch_size=4).backward(*batch))
    for one, other in zip(ours, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
    pieces = list(zip(*(part.split(4) for part in batch), strict=True))
    by_hand = trained(lambda own: [(loss_fn(own(x), y) / len(pieces)).backward() for x, y in pieces])
    assert any((one - other).abs().max() > 1e-4 for one, other in zip(by_hand, whole, strict=True))


def test_hooks_are_put_back_after_an_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    calls: list[Tensor] = []
    handle = model[0].weight.register_hook(calls.append)
    accumulator = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    with pytest.raises(ZeroDivisionError):
        accumulator.backward(*batch, on_outputs=lambda outputs, targets: 1 / 0)
    assert calls == []
    accumulator.backward(*batch)
    assert len(calls) == 1
    handle.remove()
    accumulator.backward(*batch)
    assert len(calls) == 1


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), unknown])
@pytest.mark.filterwarnings("ignore:bigbatch does not know")
def test_an_encoder_that_ran_once_feeds_every_micro_batch(loss_fn: Any, batch: tuple[Tensor, Tensor]) -> None:
    """The context is one row that all samples share, and the rows themselves come from an encoder too."""
    encoder, head = nn.Linear(D, D).double(), nn.Linear(D, C).double()
    context = torch.randn(1, D, dtype=torch.float64)

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = head

        def forward(self, rows: Tensor, context: Tensor) -> Tensor:
            return self.head(rows * context)

    def run(backward: Callable[[Tensor, Tensor], object]) -> list[Tensor]:
        encoder.zero_grad(), head.zero_grad()
        backward(encoder(batch[0]).tanh(), encoder(context))
        return grads(encoder, head)

    model = Head()
    expected = run(lambda rows, shared: loss_fn(model(rows, shared), batch[1]).backward())
    door = Accumulator(model, loss_fn, micro_batch_size=4, split={"context": "shared"})
    found = run(lambda rows, shared: door.backward({"rows": rows, "context": shared}, batch[1]))
    close(found, expected)


def test_an_input_that_requires_grad_gets_its_gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    rows = batch[0].clone().requires_grad_()
    F.cross_entropy(model(rows), batch[1]).backward()
    expected, rows.grad = rows.grad, None
    Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(rows, batch[1])
    close(rows.grad, expected)


def test_a_closure_for_lbfgs() -> None:
    rows, goals = torch.randn(12, D, dtype=torch.float64), torch.randn(12, 1, dtype=torch.float64)
    ends = []
    for whole in (True, False):
        torch.manual_seed(3)
        model = nn.Linear(D, 1).double()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)
        door = Accumulator(model, nn.MSELoss(), micro_batch_size=4)

        def closure(whole: bool = whole, model: nn.Module = model, door: Accumulator = door) -> Tensor:
            model.zero_grad()
            if not whole:
                return door.backward(rows, goals)
            loss = F.mse_loss(model(rows), goals)
            loss.backward()
            return loss

        for _ in range(3):
            optimizer.step(closure)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    close(ends[1], ends[0], rtol=1e-10)


# --- Refusals


@pytest.mark.parametrize("size", [0, -1, 2.0, "8", True])
def test_a_size_that_counts_nothing_is_refused(size: Any, model: nn.Module) -> None:
    with pytest.raises(OptionError, match=f"micro_batch_size={size!r}"):
        Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=size)


def test_options_that_cannot_be_meant_are_refused(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(OptionError, match="batch_norm='off'"):
        Accumulator(model, nn.CrossEntropyLoss(), batch_norm="off")
    door = Accumulator(model, nn.CrossEntropyLoss())
    with pytest.raises(OptionError, match="beside a window"):
        door.backward(next(iter(windows([batch], accum_steps=1))), batch[1])
    with pytest.raises(OptionError, match="yield \\(inputs, targets\\)"):
        door.backward(next(iter(windows([batch[0]], accum_steps=1))))


def test_batch_norm_is_exact_and_silent_and_local_gives_one_notice(batch: tuple[Tensor, Tensor]) -> None:
    model = nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Linear(6, C)).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for size in (4, None):
            close(
                Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=size).backward(*batch),
                right(model, batch)[0],
            )
    with pytest.warns(UserWarning, match="batch_norm='local'") as caught:
        local = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=5, batch_norm="local")
        for _ in range(2):
            local.backward(*batch)
    assert len(caught) == 1 and model[1].num_batches_tracked == 4


class DistributedDataParallel(nn.Module):
    """Has the name of the wrapper that brings several processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_several_processes_are_refused_by_name(model: nn.Module) -> None:
    for wrapped, name in (
        (DistributedDataParallel(model), "DistributedDataParallel"),
        (nn.DataParallel(model), "DataParallel"),
    ):
        with pytest.raises(ModelError, match=f"is a {name}"):
            Accumulator(nn.Sequential(wrapped), nn.CrossEntropyLoss())


def test_fields_that_disagree_are_refused(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(SplitError, match="targets 9"):
        Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(batch[0], batch[1][:9])
    assert issubclass(SplitError, BigBatchError) and issubclass(SplitError, ValueError)


def test_a_lazy_model_becomes_what_it_is_in_its_first_micro_batch(batch: tuple[Tensor, Tensor]) -> None:
    lazy = nn.Sequential(nn.LazyLinear(6), nn.Tanh(), nn.LazyLinear(C)).double()
    loss = Accumulator(lazy, nn.CrossEntropyLoss(), micro_batch_size=4).backward(*batch)
    found = grads(lazy)
    lazy.zero_grad()
    close((loss, found), right(lazy, batch))


# --- Costs


def test_one_forward_a_micro_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(*batch)
    assert calls == [4, 3, 3]
    calls.clear()
    with pytest.warns(UserWarning):
        Accumulator(model, unknown, micro_batch_size=4).backward(*batch)
    assert calls == [4, 3, 3, 3, 3, 4]  # the last micro-batch is the first to run backward


def test_a_loss_that_is_not_finite_is_handed_on(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    batch[0][5] = math.inf
    loss = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(*batch)
    assert not torch.isfinite(loss) and not all(torch.isfinite(gradient).all() for gradient in grads(model))


def test_a_dropped_weight_is_caught(monkeypatch: pytest.MonkeyPatch, model: nn.Module, batch: Any) -> None:
    expected = right(model, batch)
    monkeypatch.setattr(sequential, "weight_like", lambda weight, loss: torch.ones_like(loss))
    loss = accumulator.Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(*batch)
    with pytest.raises(AssertionError):
        close((loss, grads(model)), expected)


# --- Losses that change, and denominators that cannot be


def hook(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.square()


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "label_smoothing": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "label_smoothing", 0.3)),
    "ignore_index": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "ignore_index", 2)),
    "reduction": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "reduction", "sum")),
    "weight": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "weight", torch.tensor([1.0, 5.0, 2.0]).double())),
    "forward hook": (nn.CrossEntropyLoss, lambda loss: loss.register_forward_hook(hook)),
    "forward": (nn.CrossEntropyLoss, lambda loss: setattr(loss, "forward", unknown)),
    "keyword": (
        lambda: functools.partial(F.cross_entropy, ignore_index=-100),
        lambda loss: loss.keywords.update(ignore_index=2),
    ),
}


@pytest.mark.filterwarnings("ignore:bigbatch does not know")
@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_on_the_loss_holds_from_the_next_batch_on(name: str, model: nn.Module) -> None:
    """Once before the first batch, once between two; and what holds is not what held."""
    build, change = CHANGES[name]
    batch = torch.randn(N, D, dtype=torch.float64), torch.tensor([0, 1, 2, 2, 1, 0, 2, 1, 1, 2])
    for before_the_first in (True, False):
        loss_fn = build()
        accumulator = Accumulator(model, loss_fn, micro_batch_size=4)
        stale = right(model, batch, loss_fn)
        if not before_the_first:
            close(accumulator.backward(*batch), stale[0])
        change(loss_fn)
        model.zero_grad()
        found = accumulator.backward(*batch)
        expected_loss = loss_fn(model(batch[0]), batch[1])
        expected = torch.autograd.grad(expected_loss, list(model.parameters()))
        close((found, grads(model)), (expected_loss.detach(), list(expected)))
        with pytest.raises(AssertionError):
            close(found, stale[0])
        model.zero_grad()


def test_a_loss_that_becomes_unknown_is_told_of_once(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
    loss_fn = nn.CrossEntropyLoss()
    accumulator = Accumulator(model, loss_fn, micro_batch_size=4)
    loss_fn.register_forward_hook(hook)
    with pytest.warns(UserWarning, match="does not know this loss") as caught:
        accumulator.backward(*batch)
        accumulator.backward(*batch)
    assert len(caught) == 1 and caught[0].filename == __file__
    loss_fn.reduction = "none"
    with pytest.raises(LossError, match="reduction='none'"):
        accumulator.backward(*batch)


@pytest.mark.filterwarnings("ignore:Using a target size")
def test_elements_that_broadcasting_makes_are_the_same_in_all_micro_batches_or_refused() -> None:
    layer = nn.Linear(D, 1).double()
    goals = torch.randn(4, 1, dtype=torch.float64)
    rows = [torch.randn(4, steps, D, dtype=torch.float64) for steps in (3, 3, 9)]
    accumulator = Accumulator(lambda rows: layer(rows)[..., 0], nn.MSELoss())

    def window(items: list[Tensor], expand: bool = False) -> Any:
        pairs = [(item, goals.expand(4, item.shape[1]) if expand else goals) for item in items]
        return next(iter(windows(pairs, accum_steps=9)))

    def whole(items: list[Tensor]) -> Tensor:
        parts = [F.mse_loss(layer(item)[..., 0], goals.expand(4, item.shape[1]), reduction="none") for item in items]
        return torch.cat([part.flatten() for part in parts]).mean().detach()

    close(accumulator.backward(window(rows[:2])), whole(rows[:2]))
    close(accumulator.backward(window(rows[2:])), whole(rows[2:]))  # each batch by itself
    held = grads(layer)
    with pytest.raises(LossError, match="makes 3 elements of the loss .* and 9 in another.*expand the targets"):
        accumulator.backward(window(rows))
    close(grads(layer), held)
    close(accumulator.backward(window(rows, expand=True)), whole(rows))


@pytest.mark.parametrize("total", [math.nan, math.inf, -4.0, -3])
def test_a_denominator_that_divides_nothing_is_refused(model: nn.Module, batch: Any, total: float) -> None:
    def loss_fn(outputs: Tensor, targets: Tensor, count: Any) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum") / (count["n"] if isinstance(count, dict) else count)

    for count in (lambda _, targets: total, lambda _, targets: torch.tensor(total), lambda _, targets: {"n": total}):
        with pytest.raises(LossError, match="a denominator was asked for.*add up to"):
            Accumulator(model, loss_fn, micro_batch_size=4, reduction=count).backward(*batch)
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(reduction="sum"), F.cross_entropy, nn.MSELoss()])
def test_a_loss_of_torch_beside_a_count_is_refused(model: nn.Module, batch: Any, loss_fn: Any) -> None:
    with pytest.raises(LossError, match=r"beside a count function.*lambda outputs, targets, count"):
        Accumulator(model, loss_fn, micro_batch_size=4, reduction=lambda _, targets: len(targets))
    loss, summed = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(reduction="sum")
    wrapped = Accumulator(
        model,
        lambda outputs, targets, count: summed(outputs, targets) / count,
        micro_batch_size=4,
        reduction=lambda _, targets: len(targets),
    )
    close((wrapped.backward(*batch), grads(model)), right(model, batch, loss))


@pytest.mark.parametrize("kind", [Fraction, Decimal, float, torch.tensor])
def test_a_count_may_be_any_real_number(model: nn.Module, batch: Any, kind: Any) -> None:
    def build(kind: Any) -> Accumulator:
        return Accumulator(
            model,
            lambda outputs, targets, count: F.cross_entropy(outputs, targets, reduction="sum") / count,
            micro_batch_size=4,
            reduction=lambda _, targets: kind(len(targets)),
        )

    close((build(kind).backward(*batch), grads(model)), right(model, batch))
    for other in (bool, complex, str):
        with pytest.raises(LossError, match=f"it returned a {other.__name__}"):
            build(other).backward(*batch)
