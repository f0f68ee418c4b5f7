"""Activation checkpointing of repeated blocks, and offloading: the gradient of the whole batch, in less memory."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import architectures
from bigbatch import Accumulator, MicroBatched, verify
from bigbatch.core.buffers import Buffers
from bigbatch.core.checkpoints import Numbers
from bigbatch.core.live import Live
from bigbatch.core.models import inner_modules
from bigbatch.engines import blocks, checkpoint, offload
from bigbatch.engines.blocks import checkpointed, repeated_blocks
from bigbatch.errors import ModelError

N, T, D, TOLERANCE = 10, 4, 8, 1e-12


class Residual(nn.Module):
    """x + MLP(x), with a dropout that a test may switch on."""

    def __init__(self, width: int = D, drop: float = 0.0) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(drop)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Counting(Residual):
    """Its scale follows how often it was called, and a buffer keeps a moving average."""

    def __init__(self, width: int = D) -> None:
        super().__init__(width)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + self.count.item()
        self.count += 1
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return super().forward(x * scale) / scale


class Noisy(Residual):
    """Draws from Python's generator, from NumPy's and from one of its own."""

    def __init__(self, width: int = D) -> None:
        super().__init__(width)
        self.own = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.own) + random.random() + float(np.random.rand())
        return super().forward(x * noise)


class Outer(nn.Module):
    """Blocks in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Residual() for _ in range(2)])

    def forward(self, x: Tensor, *, scale: dict[str, Tensor]) -> Tensor:
        for part in self.parts:
            x = part(x * scale["by"])
        return x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.first, self.second = Outer(), Outer()

    def forward(self, x: Tensor) -> Tensor:
        scale = {"by": self.scale}
        return self.second(self.first(x, scale=scale), scale=scale)


class Tied(nn.Module):
    """One block stands in three places, and the first layer's weight is the last one's."""

    def __init__(self) -> None:
        super().__init__()
        block = Residual()
        self.layers = nn.ModuleList([block, Residual(), block])
        self.start, self.end = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)
        self.end.weight = self.start.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


class Appending(nn.Module):
    """Blocks that put what they make into a list which they are handed."""

    class Block(Residual):
        def forward(self, x: Tensor, made: list[Tensor]) -> Tensor:  # type: ignore[override]
            assert len(made) < 2, "a second forward has appended too"
            made.append(super().forward(x if not made else x + made[-1]))
            return made[-1]

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = self.Block(), self.Block()

    def forward(self, x: Tensor) -> Tensor:
        made: list[Tensor] = []
        return self.one(x, made) + self.two(x, made) + sum(made)


def stack(count: int = 3, kind: Callable[..., nn.Module] = Residual, **options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(D, D), *(kind(**options) for _ in range(count)), nn.Linear(D, D))


def encoder(drop: float = 0.0) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, 2, 16, drop, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": encoder,
    "residual": stack,
    "nested": Nested,
    "tied": Tied,
    "counting": lambda: stack(kind=Counting),
    "appending": Appending,
    "sequentials": lambda: nn.Sequential(*(nn.Sequential(nn.Linear(D, D), nn.Tanh()) for _ in range(3))),
}
WAYS = ("door 1", "door 1, any loss", "door 1, auto", "recompute", "offload", "keep", "door 2, auto")


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    hf.logging.set_verbosity_error()
    with architectures.in_double():
        yield


