"""Random numbers by sample: any split draws the masks, and gives the gradient, of the batch in one piece."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from bigbatch.core import sample_numbers
from bigbatch.core.by_sample import BySample
from bigbatch.core.sample_axes import Axes, axes_of
from bigbatch.core.sample_numbers import Numbers, block_size, flip_coins
from bigbatch.errors import OptionError
from test_rng import CASES, Body, gradient, off

SAMPLES, T, H, SEED = 20, 5, 8, 2**40 + 7
Model = Callable[[Tensor], Tensor]

EXTRA: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[], nn.Module] | None]] = {
    "mlp": (
        lambda m, h: m.inner(h),
        lambda: nn.Sequential(nn.Linear(H, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, H)),
    ),
    "samples and tokens in one axis": (lambda m, h: F.dropout(h.flatten(0, 1), 0.3).view_as(h), None),
    "layer drop": (lambda m, h: m.inner(F.dropout(h, 0.2)) if torch.rand(()) < 0.5 else h, lambda: nn.Linear(H, H)),
    "noise of a shape": (lambda m, h: h * torch.rand(h.shape), None),
    "hidden like samples": (lambda m, h: h * torch.rand(H)[None, None] + torch.rand(len(h))[:, None, None], None),
    "channels last": (lambda m, h: F.dropout(h.transpose(1, 2), 0.3).transpose(1, 2), None),
    "chances in a tensor": (lambda m, h: h * torch.bernoulli(h.detach().sigmoid()), None),
    "chances in place": (lambda m, h: h * torch.empty_like(h).bernoulli_(h.detach()[..., :1].sigmoid()), None),
    "geometric": (lambda m, h: h * torch.empty_like(h).geometric_(0.4), None),
    "integers like the input": (lambda m, h: h * torch.randint_like(h, 2, 5), None),
    "normal of a size": (lambda m, h: h * torch.normal(1.0, 0.5, h.shape), None),
}
FOLLOWED = {**{name: case for name, case in CASES.items() if name != "own generator"}, **EXTRA}


def build(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    noisy, inner = FOLLOWED[case]
    return Body(noisy, inner() if inner else None).double(), torch.randn(SAMPLES, T, H, dtype=torch.float64)


def axes(model: Model, x: Tensor, seed: int = SEED) -> Axes:
    looks = []
    for samples in (2, 3):
        with torch.no_grad(), BySample(seed, 0, samples) as look:
            model(x[:samples])
        looks.append(look.seen)
    return axes_of(looks[0], 2, looks[1], 3)


def in_pieces(model: nn.Module, x: Tensor, sizes: Sequence[int], known: Axes, shift: int = 0) -> Tensor:
    model, first = copy.deepcopy(model), 0
    for size in sizes:
        before = torch.get_rng_state()
        with BySample(SEED, first + shift, size, known) as numbers:
            outputs = model(x[first : first + size])
        assert numbers.unfollowed == [] and torch.equal(torch.get_rng_state(), before)
        (outputs.sum() / len(x)).backward()
        first += size
    assert first == len(x)
    return gradient(model)


def cut(size: int) -> list[int]:
    return [min(size, SAMPLES - first) for first in range(0, SAMPLES, size)]


@pytest.mark.parametrize("case", FOLLOWED)
def test_any_split_gives_the_gradient_of_one_piece(case: str) -> None:
    model, x = build(case)
    known = axes(model, x)
    whole = in_pieces(model, x, [SAMPLES], known)
    for sizes in (cut(1), cut(3), cut(7), cut(16), [1, 4, 9, 6]):
        assert off(in_pieces(model, x, sizes, known), whole) < 1e-12


@pytest.mark.parametrize("case", ["mlp", "transformer", "lstm", "rrelu", "stochastic depth", "multinomial"])
def test_numbers_of_other_samples_are_caught(case: str) -> None:
    model, x = build(case)
    known = axes(model, x)
    assert off(in_pieces(model, x, cut(4), known, shift=1), in_pieces(model, x, [SAMPLES], known)) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@settings(max_examples=25, deadline=None)
@given(tokens=st.integers(1, 40), axis=st.integers(0, 2), rows=st.integers(1, 3), data=st.data())
def test_pieces_join_bitwise(dtype: torch.dtype, tokens: int, axis: int, rows: int, data: st.DataObject) -> None:
    cuts = sorted({0, SAMPLES, *data.draw(st.lists(st.integers(0, SAMPLES)))})
    kind = data.draw(st.sampled_from(["bernoulli_", "normal_", "uniform_", "exponential_"]))
    fill = lambda t, g: getattr(t, kind)(0.3, generator=g) if kind == "bernoulli_" else getattr(t, kind)(generator=g)  # noqa: E731

    def filled(first: int, last: int) -> Tensor:
        shape = [tokens, 3, 2]
        shape[axis] = rows * (last - first)
        target = torch.empty(shape[::-1], dtype=dtype).permute(2, 1, 0) if last % 2 else torch.empty(shape, dtype=dtype)
        Numbers(SEED, 3, first, last - first).fill(target, axis, fill)
        return target

    pieces = [filled(first, last) for first, last in zip(cuts[:-1], cuts[1:], strict=True)]
    assert torch.equal(torch.cat(pieces, axis), filled(0, SAMPLES))


def test_strides_do_not_matter() -> None:
    plain, last = torch.ones(6, 4, 5, 5), torch.ones(6, 4, 5, 5).contiguous(memory_format=torch.channels_last)
    drawn = []
    for images in (plain, last):
        with BySample(SEED, 0, 6):
            drawn.append(F.dropout(images, 0.5))
    assert torch.equal(*drawn)


def test_a_checkpointed_micro_batch_draws_the_same_again() -> None:
    model, x = build("transformer")
    known = axes(model, x)
    whole, again = in_pieces(model, x, [SAMPLES], known), copy.deepcopy(model)

    def run(first: int) -> Tensor:
        numbers = BySample(SEED, first, 5, known)
        return checkpoint(again, x[first : first + 5], use_reentrant=False, context_fn=lambda: (numbers, numbers))

    outputs = torch.cat([run(first) for first in range(0, SAMPLES, 5)])
    with BySample(SEED + 1, 0, SAMPLES, known):  # one that is open meanwhile stays out of the recomputation
        model(x)
        outputs.mean().backward()
    assert off(gradient(again), whole) < 1e-12


def test_micro_batches_side_by_side() -> None:
    model, x = build("transformer")
    known, outputs, gate = axes(model, x), {}, threading.Barrier(4)

    def run(first: int) -> None:
        with BySample(SEED, first, 5, known):
            gate.wait()
            outputs[first] = model(x[first : first + 5])

    threads = [threading.Thread(target=run, args=(first,)) for first in range(0, SAMPLES, 5)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    with BySample(SEED, 0, SAMPLES, known):
        whole = model(x)
    assert off(torch.cat([outputs[first] for first in sorted(outputs)]), whole) < 1e-12


class Passing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("around", ["mode outside", "mode inside", "no_grad", "inference", "autocast", "compile"])
def test_surroundings_do_not_matter(around: str) -> None:
    model, x = build("transformer")
    model, x = (model.float(), x.float()) if around == "autocast" else (model, x)
    with torch.inference_mode(around == "inference"):  # composite operators draw by other operators there
        known = axes(model, x)
    run = torch.compile(model, backend="eager") if around == "compile" else model

    def outputs(first: int, last: int) -> Tensor:
        numbers = BySample(SEED, first, last - first, known)
        surroundings: dict[str, tuple[Any, Any]] = {
            "mode outside": (Passing(), numbers),
            "mode inside": (numbers, Passing()),
            "no_grad": (torch.no_grad(), numbers),
            "inference": (torch.inference_mode(), numbers),
            "autocast": (torch.autocast("cpu", torch.bfloat16), numbers),
            "compile": (numbers, torch.enable_grad()),
        }
        outer, inner = surroundings[around]
        with outer, inner:
            result = run(x[first:last])
        assert numbers.unfollowed == []
        return result

    whole = outputs(0, SAMPLES)
    pieces = torch.cat([outputs(first, first + 4) for first in range(0, SAMPLES, 4)])
    assert off(pieces.double(), whole.double()) < (1e-2 if around == "autocast" else 1e-12)
    assert not torch.equal(whole, outputs(0, SAMPLES).flip(0))


X = torch.randn(SAMPLES, T, H)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda x: torch.rand(3, generator=torch.Generator()),
            "aten::rand: it draws from a generator that it was handed",
        ),
        (lambda x: x[torch.randperm(len(x))], "aten::randperm: n is 2 for 2 samples and 3 for 3"),
        (lambda x: torch.randint(0, len(x), (len(x),)), "aten::randint: high is 2 for 2 samples and 3 for 3"),
        (lambda x: F.dropout(x @ x.flatten(1)[:, :H].T), "shape (2, 5, 2) for 2 samples, (3, 5, 3) for 3"),
        (lambda x: F.dropout(x) if len(x) > 3 else x, "nothing that was looked at tells which axis of (4, 5, 8)"),
        (lambda x: torch.multinomial(torch.ones(4), len(x)), "aten::multinomial: num_samples is 2 for 2 samples"),
        (lambda x: checkpoint(F.dropout, x, use_reentrant=False), "recomputes it by torch.utils.checkpoint"),
        (lambda x: F.dropout(torch.nested.nested_tensor([*x])), "its tensors are not dense"),
        (lambda x: x.to("meta").bernoulli_(0.5), "its tensors hold no numbers"),
    ],
)
def test_what_cannot_be_followed_is_named_and_draws_as_ever(model: Model, said: str) -> None:
    known = axes(model, X)
    torch.manual_seed(3)
    with BySample(SEED, 0, 4, known) as numbers:
        drawn = model(X[:4])
    assert len(numbers.unfollowed) == 1 and said in numbers.unfollowed[0]
    torch.manual_seed(3)
    plain = model(X[:4])
    assert drawn.is_meta or drawn.is_nested or "generator" in said or torch.equal(drawn, plain)


def test_an_axis_told_from_one_shape_is_named_as_a_guess() -> None:
    with BySample(SEED, 0, 4) as numbers:
        F.dropout(X[:4])
        torch.rand(())
    assert numbers.unfollowed == ["aten::bernoulli_: its samples were guessed from the shape (4, 5, 8) alone"]


def test_negative_places_are_refused() -> None:
    with pytest.raises(OptionError, match="negative"):
        BySample(0, -1, 4)


def columns(seed: int = SEED, place: int = 0, first: int = 0) -> Tensor:
    numbers = torch.empty(64, 500)
    Numbers(seed, place, first, 64).fill(numbers, 0, lambda t, g: t.normal_(generator=g))
    return numbers


@pytest.mark.parametrize(
    ("one", "other"), [({"seed": 0}, {"seed": 1}), ({"place": 0}, {"place": 1}), ({"first": 0}, {"first": 64})]
)
def test_neighbours_are_independent(one: dict[str, int], other: dict[str, int]) -> None:
    both = torch.cat([columns(**one), columns(**other)])
    correlations = torch.corrcoef(both) - torch.eye(128)
    assert correlations.abs().max() < 6 / 500**0.5 and abs(correlations.mean()) < 0.01
    assert abs(both.mean()) < 0.02 and abs(both.var() - 1) < 0.03


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.int64]
)
@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_coins_fall_as_often_as_asked(dtype: torch.dtype, p: float) -> None:
    coins = torch.empty(300_001, dtype=dtype)
    flip_coins(coins, p, torch.Generator().manual_seed(5))
    assert set(coins.unique().tolist()) <= {0, 1}
    assert abs(coins.double().mean().item() - p) <= 5 * (p * (1 - p) / len(coins)) ** 0.5


def test_dropout_keeps_the_mean() -> None:
    for drop in (F.dropout, lambda x, p: torch.native_dropout(x, p, True)[0]):
        with BySample(SEED, 0, 64):
            dropped = drop(torch.ones(64, 3000), 0.3)
        assert torch.allclose(dropped.unique(), torch.tensor([0.0, 1 / 0.7])) and abs(dropped.mean() - 1) < 0.01


def test_a_seed_without_the_place_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Numbers.generator
    monkeypatch.setattr(Numbers, "generator", lambda self, *block: real(replace(self, place=0), *block))
    with pytest.raises(AssertionError):
        test_neighbours_are_independent({"place": 0}, {"place": 1})


def test_a_block_that_depends_on_the_split_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = build("mlp")
    known = axes(model, x)
    whole = in_pieces(model, x, [SAMPLES], known)
    monkeypatch.setattr(sample_numbers, "block_size", lambda elements, device: 3)
    assert off(in_pieces(model, x, cut(4), known), whole) > 1e-3


@given(elements=st.integers(0, 10**7))
def test_a_block_is_a_power_of_two(elements: int) -> None:
    size = block_size(elements, torch.device("cpu"))
    assert 1 <= size <= 256 and size & (size - 1) == 0 and (size == 1 or size * elements <= 2**11)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", ["mlp", "transformer", "stochastic depth", "rrelu", "channels last", "native dropout"])
def test_any_split_on_cuda(case: str) -> None:
    model, x = build(case)
    model, x = model.cuda(), x.cuda()
    with torch.device("cuda"), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        known = axes(model, x)
        before = torch.cuda.get_rng_state()
        whole = in_pieces(model, x, [SAMPLES], known)
        for size in (1, 3, 7):
            assert off(in_pieces(model, x, cut(size), known), whole) < 1e-11
    assert torch.equal(torch.cuda.get_rng_state(), before)
