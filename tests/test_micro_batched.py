"""Door 2: any loss on a wrapped model has the whole batch's gradient, and nothing else shows that it is wrapped."""

from __future__ import annotations

import copy
import io
import pickle
import random
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch import MicroBatched
from bigbatch.core.live import Live
from bigbatch.core.rng import Draws
from bigbatch.engines import recompute
from bigbatch.errors import ModelError, OptionError, SplitError
from bigbatch.fit.budget import affordable

N, D, H = 10, 4, 3
ACTIVATIONS = ("recompute", "offload", "keep")


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(D, 6), nn.Dropout(0.0), nn.Linear(6, H)
        self.log_temperature = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.double()

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return F.normalize(self.last(self.drop(self.first(x).tanh())) * scale, dim=1)

    def twice(self) -> float:
        return 2 * self.log_temperature.item()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(N, D, dtype=torch.float64)


def info_nce(left: Tensor, right: Tensor, log_temperature: Tensor) -> Tensor:
    logits = log_temperature.exp() * left @ right.T
    return F.cross_entropy(logits, torch.arange(len(left))) + F.cross_entropy(logits.T, torch.arange(len(left)))


def grads(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def counted(model: nn.Module) -> list[int]:
    """Samples of every forward that begins."""
    calls: list[int] = []
    model.register_forward_pre_hook(lambda module, inputs: calls.append(len(inputs[0])))
    return calls


# --- Gradients


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 3, 4, N, N + 5])
def test_two_towers_and_a_temperature(size: int, activations: str, x: Tensor) -> None:
    left, right = Tower(), Tower()
    y = torch.randn_like(x)
    info_nce(left(x), right(y), left.log_temperature).backward()
    expected = grads(left), grads(right)
    left.zero_grad(), right.zero_grad()
    wrapped = [MicroBatched(model, size, activations=activations) for model in (left, right)]
    info_nce(wrapped[0](x), wrapped[1](y), wrapped[0].log_temperature).backward()
    close((grads(left), grads(right)), expected)
    assert "log_temperature" in expected[0] and "log_temperature" not in expected[1]


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_one_tower_twice_in_one_loss(activations: str, x: Tensor) -> None:
    plain, model = Tower(), Tower()
    model.load_state_dict(plain.state_dict())
    y = torch.randn_like(x)
    info_nce(plain(x), plain(y), plain.log_temperature).backward()
    wrapped = MicroBatched(model, 4, activations=activations)
    info_nce(wrapped(x), wrapped(y), wrapped.log_temperature).backward()
    close(grads(model), grads(plain))
    assert model.calls == plain.calls == 2


def test_a_loss_of_each_micro_batch_is_caught(x: Tensor) -> None:
    model, y = Tower(), torch.randn_like(x)
    info_nce(model(x), model(y), model.log_temperature).backward()
    expected = grads(model)
    model.zero_grad()
    for a, b in zip(x.split(5), y.split(5), strict=True):
        (info_nce(model(a), model(b), model.log_temperature) / 2).backward()
    with pytest.raises(AssertionError):
        close(grads(model), expected)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_two_backwards_through_a_graph_that_is_kept(activations: str, x: Tensor) -> None:
    model = Tower()
    outputs = model(x)
    (outputs.std(0).sum() + outputs.exp().prod()).backward()
    expected = grads(model)
    model.zero_grad()
    outputs = MicroBatched(model, 4, activations=activations)(x)
    outputs.std(0).sum().backward(retain_graph=True)
    outputs.exp().prod().backward()
    close(grads(model), expected)
    assert model.calls == 2


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_a_second_derivative(activations: str, x: Tensor) -> None:
    model, rows = Tower(), x.clone().requires_grad_()

    def penalty(forward: Any) -> dict[str, Tensor]:
        model.zero_grad()
        (slope,) = torch.autograd.grad(forward(rows).sin().sum(), rows, create_graph=True)
        slope.square().sum().backward()
        return grads(model)

    expected = penalty(model)
    close(penalty(MicroBatched(model, 4, activations=activations)), expected)


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_inputs_that_require_a_gradient_get_it(activations: str, x: Tensor) -> None:
    model, rows = Tower(), x.clone().requires_grad_()
    model(rows.tanh()).std(0).sum().backward()
    expected, rows.grad = rows.grad, None
    MicroBatched(model, 3, activations=activations)(rows.tanh()).std(0).sum().backward()
    close(rows.grad, expected)


