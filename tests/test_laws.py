"""Every law holds on the zoo in every engine, and every law can fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import laws
from bigbatch import accumulator
from bigbatch.core import gradients, rules
from bigbatch.core.buffers import Buffers
from bigbatch.core.split import Splitter
from bigbatch.engines import recompute, sequential
from laws import DOOR_1, DOOR_2, Case, Failure, N
from zoo import BY_NAME, CASES
from zoo_models import C, D, Unused

RANDOM = [case.name for case in CASES if case.random]
MOVING = ["counter and moving average", "functional call", "spectral norm"]
PARTLY = ["frozen middle", "unused parameters and outputs", "experts, some without samples", "teacher"]
TOKENS = ["tied weights, ignored tokens", "tied weights, counted tokens", "class weights"]
WINDOWED = [*TOKENS, "linear", "perceptron", "sum", "two terms, two denominators", "loss with weights of its own",
            "own loss", "own loss, handed its denominator", "packed sequence", "ranking", "contrastive"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that share out a handful of numbers only wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def over(names: Sequence[str], *allowed: str) -> Any:
    """A test for each case and each engine that can run it."""
    pairs = [(name, way) for name in names for way in BY_NAME[name].ways_to_run() if not allowed or way in allowed]
    return pytest.mark.parametrize(("name", "way"), pairs)


def broken(law: Callable[..., None], *arguments: Any) -> None:
    """The law notices."""
    with pytest.raises(AssertionError):
        law(*arguments)


def test_the_zoo_is_large() -> None:
    assert len(BY_NAME) == len(CASES) >= 40


@over(list(BY_NAME))
def test_equals_the_whole_batch(name: str, way: str) -> None:
    laws.equals_the_whole_batch(BY_NAME[name], way)


@over(list(BY_NAME), *DOOR_1)
def test_equals_the_whole_batch_in_windows(name: str, way: str) -> None:
    laws.equals_the_whole_batch_in_windows(BY_NAME[name], way)


@pytest.mark.parametrize(("name", "way"), [("tied weights, ignored tokens", "sequential"), ("ranking", "joint")])
def test_equals_the_whole_batch_however_it_is_cut(name: str, way: str) -> None:
    case = BY_NAME[name]
    expected, _ = laws.expected_of(case, laws.batch_of(case))

    @settings(max_examples=20)
    @given(inner=st.sets(st.integers(1, N - 1)), size=st.none() | st.integers(1, N + 2))
    def check(inner: set[int], size: int | None) -> None:
        borders = [0, *sorted(inner), N]
        window = [laws.rows_of(case, a, z) for a, z in zip(borders, borders[1:], strict=False)]
        laws.assert_same(laws.micro_batches(case, laws.made(case), window, way, size), expected)

    check()


@pytest.mark.parametrize(
    ("name", "way"), [("perceptron", "sequential"), ("contrastive", "joint"), ("contrastive", "keep")]
)
def test_a_dropped_micro_batch_is_caught(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Splitter.pieces

    def lossy(self: Splitter, *arguments: Any) -> Any:
        pieces = whole(self, *arguments)
        return pieces[:-1] or pieces

    monkeypatch.setattr(Splitter, "pieces", lossy)
    broken(laws.equals_the_whole_batch, BY_NAME[name], way, (3,))


@pytest.mark.parametrize("law", [laws.equals_the_whole_batch, laws.equals_the_whole_batch_in_windows])
@pytest.mark.parametrize("name", ["tied weights, ignored tokens", "perceptron"])
def test_a_mean_of_means_is_caught(law: Callable[..., None], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "weights", lambda form, counts: [1 / len(counts)] * len(counts))
    broken(law, BY_NAME[name], "sequential")


@over(WINDOWED, *DOOR_1)
def test_partial_last_window(name: str, way: str) -> None:
    laws.partial_last_window_is_right(BY_NAME[name], way)


def test_a_last_window_divided_by_accum_steps_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "weights", lambda form, counts: [1 / 3] * len(counts))
    broken(laws.partial_last_window_is_right, BY_NAME["perceptron"], "sequential")


@over(list(BY_NAME))
def test_gradients_are_added(name: str, way: str) -> None:
    laws.gradients_are_added(BY_NAME[name], way)


def test_a_replaced_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "_add", lambda held, sums, copies: None)
    broken(laws.gradients_are_added, BY_NAME["linear"], "sequential")

    def into_new_tensors(held: Any, sums: Any, copies: Any) -> None:
        for parameter, gradient in held:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    monkeypatch.setattr(gradients, "_add", into_new_tensors)
    broken(laws.gradients_are_added, BY_NAME["linear"], "joint")


@over(["mixed dtypes", "complex weights", "perceptron", "tied weights, ignored tokens", *MOVING])
def test_dtype_and_device(name: str, way: str) -> None:
    laws.dtype_and_device_are_kept(BY_NAME[name], way)


def test_a_narrower_loss_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true = sequential.weighed_sum
    monkeypatch.setattr(sequential, "weighed_sum", lambda *arguments: true(*arguments).float())
    broken(laws.dtype_and_device_are_kept, BY_NAME["perceptron"], "sequential")


@over(MOVING)
def test_buffers_move_once(name: str, way: str) -> None:
    laws.buffers_move_once(BY_NAME[name], way)


@pytest.mark.parametrize("way", DOOR_1 + DOOR_2)
def test_a_buffer_that_moves_with_every_micro_batch_is_caught(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffers, "lent", lambda self, *_: nullcontext())
    broken(laws.buffers_move_once, BY_NAME["counter and moving average"], way)


@pytest.mark.parametrize("way", ["joint", "recompute", "mixed"])
def test_a_buffer_that_moves_in_the_second_forward_is_caught(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffers, "replayed", lambda self: nullcontext())
    broken(laws.buffers_move_once, BY_NAME["counter and moving average"], way)


@over(RANDOM)
def test_rng_ends_where_one_forward_leaves_it(name: str, way: str) -> None:
    laws.rng_ends_where_one_forward_leaves_it(BY_NAME[name], way)


def test_a_second_forward_with_new_masks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "checkpoint", partial(checkpoint, preserve_rng_state=False))
    broken(laws.rng_ends_where_one_forward_leaves_it, BY_NAME["dropout"], "recompute")


def test_other_masks_than_the_whole_batch_are_caught() -> None:
    case = BY_NAME["dropout"]
    expected, _ = laws.expected_of(case, laws.batch_of(case))
    broken(laws.assert_same, laws.micro_batches(case, laws.made(case), laws.batch_of(case), "sequential", 3), expected)


@over(PARTLY)
def test_no_gradient_where_none_belongs(name: str, way: str) -> None:
    laws.no_gradient_where_none_belongs(BY_NAME[name], way)


def test_a_gradient_of_zeros_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    true = gradients.added_at_once

    @contextmanager
    def filled(parameters: Sequence[nn.Parameter], *arguments: Any) -> Iterator[None]:
        with true(parameters, *arguments):
            yield
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad

    monkeypatch.setattr(accumulator, "added_at_once", filled)
    broken(laws.no_gradient_where_none_belongs, BY_NAME["frozen middle"], "sequential")


@pytest.mark.parametrize("name", TOKENS)
def test_ignored_targets(name: str) -> None:
    laws.ignored_targets_are_finite(BY_NAME[name], "sequential")


def test_a_count_that_is_raised_to_one_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "number", lambda count: max(float(count), 1.0))
    broken(laws.ignored_targets_are_finite, BY_NAME["tied weights, counted tokens"], "sequential")


def test_nothing_divided_by_nothing_is_caught() -> None:
    case = BY_NAME["tied weights, ignored tokens"]
    broken(laws.ignored_targets_are_finite, case, "joint")  # PyTorch's own mean over no target is not a number


@over(["linear", "perceptron", "sum", *TOKENS, "contrastive", "two terms, two denominators"], *DOOR_1)
def test_no_samples(name: str, way: str) -> None:
    laws.no_samples_is_no_error(BY_NAME[name], way)


def test_a_mean_over_no_samples_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequential, "weighed_sum", lambda losses, _, wide: torch.tensor(sum(losses) / len(losses)))
    case = BY_NAME["perceptron"]
    piece = accumulator.Piece(0, *laws.rows_of(case, 0, 0))
    monkeypatch.setattr(Splitter, "pieces", lambda *arguments: [piece])
    with pytest.raises((AssertionError, ZeroDivisionError)):
        laws.no_samples_is_no_error(case, "sequential")


class Deep(nn.Module):
    """Many layers over many positions, few weights: activations are what takes memory."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(part for _ in range(12) for part in (nn.Linear(16, 16), nn.Tanh())))
        self.hoard: list[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layers(x)
        if self.hoard is not None:
            self.hoard.append(hidden)
        return hidden.mean(1)


def hoarding() -> nn.Module:
    model = Deep()
    model.hoard = []
    return model


DEEP = Case("deep", Deep, lambda: (torch.randn(32, 100, 16), torch.randn(32, 16)), nn.MSELoss)
HOARD = Case("hoard", hoarding, DEEP.batch, nn.MSELoss)


@pytest.mark.parametrize("way", ["sequential", "joint", "recompute"])
def test_peak_is_one_micro_batch(way: str) -> None:
    laws.peak_is_one_micro_batch(DEEP, way, size=2)


@pytest.mark.parametrize(("case", "way"), [(DEEP, "keep"), (HOARD, "sequential")])
def test_kept_activations_are_caught(case: Case, way: str) -> None:
    broken(laws.peak_is_one_micro_batch, case, way, 2)


ERRORS = [
    (way, where) for way in DOOR_1 + DOOR_2 for where in ("forward", "backward") if way in DOOR_1 or where == "forward"
]


@pytest.mark.parametrize("held", [True, False], ids=["added to", "empty"])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize(("way", "where"), ERRORS)
@pytest.mark.parametrize("name", ["perceptron", "counter and moving average", "unused parameters and outputs"])
def test_an_error_leaves_everything_as_it_was(name: str, way: str, where: str, k: int, held: bool) -> None:
    case = BY_NAME[name]
    if name.startswith("unused"):
        case = replace(case, model=First, loss=nn.CrossEntropyLoss, reduction="auto")
    laws.an_error_leaves_everything_as_it_was(case, way, where, k, held)


class First(Unused):
    """Only the first output, so that a hook meets a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def test_half_a_gradient_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulator, "added_at_once", lambda *arguments: nullcontext())
    broken(laws.an_error_leaves_everything_as_it_was, BY_NAME["perceptron"], "sequential", "backward", 3, True)


def test_a_buffer_that_has_moved_before_the_error_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Buffers, "lent", lambda self, *_: nullcontext())
    case = BY_NAME["counter and moving average"]
    broken(laws.an_error_leaves_everything_as_it_was, case, "recompute", "forward", 3, False)


def test_an_error_that_is_swallowed_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Failure, "__init__", lambda self, *arguments: None)
    monkeypatch.setattr(laws, "failing_at", lambda k, where: lambda *arguments: None)
    broken(laws.an_error_leaves_everything_as_it_was, BY_NAME["perceptron"], "sequential", "forward", 1, True)


NUMBERS = torch.arange(N)
FIELDS: dict[str, tuple[Any, Callable[[Any], list[int]] | None]] = {
    "column": (NUMBERS.double(), lambda value: value.int().tolist()),
    "rows": (NUMBERS[:, None].expand(N, D), lambda value: value[:, 0].tolist()),
    "ids": ([f"{i}" for i in range(N)], lambda value: [int(text) for text in value]),
    "boxes": ([{"xy": torch.full((i % 3 + 1, 2), i)} for i in range(N)], lambda all: [int(b["xy"][0, 0]) for b in all]),
    "nested": ({"a": (NUMBERS, NUMBERS.double()), "b": "note"}, lambda value: value["a"][0].tolist()),
    "sparse": (torch.diag(NUMBERS.double() + 1).to_sparse(), lambda value: (value.to_dense().sum(1) - 1).tolist()),
    "none": (None, None),
    "temperature": (torch.tensor(0.7), None),
    "word": ("note", None),
    "number": (3, None),
}  # fmt: skip


@pytest.mark.parametrize(
    "names", [tuple(FIELDS), ("rows", "ids"), ("boxes", "column", "temperature"), ("nested", "sparse")]
)
def test_fields_are_cut_together(names: tuple[str, ...]) -> None:
    laws.fields_are_cut_together({name: FIELDS[name][0] for name in names}, {name: FIELDS[name][1] for name in names})


@pytest.mark.parametrize(
    ("field", "value"),
    [("short", torch.ones(N - 1, 2)), ("prior", torch.ones(C)), ("few", ["a"] * (N + 1)), ("thing", object())],
)
def test_a_doubtful_field_is_refused(field: str, value: Any) -> None:
    fields = {"rows": FIELDS["rows"][0], "column": NUMBERS.double(), field: value}
    laws.a_doubtful_field_is_refused(fields, field)
    if isinstance(value, Tensor):
        readers = {"rows": FIELDS["rows"][1], field: None}
        laws.fields_are_cut_together({"rows": fields["rows"], field: value}, readers, {field: "shared"})


def test_fields_with_borders_of_their_own_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Splitter.pieces

    def shifted(self: Splitter, *arguments: Any) -> Any:
        pieces = whole(self, *arguments)
        for piece in pieces:
            piece.inputs["ids"] = piece.inputs["ids"][::-1]
        return pieces

    monkeypatch.setattr(Splitter, "pieces", shifted)
    names = ("rows", "ids")
    fields, readers = {name: FIELDS[name][0] for name in names}, {name: FIELDS[name][1] for name in names}
    broken(laws.fields_are_cut_together, fields, readers)
    broken(laws.a_doubtful_field_is_refused, fields, "ids")
