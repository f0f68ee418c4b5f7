"""`verify` says equal or not, names the cause by experiment, and stays silent beside every near miss."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.accumulator import Accumulator
from bigbatch.core import joint_norm
from bigbatch.engines import replay
from bigbatch.errors import ModelError, OptionError
from bigbatch.micro_batched import MicroBatched
from bigbatch.verifier import Verdict, verify

SIZES = (4, 4, 2)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny operators wait for threads longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def mlp(*extra: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *extra, nn.Linear(8, 3))


def classes(samples: int = 10) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 6), torch.randint(0, 3, (samples,))


def loop(loss_fn: Any, sizes: tuple[int, ...] = SIZES, weight: Callable[[int, int], float] | None = None) -> Any:
    """A loop as people write it; it weighs by samples unless told otherwise."""

    def run(model: Any, inputs: Tensor, targets: Tensor) -> float:
        total = 0.0
        for k, (rows, labels) in enumerate(zip(inputs.split(sizes), targets.split(sizes), strict=True)):
            share = weight(k, len(rows)) if weight else len(rows) / len(inputs)
            loss = loss_fn(model(rows), labels) * share
            loss.backward()
            total += loss.item()
        return total

    return run


def names(verdict: Verdict) -> list[str]:
    return [cause.name for cause in verdict.causes]


def contrastive(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = F.normalize(outputs, dim=1)
    return F.cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)).roll(1))


class Centred(nn.Module):
    """Ties samples together without being a batch norm."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(0)


class Functional(nn.Module):
    """Batch norm without a layer that tells of it."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.batch_norm(rows, None, None, training=True)


class Counting(nn.Module):
    """Counts its forwards and keeps a moving average."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))

    def forward(self, rows: Tensor) -> Tensor:
        self.steps += 1
        self.average = 0.9 * self.average + 0.1 * rows.detach().mean(0)
        return rows


class Tokens(nn.Module):
    """Embeds, attends, drops and predicts a token at every position."""

    def __init__(self, recurrent: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.body = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True) if recurrent else layer
        self.head = nn.Linear(8, 11)

    def forward(self, ids: Tensor) -> Tensor:
        out = self.body(self.embed(ids))
        return self.head(out[0] if isinstance(out, tuple) else out).transpose(1, 2)


class FixedFloat(nn.Module):
    """Multiplies by a float32 matrix that is no buffer, so that it cannot run in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.eye(8)

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.table


class InsideFloat(nn.Module):
    """Computes in the type of a tensor that is no buffer, whatever it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.like = torch.ones(1)

    def forward(self, rows: Tensor) -> Tensor:
        return F.softmax(rows.to(self.like), dim=-1).to(rows)


class NamesFloat(nn.Module):
    """Asks for float32 by name, as many norms and losses do."""

    def forward(self, rows: Tensor) -> Tensor:
        return (rows.float().softmax(-1).to(torch.float32) * torch.ones(8, dtype=torch.float32)).to(rows.dtype)


def tokens() -> tuple[Tensor, Tensor]:
    ids, targets = torch.randint(0, 11, (7, 5)), torch.randint(0, 11, (7, 5))
    targets[0, 1:] = targets[3, 2:] = -100
    return ids, targets


def image_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Dropout2d(0.3), nn.Flatten(), nn.Linear(64, 3)
    )


ZOO: dict[str, Callable[[], tuple[nn.Module, Any, Any, Any]]] = {
    "mlp with dropout": lambda: (mlp(nn.Dropout(0.4)), nn.CrossEntropyLoss(), *classes()),
    "images": lambda: (image_model(), nn.MSELoss(), torch.randn(8, 2, 6, 6), torch.randn(8, 3)),
    "attention": lambda: (Tokens(), nn.CrossEntropyLoss(), *tokens()),
    "recurrence": lambda: (Tokens(recurrent=True), nn.CrossEntropyLoss(), *tokens()),
    "any loss": lambda: (mlp(nn.Dropout(0.4)), contrastive, *classes()),
    "counts": lambda: (mlp(Counting()), nn.CrossEntropyLoss(), *classes()),
}


@pytest.mark.parametrize("name", ZOO)
def test_the_accumulator_is_equal(name: str) -> None:
    verdict = verify(*ZOO[name]())
    assert verdict.equal and not verdict.causes, str(verdict)
    assert verdict.dtype == torch.float64 and verdict.difference <= verdict.bound < 1e-10
    assert verdict.micro_batches >= 3 and verdict.loss_difference is not None and verdict.loss_difference < 1e-12
    assert any("was chosen" in note for note in verdict.notes)


