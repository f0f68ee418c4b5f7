"""The public cases: loops that people report as wrong, each with its right result, run through the public surface.

The scripts in `public_cases/` are kept as their authors wrote them; each gives a model, a batch and what is right.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import Accumulator, MicroBatched, windows
from bigbatch.errors import SplitError


def case(number: int) -> ModuleType:
    """A fresh copy of one script."""
    (path,) = (Path(__file__).parent / "public_cases").glob(f"{number:02d}_*.py")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    torch.set_num_threads(threads)
    return module


def worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


# --- 01: the mean whose denominator is not the row count


def shifted(one: ModuleType, model: nn.Module, weight: Tensor | None, **options: Any) -> Accumulator:
    """Predicts token t + 1; the model's outputs and the targets are cut to the same columns by the loss's user."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lm = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.lm(ids)[:, :-1].transpose(1, 2)

    return Accumulator(Shifted(), nn.CrossEntropyLoss(weight, ignore_index=-100), **options)


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("cut", ["2+2+2", "4+2", "1x6", "5+1"])
def test_01_token_mean_in_windows(cut: str, weighed: bool) -> None:
    one = case(1)
    weight = one.CLASS_WEIGHT if weighed else None
    loss, expected = one.right(weight)
    model, batch = one.build()
    ids, targets = batch["ids"].split(one.CUTS[cut]), batch["labels"][:, 1:].split(one.CUTS[cut])
    (window,) = windows(zip(ids, targets, strict=True), accum_steps=len(ids))
    assert abs(shifted(one, model, weight).backward(window).item() - loss) < 1e-12
    assert one.dist(one.grads_of(model), expected) < 1e-12
    assert one.dist(one.naive(one.CUTS[cut], weight), expected) > 0.02  # what hand-written loops do is seen as wrong


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 5, 6, 9])
def test_01_token_mean_in_pieces(size: int, weighed: bool) -> None:
    one = case(1)
    weight = one.CLASS_WEIGHT if weighed else None
    loss, expected = one.right(weight)
    model, batch = one.build()
    door = shifted(one, model, weight, micro_batch_size=size)
    assert abs(door.backward(batch["ids"], batch["labels"][:, 1:]).item() - loss) < 1e-12
    assert one.dist(one.grads_of(model), expected) < 1e-12


def test_01_with_the_users_own_loss() -> None:
    """A training step that divides by the count it is handed."""
    one = case(1)
    loss, expected = one.right()
    model, batch = one.build()

    def step(ids: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        target = labels[:, 1:]
        return one.loss_fn(model, {"ids": ids, "labels": labels}) * (target != -100).sum() / count

    def count(inputs: dict[str, Tensor], _: None) -> Tensor:
        return (inputs["labels"][:, 1:] != -100).sum()

    door = Accumulator(step, None, reduction=count, micro_batch_size=2)
    assert abs(door.backward(batch).item() - loss) < 1e-12
    assert one.dist(one.grads_of(model), expected) < 1e-12
    assert one.dist(one.counted_before_shift(), expected) > 0.01


# --- 02: ten micro-batches, windows of four


def test_02_partial_window_and_scheduler() -> None:
    two = case(2)
    expected, log, last = two.right()
    model, optimizer, scheduler, micro = two.build()
    door, losses = Accumulator(model, nn.MSELoss()), []
    for _ in range(two.EPOCHS):
        for window in windows(iter(micro), accum_steps=two.WINDOW):
            optimizer.zero_grad()
            losses.append((len(window), optimizer.param_groups[0]["lr"], door.backward(window).item()))
            optimizer.step()
            scheduler.step()
    assert (two.weights(model) - expected).abs().max() < 1e-12
    assert len(losses) == 6 and scheduler.last_epoch == last == 6
    for (found_size, found_lr, found_loss), (size, _, lr, loss) in zip(losses, log, strict=True):
        assert (found_size, found_lr) == (size, lr) and abs(found_loss - loss) < 1e-12
    for kind in ("tail dropped", "tail leaks into next epoch", "tail divided by 4", "scheduler per micro-batch"):
        assert (two.faulty(kind)[0] - expected).abs().max() > 1e-3


# --- 03: where clipping and loss scaling belong


class Poisoned(nn.Module):
    """A mean of squares that is infinite in the second micro-batch of the first window."""

    def __init__(self, poison: bool) -> None:
        super().__init__()
        self.poison, self.calls = poison, 0

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls += 1
        loss = F.mse_loss(outputs, targets)
        return loss * float("inf") if self.poison and self.calls == 2 else loss


def train_03(three: ModuleType, poison: bool, steps: int) -> tuple[nn.Module, Tensor, list[Any]]:
    model, optimizer, x, y = three.build()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 0.5**k)
    scaler = torch.amp.GradScaler("cpu", init_scale=three.SCALE)
    door = Accumulator(model, Poisoned(poison), reduction="mean", scaler=scaler)
    trace, norm = [], torch.zeros(())
    for _ in range(steps):
        (window,) = windows(zip(x.split(three.CUT), y.split(three.CUT), strict=True), accum_steps=3)
        optimizer.zero_grad()
        door.backward(window)
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before, start = scaler.get_scale(), three.flat(model)
        scaler.step(optimizer)
        scaler.update()
        stepped = not torch.equal(start, three.flat(model))
        if stepped:
            scheduler.step()
        trace.append((stepped, before, scaler.get_scale(), scheduler.last_epoch))
    return model, norm, trace