def made(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = MODELS[name]()
    shape = (N, T, D) if name == "encoder" else (N, D)
    return model, torch.randn(shape), torch.randn(shape)


def similarity(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss that ties samples together."""
    rows = outputs.flatten(1)
    return (rows @ rows.T / 10).logsumexp(1).mean() + F.mse_loss(outputs, targets)


def run(model: nn.Module, inputs: Tensor, targets: Tensor, way: str, **options: Any) -> Tensor:
    """One batch; returns the loss and leaves the gradient."""
    options = {"checkpoint": True, "micro_batch_size": "auto" if way.endswith("auto") else 3, **options}
    if way.startswith("door 1"):
        loss_fn: Any = similarity if way.endswith("any loss") else nn.MSELoss()
        return Accumulator(model, loss_fn, **options).backward(inputs, targets)
    activations = way if way in ("offload", "keep") else "recompute"
    loss = similarity(MicroBatched(model, activations=activations, **options)(inputs), targets)
    loss.backward()
    return loss.detach()


def whole(model: nn.Module, inputs: Tensor, targets: Tensor, way: str) -> Tensor:
    """The oracle: plain PyTorch on the whole batch."""
    loss_fn = nn.MSELoss() if way in ("door 1", "door 1, auto") else similarity
    loss = loss_fn(model(inputs), targets)
    loss.backward()
    return loss.detach()


def distance(model: nn.Module, other: nn.Module) -> float:
    return architectures.distance(architectures.gradients(model), architectures.gradients(other))


def state(model: nn.Module) -> list[dict[str, Any]]:
    """Every attribute of every module."""
    return [{**vars(module)} for module in model.modules()]


def held(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


# --- The gradient


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_equals_the_whole_batch(name: str, way: str) -> None:
    model, inputs, targets = made(name)
    plain = copy.deepcopy(model)
    before = held(model)
    loss, expected = run(model, inputs, targets, way), whole(plain, inputs, targets, way)
    assert abs(float(loss - expected)) <= TOLERANCE * abs(float(expected))
    assert distance(model, plain) <= TOLERANCE
    assert held(model) == before
    for found, wanted in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(found, wanted, rtol=TOLERANCE, atol=0), "a buffer has not moved once"


@pytest.mark.parametrize("way", WAYS)
def test_blocks_run_twice(way: str) -> None:
    counts = []
    for on in (False, True):
        model, inputs, targets = made("residual")
        run(model, inputs, targets, way, checkpoint=on, micro_batch_size=5)
        counts.append(model[1].calls)
    assert counts[1] > counts[0]


def test_a_second_forward_that_moves_buffers_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "as_they_are", lambda inner: Buffers([]))
    model, inputs, targets = made("counting")
    plain = copy.deepcopy(model)
    run(model, inputs, targets, "door 1")
    whole(plain, inputs, targets, "door 1")
    moved = [bool((a == b).all()) for a, b in zip(model.buffers(), plain.buffers(), strict=True)]
    assert distance(model, plain) > 1e-3 and not all(moved)


def test_a_buffer_that_moved_earlier_in_the_same_forward_is_found_as_it_was_then() -> None:
    """Its block is called twice, and the second call has to find what the first one left."""
    torch.manual_seed(0)
    block = Counting()
    model = nn.Sequential(nn.ModuleList([block, block])[0], block, Counting())
    plain, inputs, targets = copy.deepcopy(model), torch.randn(N, D), torch.randn(N, D)
    run(model, inputs, targets, "door 1", micro_batch_size=5)
    whole(plain, inputs, targets, "door 1")
    assert distance(model, plain) <= TOLERANCE


def test_lists_are_appended_to_once_and_a_sabotage_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "tree_flatten", lambda tree: ([tree], None))
    monkeypatch.setattr(checkpoint, "tree_unflatten", lambda leaves, spec: leaves[0])
    model, inputs, targets = made("appending")
    with pytest.raises(AssertionError, match="appended too"):
        run(model, inputs, targets, "door 1")


@pytest.mark.parametrize("way", ["door 1", "recompute", "keep"])
def test_numbers_of_python_numpy_and_own_generators_are_drawn_again(way: str) -> None:
    found = []
    for on in (False, True):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        model = stack(kind=Noisy)
        run(model, torch.ones(N, D), torch.zeros(N, D), way, checkpoint=on)
        found.append((model, random.random(), np.random.rand(), model[1].own.get_state()))
    assert distance(found[0][0], found[1][0]) <= TOLERANCE
    assert found[0][1:3] == found[1][1:3] and torch.equal(found[0][3], found[1][3])


# --- Dropout


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["encoder", "residual"])
def test_by_sample_masks_are_those_of_the_batch_in_one_piece(name: str, way: str, recwarn: Any) -> None:
    found = []
    for on, size in ((False, N), (True, 3)):
        torch.manual_seed(1)
        model = encoder(0.3) if name == "encoder" else stack(drop=0.3)
        inputs = torch.randn((N, T, D) if name == "encoder" else (N, D))
        options = {"randomness": "by_sample", "checkpoint": on, "micro_batch_size": size}
        if way.endswith("auto") and on:
            del options["micro_batch_size"]
        run(model, inputs, torch.zeros_like(inputs), way, **options)
        found.append(model)
    assert distance(*found) <= TOLERANCE
    assert not [warning for warning in recwarn if "by_sample" in str(warning.message)]


def test_masks_that_a_second_forward_draws_anew_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "__init__", lambda self: self.__dict__.update(modes=[], later=[]))
    with pytest.raises(AssertionError), pytest.warns(UserWarning, match="by_sample"):
        test_by_sample_masks_are_those_of_the_batch_in_one_piece("residual", "door 1", [])


@pytest.mark.parametrize("way", WAYS)
def test_global_masks_are_those_that_the_same_run_draws_without_checkpoints(way: str) -> None:
    found = []
    for on in (False, True):
        torch.manual_seed(1)
        model = stack(drop=0.3)
        inputs = torch.randn(N, D)
        run(model, inputs, torch.zeros_like(inputs), way, checkpoint=on)
        found.append((model, torch.get_rng_state()))
    assert distance(found[0][0], found[1][0]) <= TOLERANCE
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("randomness", ["global", "by_sample"])
def test_verify_finds_no_difference(randomness: str) -> None:
    model, inputs, targets = stack(drop=0.3), torch.randn(N, D), torch.randn(N, D)
    options = {"checkpoint": True, "randomness": randomness}
    verdict = verify(model, nn.MSELoss(), inputs, targets, micro_batch_size=3, **options)
    assert verdict.equal, str(verdict)
    verdict = verify(MicroBatched(model, 3, **options), similarity, inputs, targets)
    assert verdict.equal, str(verdict)


def test_verify_sees_masks_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Numbers, "__init__", lambda self: self.__dict__.update(modes=[], later=[]))
    model, inputs, targets = stack(drop=0.3), torch.randn(N, D), torch.randn(N, D)
    verdict = verify(model, nn.MSELoss(), inputs, targets, micro_batch_size=3, checkpoint=True)
    assert not verdict.equal


# --- Models of Hugging Face


def gpt2(drop: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    small = {"vocab_size": architectures.VOCAB, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, **options}
    drops = {"resid_pdrop": drop, "embd_pdrop": drop, "attn_pdrop": drop}
    config = hf.GPT2Config(**small, **drops, **architectures.SPECIAL, attn_implementation="eager")
    return hf.GPT2LMHeadModel(config).double().train()


HUGGING_FACE: dict[str, Callable[[], nn.Module]] = {
    **{name: architectures.TEXT[name] for name in ("Llama", "T5", "Bert", "Mixtral", "Bart")},
    **{name: architectures.VISION[name] for name in ("ViT", "Swin", "ConvNext")},
    "GPT2": gpt2,
}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_equals_the_whole_batch(name: str) -> None:
    model, batch = HUGGING_FACE[name](), architectures.batch_for(name)
    before = state(model)
    loss, expected = architectures.whole_batch(model, batch)
    with counted_calls() as calls:
        found = Accumulator(model, None, micro_batch_size=3, checkpoint=True).backward(batch)
    assert abs(float(found - loss)) <= 1e-10 * abs(float(loss))
    assert architectures.distance(architectures.gradients(model), expected) <= 1e-10
    assert calls and state(model) == before


@contextmanager
def counted_calls() -> Iterator[list[str]]:
    """The class of every block that is checkpointed inside."""
    calls: list[str] = []
    call_again = checkpoint.call_again

    def counted(block: Any, *rest: Any) -> Any:
        calls.append(type(block).__name__)
        return call_again(block, *rest)

    with mock.patch.object(checkpoint, "call_again", counted), mock.patch.object(blocks, "call_again", counted):
        yield calls


class InDouble(nn.Module):
    """The second forward of a micro-batch runs in a backward, which takes modes around the whole test off."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Tensor:
        with architectures.in_double():
            logits: Tensor = self.model(**batch).logits
        return logits


@pytest.mark.parametrize("activations", ["recompute", "offload", "keep"])
@pytest.mark.parametrize("name", ["GPT2", "Llama", "ViT"])
def test_hugging_face_in_door_2(name: str, activations: str) -> None:
    model, batch = HUGGING_FACE[name](), architectures.batch_for(name)
    batch.pop("labels")

    def loss_of(logits: Tensor) -> Tensor:
        return similarity(logits, torch.zeros_like(logits))

    loss_of(model(**batch).logits).backward()
    expected, before = architectures.gradients(model), state(model)
    door = MicroBatched(InDouble(model), 3, activations=activations, checkpoint=True)
    loss_of(door(**batch)).backward()
    assert architectures.distance(architectures.gradients(model), expected) <= TOLERANCE
    assert state(model) == before


@pytest.mark.parametrize("randomness", ["global", "by_sample"])
def test_dropout_of_hugging_face(randomness: str, recwarn: Any) -> None:
    batch, found = architectures.batch_for("GPT2"), []
    for on in (False, True):
        torch.manual_seed(1)
        model = gpt2(0.2)
        torch.manual_seed(2)
        Accumulator(model, None, micro_batch_size=3, checkpoint=on, randomness=randomness).backward(batch)
        found.append(model)
    assert distance(*found) <= TOLERANCE
    assert not [warning for warning in recwarn if "by_sample" in str(warning.message)]


def test_the_cache_is_off_inside_and_as_before_after_an_error() -> None:
    model = gpt2()
    before = state(model)
    with pytest.raises(ZeroDivisionError), checkpointed(inner_modules([model])):
        assert model.is_activation_checkpointing and not model.config.use_cache
        assert repeated_blocks(inner_modules([model])) == list(model.transformer.h)
        raise ZeroDivisionError
    assert not model.is_activation_checkpointing and model.config.use_cache is True and state(model) == before


def test_checkpointing_that_the_user_has_switched_on_stays() -> None:
    model, batch = gpt2(), architectures.batch_for("GPT2")
    _, expected = architectures.whole_batch(model, batch)
    model.activation_checkpointing_enable({"use_reentrant": False})
    before = state(model)
    with counted_calls() as calls:
        Accumulator(model, None, micro_batch_size=3, checkpoint=True).backward(batch)
    assert not calls and model.is_activation_checkpointing and state(model) == before
    assert architectures.distance(architectures.gradients(model), expected) <= 1e-10


def test_a_hugging_face_model_inside_of_another_one() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.text, self.rest = gpt2(), stack(2)

        def forward(self, input_ids: Tensor) -> Tensor:
            return self.rest(self.text(input_ids).logits[..., :D])

    model, ids = Both(), architectures.batch_for("GPT2")["input_ids"]
    with counted_calls() as calls:
        MicroBatched(model, 3, checkpoint=True, activations="keep")(ids).sum().backward()
    assert set(calls) == {"GPT2Block", "Residual"}
    found = architectures.gradients(model)
    model(ids).sum().backward()
    assert architectures.distance(found, architectures.gradients(model)) <= TOLERANCE


# --- Precision, and running out of memory


@pytest.mark.parametrize("way", WAYS)
def test_autocast(way: str) -> None:
    """The same numbers as without checkpoints, to the bit: the second forward computes in the same dtypes."""
    found = []
    for on in (False, True):
        model, inputs, targets = made("residual")
        run(model.float(), inputs.float(), targets.float(), way, checkpoint=on, autocast=torch.bfloat16)
        found.append(model)
    assert distance(*found) == 0


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_bfloat16_add_up_in_float32(way: str) -> None:
    found = []
    for on in (False, True):
        model, inputs, targets = made("residual")
        run(model.bfloat16(), inputs.bfloat16(), targets.bfloat16(), way, checkpoint=on)
        found.append(model)
    assert distance(*found) == 0


class FailsAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Memory runs out at one operator."""

    def __init__(self, at: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.at, self.count = at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.count += 1
        if self.count == self.at:
            raise torch.OutOfMemoryError("injected")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("randomness", ["global", "by_sample"])
@pytest.mark.parametrize("way", ["door 1, auto", "door 2, auto"])
def test_running_out_of_memory_anywhere(way: str, randomness: str) -> None:
    """By sample the masks are those of the whole batch; otherwise there are none."""
    torch.manual_seed(1)
    first, inputs, targets = (
        stack(2, drop=0.3 if randomness == "by_sample" else 0.0),
        torch.randn(N, D),
        torch.ones(N, D),
    )
    torch.manual_seed(2)
    plain, model = copy.deepcopy(first), copy.deepcopy(first)
    run(plain, inputs, targets, way, checkpoint=False, micro_batch_size=N, randomness=randomness)
    with FailsAt(0) as mode:
        run(copy.deepcopy(first), inputs, targets, way, randomness=randomness)
    expected, retries = architectures.gradients(plain), 0
    for at in range(1, mode.count, 17):
        torch.manual_seed(2)
        door = None if way == "door 1, auto" else MicroBatched(model, checkpoint=True, randomness=randomness)
        accumulator = Accumulator(model, nn.MSELoss(), checkpoint=True, randomness=randomness)
        before = held(model)
        with FailsAt(at):
            try:
                if door is None:
                    accumulator.backward(inputs, targets)
                else:
                    similarity(door(inputs), targets).backward()
            except torch.OutOfMemoryError:  # in what is not run in micro-batches: the loss of door 2
                model.zero_grad()
                continue
        report = accumulator.report if door is None else door.report
        retries += report.retries
        assert architectures.distance(architectures.gradients(model), expected) <= TOLERANCE, at
        assert held(model) == before
    assert retries > 5


def test_a_failed_try_leaves_no_tensor_behind() -> None:
    model, inputs, targets = made("residual")
    accumulator, alive = Accumulator(model, nn.MSELoss(), checkpoint=True), []
    seen: list[weakref.ref[Tensor]] = []

    def look(module: nn.Module, given: Any, outputs: Tensor) -> None:
        if len(seen) and len(outputs) < N:
            alive.append(sum(each() is not None for each in seen))
            seen.clear()
        if len(outputs) == N:
            seen.append(weakref.ref(outputs))
            outputs.register_hook(fail)

    def fail(_: Tensor) -> None:
        raise torch.OutOfMemoryError("injected")

    for layer in model:
        layer.register_forward_hook(look)
    gc.disable()
    try:
        accumulator.backward(inputs, targets)
    finally:
        gc.enable()
    assert alive == [0] and accumulator.report.retries == 1


# --- Memory


class Host:
    """The CPU plays the device: what is offloaded to NumPy is counted no more until it comes back."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray[Any, Any]] = []

    def take(self, tensor: Tensor) -> Any:
        self.arrays.append(tensor.numpy().copy())
        return Waiting(self.arrays[-1])


class Waiting:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def to(self, device: torch.device, non_blocking: bool) -> Tensor:
        return torch.from_numpy(self.array).clone()


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    there = Host()
    monkeypatch.setattr(offload, "is_on_host", lambda tensor: False)
    monkeypatch.setattr(offload, "to_host", there.take)
    monkeypatch.setattr(offload, "LEAST_BYTES", 1)
    return there


WIDE, ROWS = 16, 512


def peak_bytes(way: str, **options: Any) -> tuple[int, nn.Module]:
    """The most bytes of a batch of two micro-batches through 12 blocks, without gradients of weights."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(WIDE) for _ in range(12)))
    inputs, targets = torch.randn(2 * ROWS, WIDE), torch.randn(2 * ROWS, WIDE)
    with Live() as live:
        run(model, inputs, targets, way, **{"micro_batch_size": ROWS, **options})
    return live.peak_bytes, model


@pytest.mark.parametrize("way", ["door 1", "recompute", "keep", "door 2, auto"])
def test_twelve_blocks_take_well_under_half(way: str) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean() + outputs.mean().square()

    with mock.patch(f"{__name__}.similarity", loss):
        (off, plain), (on, model) = (peak_bytes(way, checkpoint=checkpoint) for checkpoint in (False, True))
    assert distance(model, plain) <= TOLERANCE
    assert on < 0.4 * off, (on, off)


def test_blocks_that_keep_all_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "call_again", lambda block, function, args, kwargs: function(*args, **kwargs))
    with pytest.raises(AssertionError):
        test_twelve_blocks_take_well_under_half("door 1")


def test_door_1_offloads(host: Host) -> None:
    sizes, models_ = {}, []
    for activations in ("recompute", "keep", "offload"):
        sizes[activations], model = peak_bytes("door 1", checkpoint=False, activations=activations)
        models_.append(model)
        assert bool(host.arrays) == (activations == "offload")
    weights = [*models_[0].parameters()]
    assert not [a for a in host.arrays for w in weights if a.shape == w.shape and np.array_equal(a, w.detach().numpy())]
    expected = architectures.gradients(models_[0])
    assert all(architectures.distance(architectures.gradients(model), expected) == 0 for model in models_[1:])
    assert sizes["recompute"] == sizes["keep"] and sizes["offload"] < 0.4 * sizes["keep"], sizes


def test_checkpointed_blocks_offload_their_inputs(host: Host) -> None:
    for way, options in (("door 1", {"activations": "offload"}), ("offload", {})):
        host.arrays.clear()
        alone, plain = peak_bytes(way, checkpoint=True, **({"activations": "keep"} if way == "door 1" else {}))
        waiting = len(host.arrays)
        both, model = peak_bytes(way, checkpoint=True, **options)
        if way == "door 1":
            assert not waiting and both < 0.8 * alone, (both, alone)
        assert len(host.arrays) > 20 and distance(model, plain) <= TOLERANCE


# --- Which modules are blocks


class Bottleneck(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.down = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + self.down(x))


class Stages(nn.Module):
    """A small ResNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.layer1, self.layer2 = (nn.Sequential(Bottleneck(), Bottleneck()) for _ in range(2))
        self.layer3 = nn.Sequential(Bottleneck())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer3(self.layer2(self.layer1(self.stem(x)))).mean((2, 3)))


def found(model: nn.Module) -> list[str]:
    chosen = set(repeated_blocks(inner_modules([model])))
    return [name for name, module in model.named_modules() if module in chosen]


def test_which_modules_are_blocks() -> None:
    assert found(encoder()) == [f"layers.{i}" for i in range(3)]
    assert found(stack(2)) == ["1", "2"]
    assert found(Nested()) == ["first", "second"]
    assert found(Tied()) == ["layers.0", "layers.1"]
    assert found(Stages()) == ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3"]
    assert found(nn.ModuleDict({"a": nn.ModuleList([Residual()]), "b": nn.ModuleList([Residual()])})) == []
    assert found(nn.Transformer(D, 2, 2, 2, 16)) == [
        f"{side}.layers.{i}" for side in ("encoder", "decoder") for i in (0, 1)
    ]


NONE: dict[str, Callable[[], nn.Module]] = {
    "layers": lambda: nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D)),
    "one block": lambda: nn.Sequential(Residual(), nn.Linear(D, D)),
    "without parameters": lambda: nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Tanh()) for _ in range(3))),
    "Albert, which calls one layer over and over": architectures.TEXT["Albert"],
}