@pytest.mark.parametrize("activations", ["recompute", "keep"])
@pytest.mark.parametrize("name", ["mlp with dropout", "attention", "any loss"])
def test_the_wrapper_is_equal(name: str, activations: str) -> None:
    model, loss_fn, inputs, targets = ZOO[name]()
    verdict = verify(MicroBatched(model, 3, activations=activations), loss_fn, inputs, targets)
    assert verdict.equal and verdict.micro_batch_size == 3, str(verdict)
    large = verify(MicroBatched(model, 32), loss_fn, inputs, targets)
    assert large.equal and large.micro_batches >= 3 and "32" in large.notes[0]


@pytest.mark.parametrize("model", [mlp(), mlp(nn.Dropout(0.4)), mlp(nn.LayerNorm(8))], ids=["plain", "dropout", "norm"])
def test_a_right_loop_is_equal(model: nn.Module) -> None:
    loss_fn = nn.CrossEntropyLoss()
    verdict = verify(model, loss_fn, *classes(), run=loop(loss_fn))
    assert verdict.equal and verdict.micro_batches == 3 and verdict.micro_batch_size == 4, str(verdict)


def test_a_loop_that_shuffles_copies_of_rows_is_followed() -> None:
    def run(model: Any, inputs: Tensor, targets: Tensor) -> None:
        for rows in (torch.arange(5, 10), torch.arange(0, 5)):
            (F.cross_entropy(model(inputs[rows]), targets[rows]) / 2).backward()

    assert verify(mlp(nn.Dropout(0.4)), F.cross_entropy, *classes(), run=run).equal


# ---- one cause each, and its near miss


def test_mean_of_means() -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    verdict = verify(mlp(), loss_fn, *batch, run=loop(loss_fn, weight=lambda k, n: 1 / 3))
    assert not verdict.equal and names(verdict) == ["mean of means"], str(verdict)
    assert "0.3333" in verdict.causes[0].found and "0.2" in verdict.causes[0].found
    assert verify(mlp(), loss_fn, *batch, run=loop(loss_fn, (5, 5), lambda k, n: 1 / 2)).equal


def test_mean_of_means_of_a_line() -> None:
    inputs = torch.arange(10.0)[:, None]
    batch = (inputs, 3 * inputs + torch.randn(10, 1))
    verdict = verify(nn.Linear(1, 1), F.mse_loss, *batch, run=loop(F.mse_loss, weight=lambda k, n: 1 / 3))
    assert names(verdict) == ["mean of means"], str(verdict)
    assert verify(nn.Linear(1, 1), F.mse_loss, *batch, run=loop(F.mse_loss)).equal


def test_clipping_inside_the_batch() -> None:
    def run(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        for rows, labels in zip(inputs.split(5), targets.split(5), strict=True):
            (F.cross_entropy(model(rows), labels) / 2).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.02)

    assert names(verify(mlp(), F.cross_entropy, *classes(), run=run)) == ["gradient changed"]


