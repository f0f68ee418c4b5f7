"""A micro-batch that replays its part of the whole batch's random numbers gives its part of the gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bigbatch.core.random_operators import share
from bigbatch.core.rng import Draws, preserved_rng
from bigbatch.errors import OptionError

SAMPLES, T, H = 8, 5, 8


class Body(nn.Module):
    """A projection, something random, a head; the random part is given as a function of (module, hidden [N, T, H])."""

    def __init__(self, noisy: Callable[[nn.Module, Tensor], Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.noisy, self.inner = noisy, inner
        self.first, self.last = nn.Linear(H, H), nn.Linear(H, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.noisy(self, self.first(x)).reshape(len(x), -1, H)).mean(1).sin()


def layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(H, 2, 16, dropout=0.3, **options)


def picked(m: nn.Module, h: Tensor) -> Tensor:
    return h.gather(1, torch.multinomial(h.softmax(-1).flatten(1), 3).remainder(T)[..., None].expand(-1, -1, H))


def own_generator(m: nn.Module, h: Tensor) -> Tensor:
    return h * torch.rand(len(h), 1, 1, generator=torch.Generator().manual_seed(3), dtype=h.dtype)


def by_sequence(m: nn.Module, h: Tensor) -> Tensor:
    return m.inner(h.transpose(0, 1)).transpose(0, 1)


CASES: dict[str, tuple[Callable[[nn.Module, Tensor], Tensor], Callable[[], nn.Module] | None]] = {
    "dropout": (lambda m, h: F.dropout(h, 0.4), None),
    "dropout in place": (lambda m, h: F.dropout(h * 2, 0.4, inplace=True), None),
    "native dropout": (lambda m, h: torch.native_dropout(h, 0.4, True)[0], None),
    "native dropout of everything": (lambda m, h: h + torch.native_dropout(h, 1.0, True)[0], None),
    "feature dropout": (lambda m, h: F.dropout2d(h[..., None], 0.4)[..., 0], None),
    "alpha dropout": (lambda m, h: F.alpha_dropout(h, 0.4, training=True), None),
    "feature alpha dropout": (lambda m, h: F.feature_alpha_dropout(h, 0.4, training=True), None),
    "stochastic depth": (lambda m, h: h + h.exp() * (torch.rand(len(h), 1, 1) < 0.5), None),
    "noise shared by all samples": (lambda m, h: h * torch.randn(H), None),
    "a coin for the batch": (lambda m, h: h if torch.rand(1).item() < 0.5 else -3 * h, None),
    "noise like the input": (lambda m, h: h * torch.rand_like(h), None),
    "out=": (lambda m, h: h * torch.randn(h.shape, out=torch.empty_like(h)), None),
    "normal with a mean": (lambda m, h: h * torch.normal(h.detach(), 0.5), None),
    "randint": (lambda m, h: h * torch.randint(0, 3, (len(h), T, 1)), None),
    "poisson": (lambda m, h: h * torch.poisson(h.detach().exp()), None),
    "binomial": (lambda m, h: h * torch.binomial(torch.full_like(h, 5.0), torch.full_like(h, 0.5)), None),
    "dirichlet": (lambda m, h: torch.distributions.Dirichlet(h.exp()).rsample(), None),
    "gamma": (lambda m, h: torch.distributions.Gamma(h.exp(), 1.0).rsample(), None),
    "gumbel": (lambda m, h: F.gumbel_softmax(h), None),
    "multinomial": (picked, None),
    "own generator": (own_generator, None),
    "rrelu": (lambda m, h: F.rrelu(h, training=True), None),
    "rrelu in place": (lambda m, h: F.rrelu_(h * 2, training=True), None),
    "lstm": (lambda m, h: m.inner(h)[0], lambda: nn.LSTM(H, H, 3, dropout=0.3, batch_first=True)),
    "gru, time first": (
        lambda m, h: m.inner(h.transpose(0, 1))[0].transpose(0, 1),
        lambda: nn.GRU(H, H, 2, dropout=0.3),
    ),
    "attention": (lambda m, h: m.inner(h, h, h)[0], lambda: nn.MultiheadAttention(H, 2, 0.3, batch_first=True)),
    "attention without weights": (
        lambda m, h: m.inner(h, h, h, need_weights=False)[0],
        lambda: nn.MultiheadAttention(H, 2, 0.3, batch_first=True),
    ),
    "transformer": (lambda m, h: m.inner(h), lambda: layer(batch_first=True)),
    "transformer, time first": (by_sequence, layer),
}


def build(case: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    noisy, inner = CASES[case]
    return Body(noisy, inner() if inner else None).double(), torch.randn(SAMPLES, T, H, dtype=torch.float64)


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def whole_batch(model: nn.Module, x: Tensor) -> tuple[Draws, Tensor]:
    draws, model = Draws(), copy.deepcopy(model)
    with draws.record(len(x)):
        outputs = model(x)
    outputs.mean().backward()
    return draws, gradient(model)


def in_pieces(model: nn.Module, x: Tensor, draws: Draws, size: int, shift: int = 0) -> Tensor:
    model = copy.deepcopy(model)
    for first in range(0, len(x), size):
        piece = x[first : first + size]
        begin = max(first - shift, 0)
        with draws.replay(begin, begin + len(piece)):
            outputs = model(piece)
        (outputs.sum() / len(x)).backward()
    return gradient(model)


def off(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_equals_whole_batch(case: str) -> None:
    model, x = build(case)
    draws, right = whole_batch(model, x)
    for size in (1, 3, 7):
        before = torch.get_rng_state()
        assert off(in_pieces(model, x, draws, size), right) < 1e-12
        assert torch.equal(torch.get_rng_state(), before)
    assert draws.unfollowed == []


@pytest.mark.parametrize("case", ["dropout", "native dropout", "rrelu", "transformer", "lstm", "stochastic depth"])
def test_masks_of_another_sample_are_caught(case: str) -> None:
    model, x = build(case)
    draws, right = whole_batch(model, x)
    assert off(in_pieces(model, x, draws, 1, shift=1), right) > 1e-3


def test_without_replay_the_masks_differ() -> None:
    model, x = build("dropout")
    _, right = whole_batch(model, x)
    model(x).mean().backward()
    assert off(gradient(model), right) > 1e-3


def test_recording_moves_the_generator_as_one_forward_does() -> None:
    model, x = build("transformer")
    torch.manual_seed(2)
    model(x)
    after = torch.get_rng_state()
    torch.manual_seed(2)
    with torch.no_grad(), Draws().record(len(x)):
        model(x)
    assert torch.equal(torch.get_rng_state(), after)


def test_recorded_without_grad() -> None:
    model, x = build("transformer")
    draws = Draws()
    with torch.no_grad(), draws.record(len(x)):
        whole = model(x)
    with draws.replay(2, 5):
        piece = model(x[2:5])
    assert (piece - whole[2:5]).abs().max() < 1e-13 and draws.unfollowed == []


@pytest.mark.parametrize("around", [True, False])
def test_checkpointed_micro_batches(around: bool) -> None:
    model, x = build("transformer")
    draws, right = whole_batch(model, x)
    again = copy.deepcopy(model)

    def run(first: int, last: int) -> Tensor:
        fresh = lambda: (draws.replay(first, last), draws.replay(first, last))  # noqa: E731
        return checkpoint(again, x[first:last], use_reentrant=False, context_fn=fresh)

    outputs = torch.cat([run(first, min(first + 3, SAMPLES)) for first in range(0, SAMPLES, 3)])
    if around:  # a replay that is open while the recomputation runs must stay out of it
        with draws.replay(0, SAMPLES):
            model(x)
            outputs.mean().backward()
    else:
        outputs.mean().backward()
    assert off(gradient(again), right) < 1e-12 and draws.unfollowed == []


def test_recomputation_without_replay_is_caught() -> None:
    model, x = build("transformer")
    draws, right = whole_batch(model, x)
    with draws.replay(0, SAMPLES):
        outputs = checkpoint(model, x, use_reentrant=False)
    outputs.mean().backward()
    assert off(gradient(model), right) > 1e-3


def names(model: Callable[[Tensor], Any], x: Tensor, last: int = 3) -> str:
    draws = Draws()
    with draws.record(len(x)):
        model(x)
    with draws.replay(0, last):
        model(x[:last])
    return " | ".join(draws.unfollowed)


X = torch.randn(SAMPLES, T, H)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (lambda x: x[torch.randperm(len(x))], "aten::randperm: n is 3, for the whole batch it was 8"),
        (lambda x: x[torch.randint(0, len(x), (len(x),))], "aten::randint: high is 3"),
        (lambda x: F.dropout(x @ x.flatten(1)[:, :H].T, 0.3), "shape (3, 5, 3) is no part of (8, 5, 8)"),
        (lambda x: F.dropout(x) if len(x) > 3 else torch.rand(3), "aten::rand: the whole batch drew by aten::bern"),
        (lambda x: x if len(x) > 3 else F.dropout(x), "aten::bernoulli_: the whole batch drew no more numbers"),
        (lambda x: F.dropout(x) if len(x) > 3 else x, "aten::bernoulli_: the micro-batch never came to it"),
        (lambda x: F.dropout(x, 0.1 * len(x)), "aten::bernoulli_: p is "),
        (lambda x: F.dropout(x[x > 0]), "is no part of"),
        (lambda x: checkpoint(F.dropout, x, use_reentrant=False), "recomputes it by torch.utils.checkpoint"),
    ],
)
def test_what_cannot_be_followed_is_named(model: Callable[[Tensor], Any], said: str) -> None:
    assert said in names(model, X)


def test_fused_attention_is_named_only_with_dropout() -> None:
    library = torch.library.Library("bigbatch_test_rng", "DEF")
    library.define("attention(Tensor q, float dropout_p) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    library.impl("attention", lambda q, dropout_p: q * torch.rand(q.shape), "CPU")
    fused = torch.ops.bigbatch_test_rng.attention
    assert names(lambda q: fused(q, 0.0), X) == ""
    assert names(lambda q: fused(q, 0.5), X).startswith("bigbatch_test_rng::attention: a fused kernel")


def test_a_fallback_draws_anew_every_time() -> None:
    draws = Draws()
    with draws.record(SAMPLES):
        torch.randperm(SAMPLES)
    found = set()
    for _ in range(4):
        with draws.replay(0, 7):
            found.add(tuple(torch.randperm(7).tolist()))
    assert len(found) > 1


def test_samples_that_were_not_recorded_are_refused() -> None:
    with pytest.raises(OptionError, match="0 samples were recorded"), Draws().replay(0, 1):
        pass


@settings(max_examples=60, deadline=None)
@given(samples=st.integers(1, 6), rows=st.integers(1, 3), axis=st.integers(0, 2), data=st.data())
def test_shares_join_to_the_whole(samples: int, rows: int, axis: int, data: st.DataObject) -> None:
    shape = [2, 3, 4]
    shape[axis] = samples * rows
    whole = torch.rand(shape)
    cuts = sorted({0, samples, *data.draw(st.lists(st.integers(0, samples)))})
    pieces = []
    for first, last in zip(cuts[:-1], cuts[1:], strict=True):
        piece = share(whole, [*shape[:axis], rows * (last - first), *shape[axis + 1 :]], samples, first, last)
        assert piece is not None
        pieces.append(piece)
    assert torch.equal(torch.cat(pieces, axis), whole)


def test_generators_are_put_back_also_after_an_error() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), preserved_rng():
        torch.rand(1000)
        raise ZeroDivisionError
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(1)
    assert not torch.equal(torch.get_rng_state(), before)