@pytest.mark.parametrize("name", NONE)
def test_a_model_without_blocks_is_refused(name: str) -> None:
    model = NONE[name]()
    assert found(model) == []
    for door in (
        lambda: Accumulator(model, nn.MSELoss(), checkpoint=True),
        lambda: MicroBatched(model, 3, checkpoint=True),
    ):
        with pytest.raises(ModelError, match="no repeated blocks"):
            door()
    Accumulator(model, nn.MSELoss()), MicroBatched(model, 3)


def test_scripted_blocks_are_refused() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(D, D), torch.jit.script(nn.Linear(D, D))) for _ in range(2)))
    with pytest.raises(ModelError, match=r"0\.1 is compiled by torch.jit"):
        Accumulator(model, nn.MSELoss(), checkpoint=True)


# --- The modules afterwards


def test_nothing_is_left_after_errors_and_of_nested_contexts() -> None:
    model, inputs, _ = made("residual")
    own = mock.Mock(side_effect=model[2].forward)
    model[2].forward = own
    before, inner = held(model), inner_modules([model])
    with checkpointed(inner):
        with pytest.raises(ZeroDivisionError), checkpointed(inner):
            raise ZeroDivisionError
        assert "forward" in vars(model[1]) and model[2].forward is not own
        first = checkpointed(inner)
        second = checkpointed(inner_modules([model[1], model]))
        first.__enter__(), second.__enter__(), first.__exit__(None, None, None)  # threads in turn leave in any order
        assert "forward" in vars(model[1])
        second.__exit__(None, None, None)
        model(inputs)
    assert held(model) == before and model[2].forward is own and own.call_count == 1
    for way in ("door 1", "keep"):
        with pytest.raises(RuntimeError):
            run(model, inputs[:, 1:], inputs, way)
        assert held(model) == before and model[2].forward is own