def test_missing_gradients() -> None:
    def run(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        F.cross_entropy(model(inputs), targets).backward()
        model[0].zero_grad()

    verdict = verify(mlp(), F.cross_entropy, *classes(), run=run)
    assert names(verdict) == ["missing gradient"] and "0.weight, 0.bias" in verdict.causes[0].found, str(verdict)
    unused = mlp()
    unused.head = nn.Identity()
    unused[0].register_parameter("spare", nn.Parameter(torch.ones(3)))
    assert verify(unused, F.cross_entropy, *classes(), run=loop(F.cross_entropy)).equal


def test_a_parameter_that_is_reached_more_than_once() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return contrastive(outputs * self.scale + outputs.detach().roll(1, 0), targets)

    loss_fn, sizes = Scaled(), (5, 5)

    def replay(model: Any, inputs: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            features = list(model(inputs).split(sizes))
        for k, rows in enumerate(inputs.split(sizes)):
            outputs = torch.cat([*features[:k], model(rows), *features[k + 1 :]])
            loss_fn(outputs, targets).backward()

    verdict = verify(mlp(), loss_fn, *classes(), run=replay)
    assert names(verdict) == ["wrong scale"] and "scale has 2 times its gradient" in verdict.causes[0].found


def test_mean_of_means_over_tokens() -> None:
    (ids, targets), model = tokens(), Tokens()
    by_samples = verify(model, F.cross_entropy, ids, targets, reduction="mean")
    assert not by_samples.equal and names(by_samples) == ["wrong shares"], str(by_samples)
    assert verify(model, F.cross_entropy, ids, targets).equal


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_wrong_scale(factor: float) -> None:
    loss_fn = nn.CrossEntropyLoss()
    verdict = verify(mlp(), loss_fn, *classes(), run=loop(loss_fn, weight=lambda k, n: factor * n / 10))
    assert names(verdict) == ["wrong scale"] and f"{factor:.4g} times" in verdict.causes[0].found


def test_lost_micro_batches() -> None:
    def run(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        for rows, labels in zip(inputs.split(SIZES), targets.split(SIZES), strict=True):
            model.zero_grad()
            (F.cross_entropy(model(rows), labels) * len(rows) / len(inputs)).backward()

    verdict = verify(mlp(), F.cross_entropy, *classes(), run=run)
    assert names(verdict) == ["lost micro-batches"] and "micro-batch 1, 2 of 3" in verdict.causes[0].found


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False)])
def test_batch_norm(norm: nn.Module) -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    verdict = verify(mlp(norm), loss_fn, *batch, run=loop(loss_fn))
    assert not verdict.equal and names(verdict) == ["batch norm"], str(verdict)
    assert verdict.causes[0].found.startswith("2 (BatchNorm1d)") and "the gradients agree" in verdict.causes[0].found
    local = verify(mlp(norm), loss_fn, *batch, batch_norm="local")
    assert not local.equal and names(local) == ["batch norm"], str(local)
    wrapped = verify(MicroBatched(mlp(norm), 4, batch_norm="local"), loss_fn, *batch)
    assert not wrapped.equal and names(wrapped) == ["batch norm"], str(wrapped)


class Spread(nn.Module):
    """Hands every sample how much the batch varies, as discriminators do."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows * rows.std(0).mean()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.BatchNorm1d(8, momentum=None), Functional()])
def test_batch_norm_over_the_whole_batch_is_proved(norm: nn.Module) -> None:
    model, loss_fn, batch = mlp(norm, nn.Dropout(0.5)), nn.CrossEntropyLoss(), classes()
    for verdict in (
        verify(model, loss_fn, *batch, micro_batch_size=3),
        verify(MicroBatched(model, 3), loss_fn, *batch),
        verify(model, contrastive, *batch, micro_batch_size=3),
    ):
        assert verdict.equal and verdict.micro_batches == 4 and not verdict.causes, str(verdict)


def test_statistics_that_forget_a_piece_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    together = joint_norm.together
    monkeypatch.setattr(joint_norm, "together", lambda counts, found: together(counts[:-1], found[:-1]))
    assert not verify(mlp(nn.BatchNorm1d(8)), nn.CrossEntropyLoss(), *classes()).equal


@pytest.mark.parametrize("layer", [Centred(), Spread(), nn.Softmax(0)])
def test_a_layer_that_ties_samples_is_found_behind_a_batch_norm_that_is_exact(layer: nn.Module) -> None:
    verdict = verify(mlp(nn.BatchNorm1d(8), layer), nn.CrossEntropyLoss(), *classes(), micro_batch_size=3)
    assert not verdict.equal and names(verdict) == ["samples tied by a layer"], str(verdict)
    assert type(layer).__name__ in verdict.causes[0].found


def test_batch_norm_is_not_blamed_for_what_it_did_not_do() -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    assert verify(mlp(nn.BatchNorm1d(8)).eval(), loss_fn, *batch).equal
    whole = verify(mlp(nn.BatchNorm1d(8)), loss_fn, *batch, run=loop(loss_fn, (10,), lambda k, n: 0.5))
    assert names(whole) == ["wrong scale"], str(whole)


def test_batch_norm_and_a_wrong_mean_are_both_found() -> None:
    loss_fn = nn.CrossEntropyLoss()
    verdict = verify(mlp(nn.BatchNorm1d(8)), loss_fn, *classes(), run=loop(loss_fn, weight=lambda k, n: 1 / 3))
    assert names(verdict) == ["batch norm", "mean of means"], str(verdict)


def test_samples_tied_by_the_loss() -> None:
    batch = classes()
    verdict = verify(mlp(), contrastive, *batch, run=loop(contrastive))
    assert not verdict.equal and names(verdict) == ["samples tied by the loss"], str(verdict)
    assert names(verify(mlp(), contrastive, *batch, reduction="mean")) == ["samples tied by the loss"]
    assert verify(MicroBatched(mlp(), 4), contrastive, *batch).equal


def test_samples_tied_by_a_layer() -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    for verdict in (
        verify(mlp(Centred()), loss_fn, *batch),
        verify(MicroBatched(mlp(Centred()), 4), loss_fn, *batch),
        verify(mlp(Centred()), loss_fn, *batch, run=loop(loss_fn)),
    ):
        assert not verdict.equal and names(verdict) == ["samples tied by a layer"], str(verdict)
        assert verdict.causes[0].found.startswith("2 (Centred)")
    assert verify(mlp(nn.LayerNorm(8)), loss_fn, *batch).equal


def test_buffers() -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    verdict = verify(mlp(Counting()), loss_fn, *batch, run=loop(loss_fn))
    assert not verdict.equal and verdict.difference <= verdict.bound and names(verdict) == ["buffers"], str(verdict)
    assert "2.steps moved 3 times" in verdict.causes[0].found and "2.average" in verdict.causes[0].found
    assert verify(mlp(Counting()), loss_fn, *batch, run=loop(loss_fn, (10,))).equal
    assert verify(mlp(Counting()), loss_fn, *batch).equal


def test_weights_that_move_inside_the_batch() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inner = loop(loss_fn)

    def run(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
        inner(model, inputs, targets)
        optimizer.step()

    before = copy.deepcopy(model.state_dict())
    verdict = verify(model, loss_fn, *classes(), run=run)
    assert names(verdict) == ["weights moved"] and not verdict.equal, str(verdict)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


class Drawn(nn.Module):
    """Draws by Python's random, which no mask can be shared for."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows * random.choice([0.5, 1.0, 1.5])


