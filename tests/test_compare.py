"""Distances between gradients: oracles in plain float64, and faults that must be seen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bigbatch.core import compare
from bigbatch.core.compare import explain_by_weights, relative_difference, rounding_bound, worst
from bigbatch.errors import OptionError

Named = dict[str, Tensor]


def some(seed: int, scale: float = 1.0) -> Named:
    g = torch.Generator().manual_seed(seed)
    shapes = {"emb": (7, 3), "weight": (4, 5), "bias": (4,), "scale": ()}
    return {name: scale * torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()}


def flat(gradients: Named) -> Tensor:
    return torch.cat([g.flatten() for g in gradients.values()])


def mixed(weights: list[float], pieces: list[Named]) -> Named:
    return {name: sum(w * piece[name] for w, piece in zip(weights, pieces, strict=True)) for name in pieces[0]}


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.integers(0, 99), st.floats(1e-6, 1e6))
def test_relative_difference_is_that_of_one_long_vector(a: int, b: int, scale: float) -> None:
    left, right = some(a, scale), some(b)
    expected = ((flat(left) - flat(right)).norm() / flat(right).norm()).item()
    assert relative_difference(left, right) == pytest.approx(expected, rel=1e-12)
    assert relative_difference(right, right) == 0.0


def test_none_zero_and_not_finite() -> None:
    one, zero = torch.ones(2), torch.zeros(2)
    assert relative_difference({}, {}) == 0.0
    assert relative_difference({"a": None, "b": one}, {"b": one}) == 0.0
    assert relative_difference({"a": one}, {"a": None}) == math.inf
    assert relative_difference({"a": zero}, {"a": None}) == math.inf
    assert relative_difference({}, {"a": one}) == math.inf
    assert relative_difference({"a": zero}, {"a": zero}) == 0.0
    assert relative_difference({"a": one}, {"a": zero}) == math.inf
    assert relative_difference({"a": one}, {"a": torch.ones(3)}) == math.inf
    for bad in (math.nan, math.inf):
        assert relative_difference({"a": one * bad}, {"a": one}) == math.inf
        assert relative_difference({"a": one}, {"a": one * bad}) == math.inf
        assert relative_difference({"a": one * bad}, {"a": one * bad}) == math.inf


def test_small_types_are_added_up_in_float64() -> None:
    half = {"a": torch.full((100_000,), 300.0, dtype=torch.float16)}  # squares overflow float16
    other = {"a": torch.full((100_000,), 330.0, dtype=torch.float16)}
    assert relative_difference(other, half) == pytest.approx(0.1, rel=1e-12)


def test_sparse_and_complex_gradients() -> None:
    dense = torch.eye(3)
    assert relative_difference({"a": dense.to_sparse()}, {"a": dense}) == 0.0
    assert relative_difference({"a": torch.tensor([3 + 4j])}, {"a": torch.tensor([3j])}) == pytest.approx(10**0.5 / 3)


def test_worst_names_the_faulty_parameter() -> None:
    right = some(1)
    wrong = {**right, "bias": right["bias"] * 1.01}
    name, by = worst(wrong, right)
    assert name == "bias" and by == pytest.approx(0.01, rel=1e-9)
    assert worst(right, right) == ("emb", 0.0)
    assert worst({}, {}) == ("", 0.0)
    assert worst({**right, "scale": None}, right) == ("scale", math.inf)
    assert worst({**right, "weight": right["weight"] * math.nan}, right) == ("weight", math.inf)


def test_a_bias_before_a_norm_is_not_blamed_for_rounding() -> None:
    def gradients(dtype: torch.dtype) -> Named:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        x = torch.randn(32, 6)
        model.to(dtype)(x.to(dtype)).square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    found, right = gradients(torch.float32), gradients(torch.float64)
    faulty = {**found, "3.weight": found["3.weight"] * 1.01}
    name, by = worst(faulty, right)
    assert name == "3.weight" and by == pytest.approx(0.01, rel=1e-2)
    own = {key: ((found[key] - right[key]).norm() / right[key].norm()).item() for key in right}
    assert max(own, key=own.__getitem__) == "0.bias" and own["0.bias"] > 1  # what a plain relative difference blames


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("terms", [10, 1000, 20_000])
def test_sums_stay_inside_the_bound(dtype: torch.dtype, terms: int) -> None:
    numbers = torch.randn(terms, generator=torch.Generator().manual_seed(terms)).add(0.3).to(dtype)
    steps = torch.cumsum(numbers.double(), 0)
    total = torch.zeros((), dtype=dtype)
    for number in numbers if terms <= 1000 or dtype == torch.float32 else numbers[:1000]:
        total = total + number
    added = terms if terms <= 1000 or dtype == torch.float32 else 1000
    exact = steps[added - 1].item()
    condition = numbers[:added].double().abs().sum().item() / abs(exact)
    assert abs(total.item() - exact) / abs(exact) <= rounding_bound(added, dtype, condition)


def test_the_bound_is_no_larger_than_it_must_be() -> None:
    u = torch.finfo(torch.float32).eps / 2
    assert rounding_bound(10_000, torch.float32) == pytest.approx(6 * 100 * u, rel=1e-3)
    assert rounding_bound(10_000, torch.float32) < 10_000 * u / 10  # far below the bound for the worst case
    assert rounding_bound(10_000, torch.float32, 50.0) == 50 * rounding_bound(10_000, torch.float32)
    assert rounding_bound(0, torch.float64) == 0.0
    assert rounding_bound(10**12, torch.bfloat16) == math.inf
    assert rounding_bound(7, torch.complex64) == rounding_bound(7, torch.float32)


def test_a_real_fault_lies_outside_the_bound() -> None:
    right = torch.randn(1000, generator=torch.Generator().manual_seed(1)).add(1)
    faulty = right[:-1].sum()
    condition = (right.abs().sum() / right.sum().abs()).item()
    off = abs((faulty.double() - right.double().sum()) / right.double().sum()).item()
    assert off > rounding_bound(1000, torch.float32, condition)


@pytest.mark.parametrize("wrong", [{"terms": -1}, {"condition": 0.5}, {"confidence": 0.0}, {"dtype": torch.int64}])
def test_bounds_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        rounding_bound(**{"terms": 5, "dtype": torch.float32, **wrong})


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-10, 10).filter(lambda w: abs(w) > 1e-3), min_size=1, max_size=6), st.integers(1, 40))
def test_weights_are_found_again(weights: list[float], chunk: int) -> None:
    pieces = [some(seed, 10.0 ** (seed - 3)) for seed in range(len(weights))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare, "_CHUNK", chunk)
        found, rest = explain_by_weights(mixed(weights, pieces), pieces)
    assert found == pytest.approx(weights, rel=1e-6) and rest < 1e-11


def test_the_answer_is_least_squares() -> None:
    pieces, whole = [some(seed) for seed in range(4)], some(9)
    found, rest = explain_by_weights(whole, pieces)
    table = torch.stack([flat(piece) for piece in pieces], 1)
    right = torch.linalg.lstsq(table, flat(whole)[:, None]).solution[:, 0]
    assert found == pytest.approx(right.tolist(), rel=1e-9)
    assert rest == pytest.approx(((flat(whole) - table @ right).norm() / flat(whole).norm()).item(), rel=1e-9)


def test_wrong_weights_and_tied_samples_are_told_apart() -> None:
    def gradient(x: Tensor, tied: bool) -> Named:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4) if tied else nn.Tanh(), nn.Linear(4, 2)).double()
        model(x).square().mean().backward()
        return {name: p.grad for name, p in model.named_parameters()}

    torch.manual_seed(3)
    x = torch.randn(10, 3, dtype=torch.float64)
    for tied in (False, True):
        pieces = [gradient(piece, tied) for piece in x.split([6, 4])]
        found, rest = explain_by_weights(gradient(x, tied), pieces)
        assert (rest > 1e-2) == tied
        assert (found == pytest.approx([0.6, 0.4])) != tied


def test_dependent_zero_missing_and_bad_pieces() -> None:
    one = some(1)
    found, rest = explain_by_weights(one, [one, one])
    assert found == pytest.approx([0.5, 0.5]) and rest < 1e-12
    nothing = {name: torch.zeros_like(value) for name, value in one.items()}
    found, rest = explain_by_weights(one, [nothing, one, dict.fromkeys(one)])
    assert found == pytest.approx([0.0, 1.0, 0.0]) and rest < 1e-12
    assert explain_by_weights(nothing, [one]) == ([0.0], 0.0)
    assert explain_by_weights(one, []) == ([], 1.0)
    assert explain_by_weights(one, [nothing]) == ([0.0], 1.0)
    found, rest = explain_by_weights(one, [{**one, "bias": one["bias"] * math.nan}])
    assert math.isnan(found[0]) and rest == math.inf
    assert explain_by_weights({**one, "more": None}, [one])[1] < 1e-12
    assert explain_by_weights(one, [{**one, "more": torch.ones(2)}])[1] > 1e-2
