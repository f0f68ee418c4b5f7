"""A backward that survives running out of memory has plain PyTorch's gradient, wherever it fails."""

from __future__ import annotations

import copy
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bigbatch.core.batch import Batch
from bigbatch.core.buffers import Buffers
from bigbatch.core.join import join
from bigbatch.core.models import inner_modules, parameters_of
from bigbatch.core.split import Piece, Splitter
from bigbatch.engines import again, replayed
from bigbatch.errors import MicroBatchTooLarge, ModelError
from bigbatch.fit.oom import is_out_of_memory, let_go

N, D, H = 10, 6, 4
Loss = Callable[[Any], Tensor]


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


class Net(nn.Module):
    """Dropout, and two buffers: one counts calls, one follows a mean of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(D, 8), nn.Dropout(0.4), nn.Linear(8, H)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        out = self.last(self.drop(self.first(x - self.mean).tanh()))
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return out


class Tied(Net):
    def forward(self, x: Tensor) -> Any:
        return self.drop(x @ self.first.weight.T).tanh() @ self.first.weight + x * self.first.weight.sum()


class Fields(Net):
    """A field without a gradient, one that the loss does not use, and a head of its own behind that one."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.drop(self.first(x))
        out = hidden[:, :H].tanh()
        return {"out": out, "best": out.argmax(1), "pair": (hidden, self.last(hidden)), "none": None, "name": "fields"}


class Experts(Net):
    def forward(self, x: Tensor) -> Any:
        rows, left = self.drop(x), x.detach().sum(1) > 0.5
        out = x.new_zeros(len(x), H)
        if left.any():  # so that some micro-batches leave an expert alone
            out = out.index_put((left.nonzero()[:, 0],), self.last(self.first(rows[left])))
        return out + rows[:, :H]


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, H, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.cell(x.view(-1, 3, 2))[0])


class Attention(Net):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 2, dropout=0.3, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        rows = x.view(-1, 3, 2)
        return self.attention(rows, rows, rows)[0]


class LayerDrop(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x)
        for _ in range(4):
            hidden = self.drop(hidden.sin()) if random.random() < 0.5 else hidden.cos()
        return self.last(hidden)


class Convolution(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Any:
        return F.rrelu(self.norm(self.conv(x.view(-1, 2, 3))), training=True).mean(2)


class Ragged(Net):
    """One tensor for each sample, each of its own length."""

    def forward(self, x: Tensor) -> Any:
        rows = self.drop(self.first(x))
        return [row[: 1 + int(seen.detach().abs().sum() * 3) % 5] for row, seen in zip(rows, x, strict=True)]


class Force(Net):
    """A derivative inside the forward."""

    def forward(self, x: Tensor) -> Any:
        at = x if x.requires_grad else x.requires_grad_()
        return torch.autograd.grad(self.last(self.first(at).tanh()).sin().sum(), at, create_graph=True)[0]


class Words(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, H, sparse=True)

    def forward(self, x: Tensor) -> Any:
        return self.drop(self.table((x.detach().abs() * 10).long() % 5)).sum(1)


class Writes(Net):
    def forward(self, x: Tensor) -> Any:
        return self.last(self.drop(F.relu(self.first(x.mul_(2).add_(1)), inplace=True)))


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first.requires_grad_(False)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(lambda rows: self.drop(self.first(rows)).tanh(), x, use_reentrant=False))


KINDS = [Net, Tied, Fields, Experts, Recurrent, Attention, LayerDrop, Convolution, Ragged, Force, Words, Writes, Frozen,
         Checkpointed]  # fmt: skip
UNCUTTABLE = (Force, Checkpointed)  # no forward without a graph; numbers drawn inside a checkpoint

LONG = (Attention, Convolution, Recurrent)  # so many operators that only some of them fail here


def loss_of(outputs: Any) -> Tensor:
    """Couples all samples."""
    if isinstance(outputs, dict):
        outputs = outputs["out"] + outputs["pair"][0].mean()
    if isinstance(outputs, list):
        outputs = torch.cat([item.cos() for item in outputs])
    return (outputs.flatten() - outputs.mean()).exp().sum().log() + outputs.std()


def made(kind: type[Net]) -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    return kind().double().train(), torch.randn(N, D, dtype=torch.float64)


def seed() -> None:
    torch.manual_seed(11)
    random.seed(11)


def drawn() -> tuple[float, float]:
    """Where the random numbers stand."""
    return torch.rand(()).item(), random.random()


def plain(model: nn.Module, x: Tensor, size: int = 4) -> Any:
    """All micro-batches in one graph, each from the same buffers, by plain PyTorch."""
    pieces = Splitter().pieces(x, None, size)
    buffers, outputs = Buffers(inner_modules([model])), []
    for piece in pieces:
        with buffers.lent(piece.samples / N):
            outputs.append(model(piece.inputs.clone()))
    buffers.settle()
    return join(outputs, [piece.samples for piece in pieces])