def test_masks_of_the_whole_batch_are_replayed_in_the_second_forward(x: Tensor) -> None:
    model, draws = Tower(), Draws()
    model.drop.p = 0.5
    with draws.record(N):
        outputs = model(x)
    outputs.std(0).sum().backward()
    expected = grads(model)
    model.zero_grad()
    wrapped = MicroBatched(model, 3)
    wrapped._door.around = lambda piece: draws.replay(piece.first, piece.first + piece.samples)
    wrapped(x).std(0).sum().backward()
    close(grads(model), expected)
    model.zero_grad()
    wrapped._door.around = None
    wrapped(x).std(0).sum().backward()
    with pytest.raises(AssertionError):
        close(grads(model), expected)


def test_a_model_that_writes_to_its_inputs(x: Tensor) -> None:
    """Its second forward finds the inputs as the first one did, on a batch as wide as a micro-batch is long too."""

    class Writes(Tower):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            return super().forward(x.mul_(2).add_(1))

    model = Writes()
    outputs = model(x.clone())
    outputs.std(0).sum().backward()
    expected = outputs.detach(), grads(model)
    for size in (H, 4):
        for options in ({}, {"activations": "keep"}, {"keep_bytes": 2000}):
            model.zero_grad()
            outputs = MicroBatched(model, size, **options)(x.clone())
            outputs.std(0).sum().backward()
            close((outputs.detach(), grads(model)), expected)


@pytest.mark.parametrize("source", ["random", "numpy"])
def test_random_numbers_from_outside_torch_are_replayed(source: str, x: Tensor) -> None:
    numpy = pytest.importorskip("numpy")

    class Jitter(Tower):
        def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
            draw = random.random() if source == "random" else numpy.random.rand()
            return super().forward(x * (1 + draw), scale)

    model = Jitter()
    ends = []
    for forward in (lambda rows: torch.cat([model(part) for part in rows.split([4, 3, 3])]), MicroBatched(model, 4),
                    MicroBatched(model, 4, keep_bytes=500)):  # fmt: skip
        model.zero_grad()
        random.seed(3), numpy.random.seed(3)
        forward(x).std(0).sum().backward()
        ends.append((grads(model), random.random(), numpy.random.rand()))
    close(ends[1:], [ends[0], ends[0]])


def test_weights_that_change_before_the_backward_are_refused(x: Tensor) -> None:
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs = MicroBatched(model, 4)(x)
    outputs.sum().backward(retain_graph=True)
    outputs.std(0).sum().backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(ModelError, match="run every backward before the step"):
        outputs.sum().backward()


def test_weights_that_a_forward_writes_itself_are_no_fault() -> None:
    """An embedding with `max_norm` shortens its rows in the forward."""
    ids = torch.randint(0, 7, (N, 2))
    ends = []
    for size in (None, 4):
        torch.manual_seed(1)
        model: nn.Module = nn.Embedding(7, 5, max_norm=1.0, dtype=torch.float64)
        outputs = model(ids) if size is None else MicroBatched(model, size)(ids)
        outputs.std(0).sum().backward()
        ends.append((model.weight.detach(), model.weight.grad))
    close(ends[1], ends[0])


# --- Outputs


@dataclass
class Record:
    vectors: Tensor
    extra: dict[str, Any]
    name: str = "record"


class Row(NamedTuple):
    vectors: Tensor
    squares: Tensor | None