def test_03_clip_after_unscale() -> None:
    three = case(3)
    _, norm, clipped, after = three.right()
    model, found_norm, _ = train_03(three, poison=False, steps=1)
    assert abs(found_norm.item() - norm) < 1e-12
    assert (three.flat_grad(model) - clipped).abs().max() < 1e-12
    assert (three.flat(model) - after).abs().max() < 1e-12
    for kind in ("clip after every micro-batch", "clip before unscale"):
        assert (three.faulty(kind) - after).abs().max() > 1e-4


def test_03_a_poisoned_window_leaves_no_trace() -> None:
    three = case(3)
    expected, trace = three.two_windows(poison=True)
    model, _, found = train_03(three, poison=True, steps=2)
    assert found == trace == [(False, 1024.0, 512.0, 0), (True, 512.0, 512.0, 1)]
    assert (three.flat(model) - expected).abs().max() < 1e-12


# --- 04: many bf16 gradients into one buffer


class Scale(nn.Module):
    """d(loss)/dw of a micro-batch is its one number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.bfloat16))

    def forward(self, numbers: Tensor) -> Tensor:
        return self.w * numbers


@pytest.mark.parametrize(("dtype", "is_right"), [(torch.float32, True), (torch.bfloat16, False)])
def test_04_exact_sum_of_a_stream(dtype: torch.dtype | None, is_right: bool) -> None:
    mean, stuck, _ = case(4).part_a()
    model = Scale()
    stream = torch.tensor([256.0] + [0.5] * 255, dtype=torch.bfloat16)
    Accumulator(model, lambda o, _: o.sum(), reduction="sum", micro_batch_size=1, grad_dtype=dtype).backward(stream)
    assert model.w.dtype == torch.bfloat16
    assert (model.w.grad / 256).item() == (mean if is_right else stuck) and mean == 1.498046875


@pytest.mark.parametrize(("dtype", "is_right"), [(torch.float32, True), (torch.bfloat16, False)])
def test_04_a_small_network(dtype: torch.dtype | None, is_right: bool) -> None:
    four = case(4)
    net, x, y = four.build()

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).float().pow(2).mean()

    Accumulator(net, loss_fn, reduction="mean", micro_batch_size=4, grad_dtype=dtype).backward(x, y)
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}
    error = four.rel([parameter.grad.to(torch.float64) for parameter in net.parameters()], four.right())
    assert (error <= 1e-5) == is_right


# --- 05: in-batch negatives and a learned temperature


class Encode(nn.Module):
    """The pair's two towers as one forward."""

    def __init__(self, pair: nn.Module) -> None:
        super().__init__()
        self.pair = pair

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        return self.pair.encode(image, text)


@pytest.mark.parametrize("activations", ["recompute", "offload", "keep"])
@pytest.mark.parametrize("size", [4, 5, 1, 12])
def test_05_contrastive_micro_batched(size: int, activations: str) -> None:
    five = case(5)
    loss, expected = five.right()
    pair, x, t = five.build()
    model = MicroBatched(Encode(pair), size, activations=activations)
    found = five.head_loss(*model(x, t), pair.log_temp)
    found.backward()
    assert abs(found.item() - loss) < 1e-12 and worst(grads(pair), expected) < 1e-12
    assert worst(five.own_negatives_only([4, 4, 4]), expected) > 1e-3


@pytest.mark.parametrize("cut", [[4, 4, 4], [5, 5, 2]])
def test_05_contrastive_accumulator(cut: list[int]) -> None:
    five = case(5)
    loss, expected = five.right()
    pair, x, t = five.build()

    def loss_fn(outputs: tuple[Tensor, Tensor], _: None) -> Tensor:
        return five.head_loss(*outputs, pair.log_temp)

    with pytest.warns(UserWarning, match="does not know"):
        door = Accumulator(Encode(pair), loss_fn)
    (window,) = windows([((a, b), None) for a, b in zip(x.split(cut), t.split(cut), strict=True)], accum_steps=3)
    assert abs(door.backward(window).item() - loss) < 1e-12
    assert worst(grads(pair), expected) < 1e-12
    times = five.replay_full_loss(cut)["log_temp"] / expected["log_temp"]
    assert abs(times - 3) < 1e-12  # the fault that the temperature shows