def called(model: nn.Module, x: Tensor, size: int = 4, failed: list[int] | None = None, **options: Any) -> Any:
    splitter = Splitter()
    inner = inner_modules([model])
    tries = replayed.Tries(([] if failed is None else failed).append, is_out_of_memory, let_go)
    batch = Batch([x], splitter.pieces(x, None, size), inner, Buffers(inner), None)
    return replayed.run(batch, lambda piece: model(piece.inputs), parameters_of(inner), splitter, tries, **options)


def state(model: nn.Module) -> dict[str, Any]:
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"grads": {n: None if g is None else g.to_dense() for n, g in grads.items()}, "held": model.state_dict()}


def expected_of(kind: type[Net], size: int = 4) -> tuple[dict[str, Any], tuple[float, float]]:
    model, x = made(kind)
    seed()
    loss_of(plain(model, x, size)).backward()
    return state(model), drawn()


class Failing(TorchDispatchMode):
    """Raises at the n-th operator, once, and counts the operators until then."""

    def __init__(self, at: tuple[int, ...]) -> None:
        super().__init__()
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count in self.at:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def failing(*at: int) -> Iterator[Failing]:
    """Memory runs out at the n-th operators of the node's backward."""
    mode, sums = Failing(at), replayed.Call.sums

    def watched(call: Any, gradients: Any) -> Any:
        with mode:
            return sums(call, gradients)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed.Call, "sums", watched)
        yield mode


# --- The same as plain PyTorch