class Returns(Tower):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        y = super().forward(x)
        if self.kind == "ModelOutput":
            from transformers.modeling_outputs import BaseModelOutput

            return BaseModelOutput(last_hidden_state=y, hidden_states=(y * 2, y * 3))
        kinds = {
            "dict": {"a": y, "b": {"c": y.square()}},
            "dataclass": Record(y, {"c": y.square(), "none": None, "number": 3}),
            "named tuple": Row(y, None),
            "tuple": (y, y.square(), "note"),
            "one item a sample": [{"scores": row[: 1 + int(row[0] > 0)]} for row in y],
            "0-d": (y, y.mean()),
            "similarity": y @ y.T,
            "similarity inside": {"y": y, "s": (y @ y.T)[:, :, None]},
            "scalar": y.mean().item(),
            "list of fields": [y, y.square()],
        }
        return kinds[self.kind]


def parts(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(vars(tree) if isinstance(tree, Record) else tree)
            if isinstance(leaf, Tensor)]  # fmt: skip


KINDS = ["dict", "dataclass", "named tuple", "tuple", "ModelOutput", "list of fields"]


@pytest.mark.parametrize("kind", KINDS)
def test_output_structures(kind: str, x: Tensor) -> None:
    if kind == "ModelOutput":
        pytest.importorskip("transformers")
    model = Returns(kind)
    whole = model(x)
    sum(part.std(0).sum() for part in parts(whole)).backward()
    expected = grads(model)
    model.zero_grad()
    found = MicroBatched(model, 4)(x)
    assert type(found) is type(whole)
    close([part.detach() for part in parts(found)], [part.detach() for part in parts(whole)])
    sum(part.std(0).sum() for part in parts(found)).backward()
    close(grads(model), expected)
    if kind == "ModelOutput":
        assert found.last_hidden_state is found["last_hidden_state"] and found.keys() == whole.keys()


@pytest.mark.parametrize(("kind", "size"), [("one item a sample", 4), ("list of fields", 2), ("list of fields", 1)])
def test_lists_are_read_in_the_one_way_that_fits_or_refused(kind: str, size: int, x: Tensor) -> None:
    model = Returns(kind)
    if kind == "list of fields" and size == 2:
        with pytest.raises(SplitError, match="2 samples or 2 fields"):
            MicroBatched(model, size)(x)
        return
    found = MicroBatched(model, size)(x)
    assert len(found) == len(model(x))
    close(parts(found), parts(model(x)))


@pytest.mark.parametrize(
    ("kind", "match"),
    [("0-d", r"outputs\[1\] has shape \(\)"), ("scalar", "outputs is "), ("similarity", "behind the first axis"),
     ("similarity inside", r"outputs\.s has the shapes")],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 3, 5])
def test_outputs_that_cannot_be_joined_are_refused_by_name(kind: str, match: str, size: int, x: Tensor) -> None:
    """Also where all micro-batches are of one size, so that every part has the same shape."""
    model = Returns(kind)
    with pytest.raises(SplitError, match=match):
        MicroBatched(model, size)(x)
    assert model.calls == 0