class Permuted(nn.Module):
    """Adds noise whose shape does not follow the samples."""

    def forward(self, rows: Tensor) -> Tensor:
        return rows + torch.randn(len(rows) * len(rows) + 1).mean()


def test_randomness() -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    state = random.getstate()
    verdict = verify(mlp(Drawn()), loss_fn, *batch, micro_batch_size=1)
    assert not verdict.equal and names(verdict) == ["randomness"] and "Python" in verdict.causes[0].found, str(verdict)
    assert random.getstate() == state
    verdict = verify(mlp(Permuted()), loss_fn, *batch)
    assert not verdict.equal and names(verdict) == ["randomness"] and "aten::randn" in verdict.causes[0].found


def test_dropout_that_cannot_be_followed_is_switched_off() -> None:
    def run(model: Any, inputs: Tensor, targets: Tensor) -> None:
        for rows in (torch.arange(0, 10, 2), torch.arange(1, 10, 2)):  # no stretch of the batch
            (F.cross_entropy(model(inputs[rows]), targets[rows]) / 2).backward()

    verdict = verify(mlp(nn.Dropout(0.4)), F.cross_entropy, *classes(), run=run)
    assert verdict.equal and "dropout off" in verdict.notes[0], str(verdict)


ticks = itertools.count()


class Restless(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * (1 + next(ticks) % 7)


def test_a_model_that_differs_from_itself() -> None:
    verdict = verify(mlp(Restless()), nn.CrossEntropyLoss(), *classes())
    assert not verdict.equal and names(verdict) == ["not deterministic"], str(verdict)


def test_a_batch_without_a_finite_gradient() -> None:
    inputs, targets = classes()
    inputs[3] = torch.inf
    verdict = verify(mlp(), nn.CrossEntropyLoss(), inputs, targets)
    assert not verdict.equal and names(verdict)[0] == "not finite"
    json.dumps(verdict.to_dict(), allow_nan=False)


def test_a_batch_without_targets_or_too_small_to_split() -> None:
    inputs, _ = classes()
    verdict = verify(mlp(), nn.CrossEntropyLoss(), inputs, torch.full((10,), -100))
    assert verdict.equal and "loss is nan" in verdict.notes[-1], str(verdict)
    verdict = verify(mlp(), nn.CrossEntropyLoss(), inputs[:1], torch.zeros(1, dtype=torch.long))
    assert verdict.equal and "nothing was split" in verdict.notes[0]


# ---- tensors and state beside parameters and buffers


def with_temperature(temperature: Any) -> Any:
    return lambda outputs, targets: contrastive(outputs * temperature.exp() + outputs.detach().roll(1, 0), targets)


scale_of_this_file = torch.tensor(0.5, requires_grad=True)


def by_global(outputs: Tensor, targets: Tensor) -> Tensor:
    return contrastive(outputs * scale_of_this_file + outputs.detach().roll(1, 0), targets)


class Loose(nn.Module):
    """Keeps a tensor that is no parameter, and hides a layer in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(6, 8), torch.ones(8, requires_grad=True)
        self.hidden = [nn.Linear(8, 3)]

    def forward(self, rows: Tensor) -> Tensor:
        return self.hidden[0](self.layer(rows) * self.factor)


def replay_of(loss_fn: Any, times: float = 1.0) -> Any:
    """The full loss once for every micro-batch (GradCache without a cache): what the loss holds gets it twice."""

    def run(model: Any, inputs: Tensor, targets: Tensor) -> None:
        with torch.no_grad():
            features = list(model(inputs).split(5))
        for k, rows in enumerate(inputs.split(5)):
            loss_fn(torch.cat([*features[:k], model(rows), *features[k + 1 :]]), targets).backward()

    def right(model: Any, inputs: Tensor, targets: Tensor) -> None:
        loss_fn(torch.cat([model(rows) for rows in inputs.split(5)]), targets).backward()

    return run if times == 2.0 else right


def test_a_loose_temperature_is_copied_and_judged() -> None:
    temperature = torch.tensor(0.5, requires_grad=True)
    temperature.grad = torch.tensor(7.0)
    held = temperature.grad
    for loss_fn, name in ((with_temperature(temperature), "temperature"), (by_global, "scale_of_this_file")):
        twice = verify(mlp(), loss_fn, *classes(), run=replay_of(loss_fn, times=2.0))
        assert names(twice) == ["wrong scale"] and f"{name} has 2 times" in twice.causes[0].found, str(twice)
        assert verify(mlp(), loss_fn, *classes(), run=replay_of(loss_fn)).equal
        for verdict in (verify(MicroBatched(mlp(), 4), loss_fn, *classes()), verify(mlp(), loss_fn, *classes())):
            assert verdict.equal and verdict.dtype == torch.float64, str(verdict)
    assert temperature.grad is held and held == 7.0 and scale_of_this_file.grad is None
    assert temperature.dtype == torch.float32


@pytest.mark.parametrize("kind", ["partial", "default", "list", "dict"])
def test_a_loose_temperature_is_found_wherever_it_is_kept(kind: str) -> None:
    temperature = torch.tensor(0.5, requires_grad=True)
    kept = {"list": [temperature], "dict": {"rate": (temperature,)}}.get(kind)

    def scaled(outputs: Tensor, targets: Tensor, rate: Tensor = temperature) -> Tensor:
        rate = rate if kept is None else kept[0] if isinstance(kept, list) else kept["rate"][0]
        return F.cross_entropy(outputs * rate, targets)

    loss_fn = functools.partial(scaled, rate=temperature) if kind == "partial" else scaled

    def run(model: Any, inputs: Tensor, targets: Tensor) -> None:
        loss_fn(model(inputs), targets).backward()
        temperature.grad = None

    lost = verify(mlp(), loss_fn, *classes(), run=run)
    assert names(lost) == ["missing gradient"], str(lost)
    assert verify(mlp(), loss_fn, *classes()).equal and temperature.grad is None


def test_a_loose_tensor_that_no_copy_reaches_is_guarded() -> None:
    class Kept:
        def __init__(self) -> None:
            self.rate = torch.tensor(0.5, requires_grad=True)

    kept = Kept()
    with pytest.raises(ModelError, match="rate"):
        verify(mlp(), lambda outputs, targets: F.cross_entropy(outputs * kept.rate, targets), *classes())
    assert kept.rate.grad is None
    rate = torch.tensor(0.5, requires_grad=True)
    power = rate.exp()  # a graph of the user's own, in front of the proof
    with pytest.raises(ModelError, match="power"):
        verify(mlp(), lambda outputs, targets: F.cross_entropy(outputs * power, targets), *classes())
    assert rate.grad is None


def test_loose_tensors_and_layers_hidden_in_a_module() -> None:
    model, batch = Loose(), classes()
    for forgotten, name in ((lambda m: m.factor, "factor"), (lambda m: m.hidden[0].weight, "hidden[0].weight")):

        def run(model: Any, inputs: Tensor, targets: Tensor, forgotten: Any = forgotten) -> None:
            F.cross_entropy(model(inputs), targets).backward()
            forgotten(model).grad = None

        verdict = verify(model, F.cross_entropy, *batch, run=run)
        assert names(verdict) == ["missing gradient"] and name in verdict.causes[0].found, str(verdict)
    for verdict in (verify(model, F.cross_entropy, *batch), verify(MicroBatched(model, 4), F.cross_entropy, *batch)):
        assert verdict.equal and verdict.dtype == torch.float64, str(verdict)
    assert model.factor.grad is None and model.hidden[0].weight.grad is None


def test_two_modules_of_one_class_are_both_compared() -> None:
    left, right, third = (nn.Linear(6, 3) for _ in range(3))

    def step(rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(left(rows) + right(rows) + third(rows), labels)

    def run(step: Any, inputs: Any, _: Any) -> None:
        step(*inputs).backward()
        right.weight.grad = None

    verdict = verify(step, None, classes(), run=run, reduction="mean")
    assert names(verdict) == ["missing gradient"] and "right.weight" in verdict.causes[0].found, str(verdict)


def test_a_returned_loss_that_is_not_the_batchs_is_noted() -> None:
    right = loop(F.cross_entropy)
    batch = classes()

    def run(model: Any, inputs: Tensor, targets: Tensor) -> float:
        return 4 * right(model, inputs, targets)

    verdict = verify(mlp(), F.cross_entropy, *batch, run=run)
    assert verdict.equal and any("the loop returned" in note for note in verdict.notes), str(verdict)
    assert not verify(mlp(), F.cross_entropy, *batch, run=right).notes


class Noisy(nn.Module):
    """Multiplies by noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, rows: Tensor) -> Tensor:
        return rows * torch.rand(rows.shape, generator=self.generator, dtype=rows.dtype)