@pytest.mark.parametrize("kept", [0, 1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_graph(kind: type[Net], kept: int) -> None:
    expected, numbers = expected_of(kind)
    model, x = made(kind)
    before = x.clone()
    seed()
    outputs = called(model, x, kept=kept)
    numbers_after_forward = torch.get_rng_state()
    loss_of(outputs).backward()
    assert torch.equal(numbers_after_forward, torch.get_rng_state())
    assert drawn() == numbers and torch.equal(x, before)
    close(state(model), expected)


@pytest.mark.parametrize("kind", [Net, Tied, Fields, Experts, Recurrent, Ragged, Force, Words, Writes])
def test_equals_the_whole_batch(kind: type[Net]) -> None:
    model, x = made(kind)
    model.drop.p = 0.0
    whole = copy.deepcopy(model)
    loss_of(whole(x.clone())).backward()
    loss_of(called(model, x)).backward()
    close(state(model), state(whole))


def test_other_masks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = expected_of(Net)
    model, x = made(Net)
    seed()
    monkeypatch.setattr(replayed, "snapshot", lambda *_: lambda: None)
    loss_of(called(model, x)).backward()
    with pytest.raises(AssertionError):
        close(state(model)["grads"], expected["grads"])


def test_several_calls_in_one_loss() -> None:
    expected, numbers = [], []
    for run in (plain, called):
        model, x = made(Net)
        seed()
        one, two = run(model, x), run(model, x.flip(0))
        (loss_of(one @ two.T) + model.last.weight.square().sum()).backward()
        expected.append(state(model)), numbers.append(drawn())
    close(*expected)
    assert numbers[0] == numbers[1] and expected[0]["held"]["calls"] == 2


def test_torch_autograd_grad_leaves_grad_alone() -> None:
    found = []
    for run in (plain, called):
        model, x = made(Net)
        seed()
        wanted = [model.last.weight, model.first.bias]
        found.append(torch.autograd.grad(loss_of(run(model, x)), wanted))
        assert all(p.grad is None for p in model.parameters())
    close(*found)


def test_gradients_are_added_to_those_that_were_there() -> None:
    expected, _ = expected_of(Net)
    model, x = made(Net)
    seed()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    there = [p.grad for p in model.parameters()]
    loss_of(called(model, x)).backward()
    close([p.grad - 1 for p in model.parameters()], list(expected["grads"].values()))
    assert all(p.grad is g for p, g in zip(model.parameters(), there, strict=True))


def test_hooks_see_the_batch_once() -> None:
    seen: list[list[Any]] = []
    for run in (plain, called):
        model, x = made(Experts)
        log: list[Any] = []
        for p in model.parameters():  # one of them has no gradient: its hooks stay silent
            p.register_hook(lambda g, log=log: log.append(g.clone()) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, log=log: log.append(p.grad.clone()))
        seed()
        loss_of(run(model, x)).backward()
        seen.append([log, state(model)["grads"]])
    close(seen[1][1], seen[0][1])
    close(sorted(t.sum().item() for t in seen[1][0]), sorted(t.sum().item() for t in seen[0][0]))


def test_inputs_get_their_gradient_through_the_graph_in_front() -> None:
    found = []
    for run in (plain, called):
        model, x = made(Net)
        seed()
        rows = x.requires_grad_()
        loss_of(run(model, rows.tanh() * model.first.bias.sum())).backward()
        found.append((rows.grad, state(model)["grads"]))
    close(*found)


def test_a_graph_that_is_kept_runs_backward_again() -> None:
    found = []
    for run in (plain, called):
        model, x = made(Net)
        seed()
        outputs = run(model, x)
        outputs.std().backward(retain_graph=True)
        loss_of(outputs).backward()
        found.append(state(model))
    close(*found)


def test_a_second_derivative_is_refused() -> None:
    model, x = made(Net)
    rows = x.requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(called(model, rows)), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(context: Any) -> None:
    model, x = made(Net)
    with context():
        seed()
        expected = plain(model, x)
        seed()
        model, x = made(Net)
        seed()
        outputs = called(model, x)
    assert torch.equal(outputs, expected) and not outputs.requires_grad and model.calls == 1


@pytest.mark.parametrize("inside", [False, True])
def test_autocast_is_the_forward_s_own(inside: bool) -> None:
    found = []
    for run in (plain, called):
        model, x = made(Net)
        model, x = model.float(), x.float()
        seed()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = run(model, x)
            if inside:
                with failing(40):
                    loss_of(outputs.double()).backward()
        if not inside:
            loss_of(outputs.double()).backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert found[0].norm() > 0.1 and (found[1] - found[0]).norm() <= 2e-2 * found[0].norm()


@pytest.mark.parametrize("kept", [0, 3])
@pytest.mark.parametrize("leaf", [True, False])
def test_a_stranger_is_refused(leaf: bool, kept: int) -> None:
    model, x = made(Net)
    stranger = torch.ones(7, 3, dtype=torch.float64, requires_grad=True)
    held = stranger if leaf else stranger * 2

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.plain = model, [held]

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x) * self.plain[0].sum()

    with pytest.raises(ModelError, match=r"shape \(7, 3\)"):
        called(Holds(), x, kept=kept)
    held.detach_() if not leaf else held.requires_grad_(False)
    called(Holds(), x).sum().backward()


def test_new_weights_are_refused() -> None:
    model, x = made(Net)
    outputs = called(model, x)
    with torch.no_grad():
        model.last.weight.add_(1)
    with pytest.raises(ModelError, match="optimizer step"):
        outputs.sum().backward()
    assert all(p.grad is None for p in model.parameters())


# --- Memory runs out


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in UNCUTTABLE])
def test_a_failure_at_every_operator(kind: type[Net]) -> None:
    expected, numbers = expected_of(kind)
    start, rows = made(kind)
    recovered, tried = 0, 0
    for at in itertools.count(1, 17 if kind in LONG else 1):
        model, x, failed = copy.deepcopy(start), rows.clone(), []
        with failing(at) as mode:
            seed()
            loss_of(called(model, x, failed=failed, kept=at % 2)).backward()
        close(state(model), expected)
        assert drawn() == numbers
        if not failed:  # it would have failed behind the last operator
            assert mode.count < at
            break
        recovered += set(failed) <= {3, 4}
        tried += 1
    print(f"{kind.__name__}: {recovered} of {tried}")
    assert recovered == tried > 3


def test_many_failures_one_after_the_other() -> None:
    expected, numbers = expected_of(Net, N)
    model, x = made(Net)
    failed: list[int] = []
    with failing(12, 60, 130):
        seed()
        loss_of(called(model, x, N, failed)).backward()
    close(state(model), expected)
    assert drawn() == numbers and failed == [10, 5, 3]


def test_a_lost_slice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = expected_of(Net)
    model, x = made(Net)
    seed()
    rows_of = again.rows_of

    def losing(outputs: Any, values: Any, samples: int, first: int, last: int) -> Any:
        parts = rows_of(outputs, values, samples, first, last)
        return [torch.zeros_like(part) for part in parts] if first and values[0] is not outputs else parts

    monkeypatch.setattr(replayed, "rows_of", losing)
    with failing(30):
        loss_of(called(model, x)).backward()
    with pytest.raises(AssertionError):
        close(state(model)["grads"], expected["grads"])