def test_a_joined_similarity_is_what_the_probe_prevents(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    monkeypatch.setattr(recompute, "refuse_tied_axes", lambda *arguments: None)
    assert MicroBatched(Returns("similarity"), 5)(x).shape == (N, 5)


# --- Memory and time


@pytest.mark.parametrize("training", [True, False])
def test_eval_and_no_grad_run_in_micro_batches_too(training: bool, x: Tensor) -> None:
    model = Tower().train(training)
    calls, wrapped = counted(model), MicroBatched(model, 4)
    with torch.no_grad():
        found = wrapped(x)
    assert calls == [4, 3, 3] and not found.requires_grad
    close(found, model(x).detach())
    with torch.inference_mode():
        close(wrapped(x), found)
    assert model.calls == 3


@pytest.mark.parametrize(
    ("keep", "calls"), [(None, [4, 3, 3, 3, 3, 4]), (0, [4, 3, 3, 3, 3, 4]), (3, [4, 3, 3, 3, 4]), (6, [4, 3, 3, 4]),
                        (10, [4, 3, 3])]
)  # fmt: skip
def test_keep_bytes_keeps_the_last_micro_batches(keep: int | None, calls: list[int], x: Tensor) -> None:
    model = Tower()
    wrapped = MicroBatched(model, 4, keep_bytes=keep)
    wrapped._door.sample_bytes = 1.0
    found = counted(model)
    wrapped(x).std(0).sum().backward()
    assert found == calls


def test_keep_bytes_measures_once_and_moves_nothing(x: Tensor) -> None:
    model = Tower()
    found, before = counted(model), torch.get_rng_state()
    model.drop.p = 0.3
    wrapped = MicroBatched(model, 4, keep_bytes="1 MiB")
    wrapped(x).std(0).sum().backward()
    assert found == [4, 4, 3, 3] and model.calls == 1
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    for rows in x.split([4, 3, 3]):
        model(rows)
    assert torch.equal(after, torch.get_rng_state())
    found.clear()
    wrapped(x)
    assert found == [4, 3, 3]
    # tanh and its input, a mask, the norm: the measure is of the right size.
    assert 4 * 8 * (6 + H) <= wrapped._door.sample_bytes * 4 <= 4 * 8 * (6 * 4 + H * 8)


def test_recomputing_frees_what_keeping_keeps() -> None:
    model, x = (
        nn.Sequential(*(layer for _ in range(20) for layer in (nn.Linear(8, 8), nn.Tanh()))),
        torch.randn(64, 50, 8),
    )
    peaks = {}
    for activations in ("recompute", "keep"):
        with Live() as live:
            MicroBatched(model, 4, activations=activations)(x).mean(1).std(0).sum().backward()
        peaks[activations] = live.peak_bytes
    assert peaks["recompute"] < peaks["keep"] / 3


# --- As if the wrapper were not there


def test_it_stands_aside(x: Tensor) -> None:
    model = Tower()
    wrapped = MicroBatched(model, 4)
    assert isinstance(wrapped, nn.Module)
    assert wrapped.first is model.first and wrapped.twice() == model.twice() and wrapped.training
    assert wrapped.state_dict().keys() == model.state_dict().keys()
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert list(wrapped.parameters())[0] is list(model.parameters())[0]
    wrapped.eval()
    assert not model.training and not model.drop.training
    wrapped.train()
    assert model.training and model.drop.training
    wrapped.note = "new"
    assert model.note == "new" and wrapped.note == "new"
    del wrapped.note
    assert not hasattr(model, "note") and not hasattr(wrapped, "note")
    wrapped.last = nn.Linear(6, H)
    assert model.last is wrapped.last
    wrapped.double().requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters()) and model.last.weight.dtype == torch.float64
    wrapped.load_state_dict(Tower().state_dict())
    assert wrapped.to(torch.float32) is not None and model.first.weight.dtype == torch.float32
    assert "Tower" in repr(wrapped) and "micro_batch_size=4" in repr(wrapped)
    assert MicroBatched(nn.Sequential(nn.Linear(D, H)), 4)[0].out_features == H


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
def test_copies(how: str, x: Tensor) -> None:
    wrapped = MicroBatched(Tower(), 4)
    if how == "pickle":
        other = pickle.loads(pickle.dumps(wrapped))
    elif how == "save":
        file = io.BytesIO()
        torch.save(wrapped, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = getattr(copy, how)(wrapped)
    assert type(other) is MicroBatched and (other.first is wrapped.first) == (how == "copy")
    calls = counted(other)
    close(other(x), wrapped(x))
    assert calls[:3] == [4, 3, 3]


def test_nested_inside_another_module(x: Tensor) -> None:
    class Both(nn.Module):
        def __init__(self, tower: nn.Module) -> None:
            super().__init__()
            self.tower, self.head = tower, nn.Linear(H, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.tower(x))

    plain = Both(Tower())
    outer = Both(MicroBatched(copy.deepcopy(plain.tower), 4))
    outer.head = copy.deepcopy(plain.head)
    assert outer.state_dict().keys() == plain.state_dict().keys()
    outer.load_state_dict(plain.state_dict())
    for model in (plain, outer):
        model(x).std(0).sum().backward()
    close(grads(outer), grads(plain))
    outer.eval()
    assert not outer.tower.drop.training
    outer.float()
    assert outer.tower.first.weight.dtype == torch.float32
    assert sum(p.numel() for p in outer.parameters()) == sum(p.numel() for p in plain.parameters())
    close(copy.deepcopy(outer)(x.float()), outer(x.float()))


def test_hooks_of_the_model_see_micro_batches(x: Tensor) -> None:
    model, seen = Tower(), []
    wrapped = MicroBatched(model, 4, activations="keep")
    handle = wrapped.register_forward_hook(
        lambda module, inputs, output: seen.append((module, len(output))) or output * 2
    )
    expected = model(x)
    seen.clear()
    close(wrapped(x), expected)
    assert seen == [(model, 4), (model, 3), (model, 3)]
    handle.remove()
    close(wrapped(x), expected / 2)


def test_arguments_of_every_kind(x: Tensor) -> None:
    class Takes(Tower):
        def forward(self, x: Tensor, y: Tensor | None = None, *more: Tensor, scale: float = 1.0, **rest: Any) -> Tensor:
            out = super().forward(x) * scale
            for other in (y, *more, *rest.values()):
                out = out + (other if other is not None else 0)
            return out

    model = Takes()
    wrapped = MicroBatched(model, 4)
    y = torch.randn(N, H, dtype=torch.float64)
    for args, kwargs in (
        ((x,), {}), ((x, y), {}), ((x, None, y), {"scale": 2.0}), ((x, y, y), {"z": y}), ((), {"x": x, "y": y}),
    ):  # fmt: skip
        close(wrapped(*args, **kwargs), model(*args, **kwargs))


def test_no_samples(x: Tensor) -> None:
    assert MicroBatched(Tower(), 4)(x[:0]).shape == (0, H)


# --- Refusals


class DistributedDataParallel(nn.Module):
    """Has the name of the wrapper that brings several processes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def test_several_processes_are_refused_by_name() -> None:
    with pytest.raises(ModelError, match="the model is a DistributedDataParallel"):
        MicroBatched(DistributedDataParallel(Tower()), 4)


@pytest.mark.parametrize(
    "options", [{"activations": "forget"}, {"batch_norm": "off"}, {"keep_bytes": "much"}, {"keep_bytes": -1},
                {"micro_batch_size": 0}, {"split": 3}]
)  # fmt: skip
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        MicroBatched(Tower(), **options)


def test_batch_norm(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Linear(6, H)).double()
    with pytest.warns(UserWarning, match="batch_norm='local'") as caught:
        local = MicroBatched(model, 5, batch_norm="local")
        for _ in range(2):
            local(x).std(0).sum().backward()
    assert len(caught) == 1 and model[1].num_batches_tracked == 2
    model[1].eval()
    model.zero_grad()
    model(x).std(0).sum().backward()
    expected, before = grads(model), copy.deepcopy(model[1].state_dict())
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MicroBatched(model, 5)(x).std(0).sum().backward()
    close(grads(model), expected)
    assert all(torch.equal(value, before[name]) for name, value in model[1].state_dict().items())


# --- The pure parts


def test_affordable() -> None:
    assert affordable([4, 3, 3], 1.0, 5) == 1
    assert affordable([4, 3, 3], 1.0, 2) == 0
    assert affordable([4, 3, 3], 0.0, 0) == 3