def test_a_block_is_checkpointed_once_however_many_contexts_there_are() -> None:
    model, inputs, targets = made("residual")
    plain, forwards = copy.deepcopy(model), []
    model[0].register_forward_hook(lambda *_: forwards.append(1))
    with counted_calls() as calls:
        run(MicroBatched(model, 2, checkpoint=True), inputs, targets, "door 1", micro_batch_size=5)
    assert len(forwards) >= 6 and len(calls) == 3 * len(forwards)
    whole(plain, inputs, targets, "door 1")
    assert distance(model, plain) <= TOLERANCE


def test_without_gradients_nothing_is_checkpointed() -> None:
    model, inputs, _ = made("residual")
    with counted_calls(), mock.patch.object(checkpoint, "checkpoint", side_effect=AssertionError):
        with torch.no_grad():
            assert torch.equal(MicroBatched(model, N, checkpoint=True)(inputs), model(inputs))
        with torch.inference_mode():
            MicroBatched(model, 3, checkpoint=True)(inputs)
        with pytest.raises(AssertionError):
            MicroBatched(model, N, checkpoint=True)(inputs)


def test_a_block_that_writes_to_its_inputs_is_refused() -> None:
    class Writes(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2))

    model = stack(kind=Writes)
    before = held(model)
    with pytest.raises(ModelError, match="Writes writes to its inputs"):
        run(model, torch.randn(N, D), torch.randn(N, D), "door 1")
    assert held(model) == before and all(p.grad is None for p in model.parameters())
    model = nn.Sequential(nn.Linear(D, D), *(nn.Sequential(nn.Linear(D, D), nn.ReLU(inplace=True)) for _ in range(2)))
    run(model, torch.randn(N, D), torch.randn(N, D), "door 1")