def test_other_errors_pass_through_at_once() -> None:
    model, x = made(Net)
    failed: list[int] = []
    outputs = called(model, x, failed=failed)
    model.last.register_forward_hook(lambda *_: torch.ones(2) @ torch.ones(3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        outputs.sum().backward()
    assert failed == [] and all(p.grad is None for p in model.parameters())
    close(dict(model.state_dict()), dict(before))


def test_one_sample_that_does_not_fit() -> None:
    model, x = made(Net)
    failed: list[int] = []
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    outputs = called(model, x, failed=failed)
    held = copy.deepcopy(state(model))
    with failing(*range(10, 10_000)), pytest.raises(MicroBatchTooLarge, match="one sample"):
        outputs.sum().backward()
    assert failed[0] == 3
    close(state(model), held)


class ByBatch(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(self.norm(x)))


class Sampled(Net):
    """Draws outside PyTorch, as often as there are samples."""

    def forward(self, x: Tensor) -> Any:
        return self.last(self.first(x) * torch.tensor([[random.random()] for _ in x], dtype=x.dtype))


@pytest.mark.parametrize("kind", [ByBatch, Sampled, Checkpointed])
def test_what_cannot_be_cut_is_refused(kind: type[Net]) -> None:
    model, x = made(kind)
    seed()
    outputs = called(model, x, N)
    before, numbers = copy.deepcopy(state(model)), torch.get_rng_state()
    with failing(30), pytest.raises(MicroBatchTooLarge, match="in smaller pieces") as caught:
        outputs.square().sum().backward()
    assert caught.value.__context__ is None
    close(state(model), before)
    assert torch.equal(numbers, torch.get_rng_state())


def test_nothing_of_the_failed_try_is_alive() -> None:
    """When the second try begins, without the garbage collector, although somebody keeps the error."""
    model, x = made(Net)
    errors: list[BaseException] = []
    alive: list[int] = []
    made_in_backward: list[weakref.ref[Any]] = []
    there = [x, *model.parameters(), *model.buffers()]

    class Watching(Failing):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            known = {tensor.untyped_storage()._cdata for tensor in there}
            if isinstance(out, Tensor) and not alive and out.untyped_storage()._cdata not in known:
                made_in_backward.append(weakref.ref(out.untyped_storage()))
            return out

    def keep(error: BaseException) -> bool:
        errors.append(error)
        return is_out_of_memory(error)

    splitter, inner = Splitter(), inner_modules([model])
    buffers = Buffers(inner)
    tries = replayed.Tries(lambda _: alive.append(sum(ref() is not None for ref in made_in_backward)), keep, let_go)
    batch = Batch([x], splitter.pieces(x, None, 4), inner, buffers, None)
    outputs = replayed.run(batch, lambda piece: model(piece.inputs), parameters_of(inner), splitter, tries, kept=1)
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            mode, sums = Watching((70,)), replayed.Call.sums

            def watched(call: Any, gradients: Any) -> Any:
                there.extend([*gradients, *buffers.before.values()])
                with mode:
                    return sums(call, gradients)

            patch.setattr(replayed.Call, "sums", watched)
            loss_of(outputs).backward()
    finally:
        gc.enable()
    assert alive == [0] and len(made_in_backward) > 20 and len(errors) == 1


def test_a_call_leaves_nothing_behind() -> None:
    """No knot ties the node to its outputs: what a call made dies with the outputs, without the garbage collector."""
    model, x = made(Net)
    gc.collect()
    gc.disable()
    try:
        outputs = called(model, x, kept=2)
        assert any(type(found) is replayed.Call for found in gc.get_objects())
        loss = loss_of(outputs)
        del outputs, loss
        assert not any(type(found) is replayed.Call for found in gc.get_objects())
    finally:
        gc.enable()


# --- Parts


def test_a_piece_knows_where_it_stands_in_the_batch() -> None:
    model, x = made(Net)
    model.drop.p = 0.0
    seen: list[tuple[int, int]] = []

    def forward(piece: Piece) -> Any:
        seen.append((piece.first, piece.samples))
        assert torch.equal(piece.inputs, x[piece.first : piece.first + piece.samples])
        return model(piece.inputs)

    splitter, inner = Splitter(), inner_modules([model])
    batch = Batch([x], splitter.pieces(x, None, 4), inner, Buffers(inner), None)
    outputs = replayed.run(
        batch, forward, parameters_of(inner), splitter, replayed.Tries(print, is_out_of_memory, let_go)
    )
    with failing(30):
        outputs.sum().backward()
    assert seen[-1] == (2, 2) and seen[:3] == [(0, 4), (4, 3), (7, 3)]


def test_outputs_that_differ_are_told_from_rounding() -> None:
    rows = torch.randn(5, 3)
    assert again.same_outputs([rows], [rows * (1 + 1e-6)], 0.0)
    assert not again.same_outputs([rows], [rows.flip(0)], 0.0)
    assert not again.same_outputs([rows], [rows[1:]], 0.0) and not again.same_outputs([rows], [None], 0.0)
    assert again.same_outputs([rows], [rows.bfloat16().float()], torch.finfo(torch.bfloat16).eps)