def test_a_second_forward_that_draws_other_numbers_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = mlp(Noisy()), classes()
    state = model[2].generator.get_state()
    for activations in ("recompute", "keep"):
        verdict = verify(MicroBatched(model, 4, activations=activations), F.cross_entropy, *batch)
        assert verdict.equal, str(verdict)
    assert verify(model, contrastive, *batch).equal and verify(model, F.cross_entropy, *batch).equal
    assert torch.equal(model[2].generator.get_state(), state)
    own = verify(model, F.cross_entropy, *batch, run=loop(F.cross_entropy))
    assert own.equal and "shared numbers" in own.notes[-1], str(own)
    monkeypatch.setattr(replay, "generators_of", lambda inner: [])
    assert not verify(MicroBatched(model, 4), F.cross_entropy, *batch).equal


class PlainAverage(nn.Module):
    """Keeps a moving average, and a cache of its last mean, as plain attributes."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum, self.average = momentum, torch.ones(8)

    def forward(self, rows: Tensor) -> Tensor:
        self.average = self.momentum * self.average + (1 - self.momentum) * rows.detach().mean(0)
        return rows


def test_plain_attributes_that_are_handed_on_are_compared() -> None:
    right, batch = loop(F.cross_entropy), classes()
    verdict = verify(mlp(PlainAverage(0.9)), F.cross_entropy, *batch, run=right)
    assert names(verdict) == ["buffers"] and "2.average (a plain attribute)" in verdict.causes[0].found, str(verdict)
    assert verify(mlp(PlainAverage(0.9)), F.cross_entropy, *batch, run=loop(F.cross_entropy, (10,))).equal
    assert verify(mlp(PlainAverage(0.0)), F.cross_entropy, *batch, run=right).equal  # made anew by every forward


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ModelError, match="nothing that requires a gradient, with gradients on"):
        verify(mlp().requires_grad_(False), F.cross_entropy, *classes())
    with torch.no_grad(), pytest.raises(ModelError, match="switched off"):
        verify(mlp(), F.cross_entropy, *classes())
    partly = mlp()
    partly[0].requires_grad_(False)
    assert verify(partly, F.cross_entropy, *classes()).equal


@pytest.mark.parametrize("samples", [10, 9])
def test_a_mean_that_is_taken_for_a_sum_has_the_wrong_scale(samples: int) -> None:
    batch = classes(samples)
    verdict = verify(mlp(), F.cross_entropy, *batch, reduction="sum")
    assert names(verdict) == ["wrong scale"], str(verdict)
    assert verify(mlp(), F.cross_entropy, *batch, reduction="mean").equal


# ---- the bound


def random_case(seed: int) -> tuple[nn.Module, Any, Tensor, Tensor]:
    torch.manual_seed(seed)
    samples, kind, width = 5 + seed % 7, seed % 4, 2 * (1 + seed % 5)
    targets = torch.randint(0, 3, (samples,))
    if kind == 0:
        model: nn.Module = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 3))
        return model, nn.CrossEntropyLoss(), torch.randn(samples, 6) * 10 ** (seed % 3), targets
    if kind == 1:
        model = nn.Sequential(nn.Conv2d(1, width, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return model, nn.MSELoss(), torch.randn(samples, 1, 5, 5), torch.randn(samples, width)
    recurrent = kind == 2
    ids = torch.randint(0, 11, (samples, 4))
    return Tokens(recurrent), nn.CrossEntropyLoss(), ids, torch.randint(0, 11, (samples, 4))


@pytest.mark.parametrize("start", range(0, 200, 25))
def test_the_bound_is_wide_enough(start: int) -> None:
    for seed in range(start, start + 25):
        verdict = verify(*random_case(seed))
        assert verdict.equal and verdict.bound < 1e-9, f"{seed}\n{verdict}"


@pytest.mark.parametrize("seed", range(8))
def test_the_bound_is_narrow_enough(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    backward = Accumulator.backward

    def sabotaged(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        loss = backward(self, *args, **kwargs)
        list(self.model.parameters())[-1].grad *= 1 + 1e-6
        return loss

    monkeypatch.setattr(Accumulator, "backward", sabotaged)
    model, loss_fn, inputs, targets = random_case(seed)
    verdict = verify(model, loss_fn, inputs, targets)
    name = [name for name, _ in model.named_parameters()][-1]
    assert not verdict.equal and verdict.worst_parameter == name and names(verdict) == ["wrong scale"], str(verdict)
    assert f"{name} has 1.000001 times its gradient" in verdict.causes[0].found
    assert 1e-10 < verdict.difference < 1.01e-6


@pytest.mark.parametrize("layer", [FixedFloat(), InsideFloat()], ids=["cannot run in float64", "float32 inside"])
def test_a_float32_model_is_judged_in_float32(layer: nn.Module) -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    verdict = verify(mlp(layer), loss_fn, *batch)
    assert verdict.equal and verdict.dtype == torch.float32, str(verdict)
    assert 1e-7 < verdict.bound < 1e-3 and any("float" in note for note in verdict.notes)
    wrong = verify(mlp(layer), loss_fn, *batch, run=loop(loss_fn, weight=lambda k, n: 1.01 * n / 10))
    assert not wrong.equal and names(wrong) == ["wrong scale"], str(wrong)


def test_a_model_that_asks_for_float32_by_name_is_judged_in_float64() -> None:
    loss_fn, batch = nn.CrossEntropyLoss(), classes()
    for verdict in (
        verify(mlp(NamesFloat()), loss_fn, *batch),
        verify(MicroBatched(mlp(NamesFloat()), 4), loss_fn, *batch),
        verify(mlp(NamesFloat()), loss_fn, *batch, run=loop(loss_fn)),
    ):
        assert verdict.equal and verdict.dtype == torch.float64 and verdict.bound < 1e-12, str(verdict)


# ---- the user's own things


def test_everything_is_left_as_it_was() -> None:
    model, loss_fn = mlp(nn.BatchNorm1d(8), nn.Dropout(0.3), Counting()), nn.CrossEntropyLoss()
    model[4].eval()
    inputs, targets = classes()
    loss_fn(model(inputs), targets).backward()
    before, batch = copy.deepcopy(model), (inputs.clone(), targets.clone())
    held = [parameter.grad for parameter in model.parameters()]
    generator, modes = torch.get_rng_state(), [module.training for module in model.modules()]
    verify(model, loss_fn, inputs, targets, batch_norm="local")
    verify(model, loss_fn, inputs, targets, run=loop(loss_fn))
    assert all(p.grad is g for p, g in zip(model.parameters(), held, strict=True))
    for (name, now), then in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        assert torch.equal(now, then) and now.dtype == then.dtype, name
    assert torch.equal(torch.get_rng_state(), generator) and modes == [m.training for m in model.modules()]
    assert torch.equal(inputs, batch[0]) and torch.equal(targets, batch[1])


def test_functions_are_run_on_copies() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()
    inputs, targets = classes()

    def training_step(rows: Tensor, labels: Tensor) -> Tensor:
        return loss_fn(model(rows), labels)

    assert verify(training_step, None, (inputs, targets), reduction="mean").equal

    def run(_: Any, inputs: Tensor, targets: Tensor) -> None:
        model.zero_grad()
        loss_fn(model(inputs), targets).backward()

    assert verify(model, loss_fn, inputs, targets, run=run).equal
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_reached_past_the_copies_is_refused() -> None:
    model, loss_fn = mlp(), nn.CrossEntropyLoss()

    class Home:
        hidden = model

    def run(_: Any, inputs: Tensor, targets: Tensor) -> None:
        loss_fn(Home.hidden.float()(inputs.float()), targets).backward()

    with pytest.raises(ModelError, match="parameters of the model itself"):
        verify(model, loss_fn, *classes(), run=run)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_cannot_be_copied_is_refused() -> None:
    model = mlp()
    model.lock = (row for row in range(3))
    with pytest.raises(ModelError, match="copy of the Sequential"):
        verify(model, nn.CrossEntropyLoss(), *classes())


def test_refusals_pass_through() -> None:
    with pytest.raises(OptionError, match="batch_norm"):
        verify(mlp(), nn.CrossEntropyLoss(), *classes(), batch_norm="maybe")
    with pytest.raises(OptionError, match="split was given"):
        verify(MicroBatched(mlp(), 4), nn.CrossEntropyLoss(), *classes(), split=["x"])
    with pytest.raises(OptionError, match="cuts by itself"):
        verify(mlp(), nn.CrossEntropyLoss(), *classes(), run=loop(F.cross_entropy), micro_batch_size=3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        verify(mlp(), nn.CrossEntropyLoss(), torch.randn(10, 5), torch.randint(0, 3, (10,)))


def test_a_stated_count_and_a_loss_scale() -> None:
    ids, targets = tokens()

    def summed(outputs: Tensor, labels: Tensor, count: Tensor) -> Tensor:
        return F.cross_entropy(outputs, labels, reduction="sum") / count

    def count(_: Any, labels: Tensor) -> Tensor:
        return (labels != -100).sum()

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    verdict = verify(Tokens(), summed, ids, targets, reduction=count, scaler=scaler, autocast=torch.bfloat16)
    assert verdict.equal, str(verdict)


def test_the_verdict_is_a_table_and_json() -> None:
    loss_fn = nn.CrossEntropyLoss()
    verdict = verify(mlp(), loss_fn, *classes(), run=loop(loss_fn, weight=lambda k, n: 1 / 3))
    text = str(verdict)
    assert "NOT equal" in text and "Higham" in text and "cause: mean of means" in text and "terms" in text
    plain = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert plain["equal"] is False and plain["causes"][0]["name"] == "mean of means" and plain["dtype"] == "float64"


@pytest.mark.parametrize("size", ["auto", 20])
def test_a_wrapper_whose_size_splits_nothing_is_judged_with_a_chosen_one(size: Any) -> None:
    model = MicroBatched(mlp(nn.Dropout(0.3)), size)
    verdict = verify(model, contrastive, *classes())
    assert verdict.equal
    assert any("micro_batch_size=4 was chosen" in note for note in verdict.notes)
    assert model._door.micro_batch_size == size
    assert model._door.sizer.tuner.windows == 0  # it was a copy that ran


def test_a_wrapper_with_an_automatic_size_is_found_out_too() -> None:
    verdict = verify(MicroBatched(mlp(Centred()), "auto"), contrastive, *classes())
    assert not verdict.equal
    assert verify(MicroBatched(mlp(Centred()), "auto"), contrastive, *classes(1)).notes  # one sample: nothing is split


def test_an_automatic_size_is_judged_at_the_size_that_it_chooses() -> None:
    model, loss_fn, (x, y) = mlp(), nn.CrossEntropyLoss(), classes()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    for options in ({"micro_batch_size": "auto", "memory": 5 * weights}, {"memory": 5 * weights}):
        verdict = verify(model, loss_fn, x, y, **options)
        assert verdict.equal and 1 <= verdict.micro_batch_size < len(x), str(verdict)
        assert f"micro_batch_size={verdict.micro_batch_size} was chosen automatically" in verdict.notes
    free = verify(model, loss_fn, x, y, micro_batch_size="auto")
    assert free.equal and any(f"as the automatic {len(x)} would not split" in note for note in free.notes)
    assert not verify(mlp(Centred()), loss_fn, x, y, micro_batch_size="auto").equal
    wrapped = verify(MicroBatched(mlp(), memory=5 * weights), contrastive, x, y, micro_batch_size="auto")
    assert wrapped.equal and wrapped.micro_batch_size < len(x)


def test_a_budget_for_a_number_is_refused_by_a_proof_too() -> None:
    with pytest.raises(OptionError, match="a budget only guides the automatic size"):
        verify(mlp(), nn.CrossEntropyLoss(), *classes(), micro_batch_size=4, memory="1GiB")
    with pytest.raises(OptionError, match="memory='much'"):
        verify(mlp(), nn.CrossEntropyLoss(), *classes(), micro_batch_size="auto", memory="much")