def test_derivatives_of_second_order() -> None:
    model, inputs, _ = made("residual")
    inputs.requires_grad_()

    def penalty(forward: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        (slope,) = torch.autograd.grad(forward(inputs).tanh().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
        inputs.grad = None
        return architectures.gradients(model)

    expected = penalty(model)
    for activations in ("keep", "recompute"):
        found_ = penalty(MicroBatched(model, 3, activations=activations, checkpoint=True))
        assert architectures.distance(found_, expected) <= TOLERANCE


# --- Batch norm


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(N, 3, 6, 6), torch.randint(0, 3, (N,))


@pytest.mark.parametrize("door", [1, 2])
def test_batch_norm_in_a_block_that_has_to_meet_is_refused(door: int) -> None:
    model, (inputs, targets) = Stages(), images()
    with pytest.raises(ModelError, match=r"layer1.0.norm is batch norm in a block") as error:
        if door == 1:
            Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=3, checkpoint=True).backward(inputs, targets)
        else:
            MicroBatched(model, 3, checkpoint=True)(inputs)
    assert "leave checkpoint out" in error.value.do and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("batch_norm", ["local", "frozen", "one piece"])
def test_batch_norm_that_need_not_meet(batch_norm: str) -> None:
    first, (inputs, targets) = Stages(), images()
    found_ = []
    for on in (False, True):
        model = copy.deepcopy(first)
        for module in model.modules() if batch_norm == "frozen" else ():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        options = {"batch_norm": "local"} if batch_norm == "local" else {}
        size = N if batch_norm == "one piece" else 3
        door = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=size, checkpoint=on, **options)
        door.backward(inputs, targets)
        found_.append(model)
    assert distance(*found_) <= TOLERANCE
    for one, other in zip(found_[0].buffers(), found_[1].buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("way", ["door 1", "offload", "keep", "door 1, any loss"])
def test_batch_norm_outside_of_the_blocks_meets(way: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D), Residual(), nn.BatchNorm1d(D), Residual(), Residual())
    plain, inputs, targets = copy.deepcopy(model), torch.randn(N, D), torch.randn(N, D)
    with counted_calls() as calls:
        run(model, inputs, targets, way)
    whole(plain, inputs, targets, way)
    assert calls and distance(model, plain) <= TOLERANCE
    for one, other in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.allclose(one, other, rtol=TOLERANCE, atol=1e-15)
    assert held(model) == held(plain)


# --- Compiled code


@pytest.mark.parametrize("what", ["model", "blocks", "blocks in place"])
def test_compiled_code(what: str) -> None:
    model, inputs, targets = made("residual")
    plain = copy.deepcopy(model)
    if what == "model":
        compiled: nn.Module = torch.compile(model, backend="eager")  # type: ignore[assignment]
    else:
        compiled = model
        for i in range(1, 4):
            if what == "blocks":
                model[i] = torch.compile(model[i], backend="eager")
            else:
                model[i].compile(backend="eager")
    before = held(model)
    with counted_calls() as calls:
        run(compiled, inputs, targets, "door 1")
        run(compiled, inputs, targets, "keep")
    whole(plain, inputs, targets, "door 1")
    whole(plain, inputs, targets, "keep")
    assert calls and held(model) == before
    assert (
        architectures.distance(
            {name.replace("_orig_mod.", ""): g for name, g in architectures.gradients(model).items()},
            architectures.gradients(plain),
        )
        <= TOLERANCE
    )