# --- 06: batch statistics under accumulation and recomputation


@pytest.mark.parametrize("door", [1, 2])
def test_06_a_exact_batch_norm_is_that_of_the_whole_batch(door: int) -> None:
    six = case(6)
    loss, expected, state = six.right()
    net, x, y = six.build()
    if door == 1:
        found = Accumulator(net, nn.MSELoss(), micro_batch_size=4).backward(x, y)
    else:
        found = F.mse_loss(MicroBatched(net, 4)(x), y)
        found.backward()
    assert abs(found.item() - loss) < 1e-12 and six.gap(six.grads_of(net), expected) < 1e-12
    assert (six.state(net)[0] - state[0]).abs().max() < 1e-12 and six.state(net)[2] == state[2]


@pytest.mark.parametrize("door", [1, 2])
def test_06_b_buffers_move_once_with_the_stated_difference(door: int) -> None:
    """Local batch norm moves its statistics once: the mean is the whole batch's, the variance is said to differ."""
    six = case(6)
    _, _, (mean, _, count) = six.right()
    net, x, y = six.build()
    with pytest.warns(UserWarning, match="batch_norm='local'"):
        if door == 1:
            Accumulator(net, nn.MSELoss(), micro_batch_size=4, batch_norm="local").backward(x, y)
        else:
            F.mse_loss(MicroBatched(net, 4, batch_norm="local")(x), y).backward()
    found_mean, _, found_count = six.state(net)
    assert found_count == count == 1 and (found_mean - mean).abs().max() < 1e-12
    assert six.plain_micro()[1][2] == 3 and six.recomputed()[1][2] == 2  # what moves with every forward is seen


def test_06_b_one_recomputed_micro_batch_is_the_whole_batch() -> None:
    """With one micro-batch nothing is local, so nothing is refused, and nothing moves twice."""
    six = case(6)
    _, expected, state = six.right()
    net, x, y = six.build()
    F.mse_loss(MicroBatched(net, 12)(x), y).backward()
    assert six.gap(six.grads_of(net), expected) < 1e-12
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(six.state(net), state, strict=True))


@pytest.mark.parametrize("way", ["sequential", "joint", "recompute", "offload", "keep"])
def test_06_c_frozen_batch_norm_is_exact_and_silent(way: str) -> None:
    six = case(6)
    loss, expected, state = six.right(frozen=True)
    net, x, y = six.build(frozen=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if way == "sequential":
            found = Accumulator(net, nn.MSELoss(), micro_batch_size=4).backward(x, y)
        elif way == "joint":
            warnings.filterwarnings("ignore", message="bigbatch does not know")
            found = Accumulator(net, lambda o, t: (o - t).pow(2).mean(), micro_batch_size=4).backward(x, y)
        else:
            found = F.mse_loss(MicroBatched(net, 4, activations=way)(x), y)
            found.backward()
    assert abs(found.item() - loss) < 1e-12 and six.gap(six.grads_of(net), expected) < 1e-12
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(six.state(net), state, strict=True))


# --- 07: a batch of many kinds of fields


@pytest.mark.parametrize("size", [1, 3, 4, 5, 9, 10])
def test_07_mixed_container(size: int) -> None:
    seven = case(7)
    table, expected = seven.right()
    net, batch = seven.build()
    losses: dict[str, float] = {}

    def step(piece: Any) -> Tensor:
        each = seven.sample_losses(net, piece)
        losses.update(zip(piece["ids"], each.tolist(), strict=True))
        return each.mean()

    door = Accumulator(step, None, reduction="mean", micro_batch_size=size, split={"prior": "shared"})
    loss = door.backward((batch,))
    assert abs(loss.item() - sum(table.values()) / seven.N) < 1e-12 and worst(grads(net), expected) < 1e-12
    assert losses.keys() == table.keys() and max(abs(losses[name] - table[name]) for name in table) < 1e-12


def test_07_a_prior_of_the_classes_is_refused_until_it_is_named() -> None:
    seven = case(7)
    net, batch = seven.build()
    door = Accumulator(lambda piece: seven.sample_losses(net, piece).mean(), None, reduction="mean", micro_batch_size=4)
    with pytest.raises(SplitError, match="prior"):
        door.backward((batch,))
    assert all(parameter.grad is None for parameter in net.parameters())
