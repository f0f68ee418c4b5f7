"""Cutting a batch: one set of borders for all fields, joined pieces are the batch, and doubts are refused by name."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import types
from collections import OrderedDict, UserDict, defaultdict, deque, namedtuple
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._pytree import register_pytree_node

from bigbatch.core.packed import cut_leaf
from bigbatch.core.split import Piece, Splitter, even_borders
from bigbatch.core.tree import children, leaves, map_leaves, opened, rebuild
from bigbatch.errors import OptionError, SplitError

F64 = torch.float64
CASE = Path(__file__).parent / "public_cases" / "07_mixed_container_packed.py"
Pair = namedtuple("Pair", ["left", "right"])


def load_case() -> Any:
    spec = importlib.util.spec_from_file_location("case_07", CASE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


case = load_case()


def sizes_of(pieces: list[Piece]) -> list[int]:
    return [piece.samples for piece in pieces]


def cut(inputs: Any, size: int | None, targets: Any = None, **options: Any) -> list[Any]:
    return [piece.inputs for piece in Splitter(**options).pieces(inputs, targets, size)]


def refused(inputs: Any, size: int = 2, targets: Any = None, **options: Any) -> str:
    with pytest.raises(SplitError) as caught:
        Splitter(**options).pieces(inputs, targets, size)
    return str(caught.value)


# Borders and options


@given(st.integers(0, 300), st.integers(1, 40) | st.none())
def test_borders_are_even(samples: int, size: int | None) -> None:
    borders = even_borders(samples, size)
    widths = [end - first for first, end in pairwise(borders)]
    assert borders[0] == 0 and borders[-1] == samples
    assert all(widths) and (not widths or max(widths) - min(widths) <= 1)
    assert len(widths) == (math.ceil(samples / size) if size else min(samples, 1))


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "4"])
def test_a_size_that_cannot_be_meant_is_refused(size: Any) -> None:
    with pytest.raises(OptionError, match=f"micro_batch_size={size!r}"):
        Splitter().pieces(torch.zeros(4, 1), None, size)


@pytest.mark.parametrize("split", ["prior", {"prior": "common"}, 3])
def test_a_split_that_cannot_be_meant_is_refused(split: Any) -> None:
    with pytest.raises(OptionError, match="split="):
        Splitter(split)


def test_b63_the_pieces_that_came_out_count() -> None:
    x = torch.arange(4.0)[:, None]
    assert sizes_of(Splitter().pieces(x, x, 2)) == [2, 2]
    assert sizes_of(Splitter().pieces(x[:3], x[:3], 8)) == [3]
    assert sizes_of(Splitter().pieces(x, x, 3)) == [2, 2]
    assert [piece.first for piece in Splitter().pieces(x, x, 1)] == [0, 1, 2, 3]
    assert Splitter().pieces(x[:0], x[:0], 3) == [] and Splitter().pieces({"x": x[:0]}, None, 3) == []
    assert Splitter().count(x, None) == 4


# The main property


@dataclasses.dataclass(frozen=True)
class View:
    angle: Any
    source: str
    rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(next(leaf for leaf in leaves(self.angle) if isinstance(leaf, Tensor))))


def fields(samples: int) -> st.SearchStrategy[Any]:
    """One field of a batch of `samples`, tensors first; its rows are numbered, so that a wrong border shows."""
    tensor = st.integers(0, 3).map(lambda width: torch.arange(samples * width).reshape(samples, width))
    vector = st.just(torch.arange(samples))
    shared = st.sampled_from([0.5, "name", None, torch.tensor(2.0), math.sqrt])
    names = st.just([f"s{i}" for i in range(samples)])
    boxes = st.just([{"xy": torch.full((i % 3, 2), i)} for i in range(samples)])
    return st.recursive(
        tensor | vector | shared | names | boxes,
        lambda inner: (
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
            | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(UserDict)
            | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
            | inner.map(lambda value: View({"x": torch.arange(samples), "more": value}, "camera"))
        ),
        max_leaves=6,
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, Any]:
    samples = draw(st.integers(4, 12))  # three boxes or more, so that each list has one reading
    return samples, {"x": torch.arange(samples), "y": draw(fields(samples)), "z": draw(fields(samples))}


def joined(values: list[Any], whole: Any) -> Any:
    """The inverse of a cut, written without it: tensors and lists are put end to end, the rest is taken once."""
    if isinstance(whole, Tensor):
        return torch.cat(values) if whole.dim() else values[0]
    if isinstance(whole, list):
        return [item for value in values for item in value]
    parts = opened(whole)
    if parts is None:
        return values[0]
    columns = zip(*(opened(value).values for value in values), strict=True)  # type: ignore[union-attr]
    return parts.build([joined(list(c), w) for c, w in zip(columns, parts.values, strict=True)] or [])


def equal(left: Any, right: Any) -> bool:
    parts, others = children(left), children(right)
    if parts is None or others is None:
        return torch.equal(left, right) if isinstance(left, Tensor) else left is right or left == right
    same = [name for name, _ in parts] == [name for name, _ in others] and type(left) is type(right)
    return same and all(equal(a, b) for (_, a), (_, b) in zip(parts, others, strict=True))


def holds(samples: int, batch: Any, pieces: list[Piece]) -> bool:
    """The law of a cut: even sizes, nothing lost, nothing twice, every field at the same borders."""
    sizes, ids = sizes_of(pieces), [piece.inputs["x"] for piece in pieces]
    even = max(sizes) - min(sizes) <= 1 and sum(sizes) == samples
    return even and [len(i) for i in ids] == sizes and equal(joined([p.inputs for p in pieces], batch), batch)


def rows_agree(piece: Piece) -> bool:
    """Every list and tensor with a first axis outside a list has as many rows as the piece has samples."""

    def agrees(value: Any) -> bool:
        if isinstance(value, Tensor):
            return not value.dim() or len(value) == piece.samples
        if isinstance(value, list):
            return len(value) == piece.samples
        return all(agrees(child) for _, child in children(value) or ())

    return agrees(piece.inputs)


@settings(max_examples=80, deadline=None)
@given(batches(), st.integers(1, 13))
def test_joined_pieces_are_the_batch_at_one_set_of_borders(drawn: tuple[int, Any], size: int) -> None:
    samples, batch = drawn
    pieces = Splitter().pieces(batch, None, size)
    assert holds(samples, batch, pieces) and all(map(rows_agree, pieces))
    memory = {leaf.untyped_storage().data_ptr() for leaf in leaves(batch) if isinstance(leaf, Tensor)}
    for piece in pieces:
        tensors = [leaf for leaf in leaves(piece.inputs) if isinstance(leaf, Tensor)]
        assert {tensor.untyped_storage().data_ptr() for tensor in tensors} <= memory, "a view was expected"


def test_a_piece_with_borders_of_its_own_is_caught() -> None:
    batch = {"x": torch.arange(10), "ids": [f"s{i}" for i in range(10)]}
    pieces = Splitter().pieces(batch, None, 4)
    assert holds(10, batch, pieces) and all(map(rows_agree, pieces))
    chunks = [Piece(n, {"x": x, "ids": i}, None) for n, x, i in zip((4, 3, 3), batch["x"].chunk(3), "abc", strict=True)]
    assert not holds(10, batch, chunks)
    assert not holds(10, batch, pieces[:-1])
    moved = [p._replace(inputs={**p.inputs, "ids": batch["ids"][p.first : p.first + 4]}) for p in pieces]
    assert not all(map(rows_agree, moved)) and not holds(10, batch, moved)


def test_plain_tensors_take_the_short_way_to_the_same_pieces() -> None:
    x, y = torch.arange(20.0).reshape(10, 2), torch.arange(10)
    for quick, slow in zip(Splitter().pieces(x, y, 4), Splitter().pieces((x,), {"y": y}, 4), strict=True):
        assert torch.equal(quick.inputs, slow.inputs[0]) and torch.equal(quick.targets, slow.targets["y"])
        assert (quick.samples, quick.first) == (slow.samples, slow.first)


def test_a_model_may_change_its_micro_batch_in_place() -> None:
    weight = torch.ones(2, dtype=F64, requires_grad=True)
    for piece in Splitter().pieces(torch.zeros(4, 2, dtype=F64), None, 2):
        piece.inputs.add_(weight).sum().backward()
    assert weight.grad is not None and weight.grad.tolist() == [4.0, 4.0]


def test_a_gradient_flows_back_into_the_batch() -> None:
    x = torch.ones(4, 2, requires_grad=True)
    sum((i + 1) * piece.sum() for i, piece in enumerate(cut(x, 2))).backward()  # type: ignore[union-attr]
    assert x.grad is not None and x.grad[:, 0].tolist() == [1, 1, 2, 2]


# Public case 07


def gradient(pieces: list[Piece]) -> tuple[dict[str, float], dict[str, Tensor]]:
    net, seen = case.Net(), {}
    for piece in pieces:
        (batch,) = piece.inputs
        each = case.sample_losses(net, batch)
        (each.sum() / case.N).backward()
        seen.update(zip(batch["ids"], each.tolist(), strict=True))
    return seen, {name: p.grad for name, p in net.named_parameters()}


def worst(found: tuple[dict[str, float], dict[str, Tensor]]) -> float:
    losses, gradients = case.right()
    seen, grads = found
    by_id = max(abs(seen.get(key, math.inf) - loss) for key, loss in losses.items())
    return max(by_id, *((grads[name] - gradient).abs().max().item() for name, gradient in gradients.items()))


def test_case_07_refuses_a_prior_that_looks_like_a_field() -> None:
    net, batch = case.build()
    model_sizes = frozenset(size for p in net.parameters() for size in p.shape)
    message = refused((batch,), 4, model_sizes=model_sizes)
    assert "prior" in message and 'split={"prior": "shared"}' in message


@pytest.mark.parametrize("size", [*range(1, 11), None])
def test_case_07_any_cut_keeps_losses_and_gradient(size: int | None) -> None:
    net, batch = case.build()
    model_sizes = frozenset(size for p in net.parameters() for size in p.shape)
    pieces = Splitter({"prior": "shared"}, model_sizes).pieces((batch,), None, size)
    assert worst(gradient(pieces)) < 1e-12
    for piece in pieces:
        (part,) = piece.inputs
        assert type(part) is case.Batch and part["view"].rows == piece.samples
        assert part["prior"] is batch["prior"] and part["temp"] is batch["temp"]


def test_case_07_with_two_samples_exchanged_is_caught() -> None:
    pieces = Splitter({"prior": "shared"}).pieces((case.build()[1],), None, 5)
    pieces[0].inputs[0]["ids"][:2] = reversed(pieces[0].inputs[0]["ids"][:2])
    assert worst(gradient(pieces)) > 1e-3
    assert worst(gradient(Splitter(["prior"]).pieces((case.build()[1],), None, 5)[:1])) > 1e-3


# Which axis, which field (B55, B56)


def test_b55_tensors_and_lists_share_their_borders() -> None:
    pieces = cut({"x": torch.arange(10), "id": [f"s{i}" for i in range(10)]}, 4)
    assert [[f"s{i}" for i in p["x"].tolist()] for p in pieces] == [p["id"] for p in pieces]
    assert [len(p["id"]) for p in pieces] == [4, 3, 3]


def test_fields_that_disagree_are_named() -> None:
    message = refused({"images": torch.zeros(256, 1), "captions": torch.zeros(255, 1)})
    assert "images has 256 samples, captions 255" in message and 'split={"captions": "shared"}' in message
    batch = {"odd": torch.zeros(3, 1), "a": torch.zeros(4, 1), "b": torch.zeros(4, 1)}
    assert "a has 4 samples, odd 3" in refused(batch)
    assert "inputs has 4 samples, targets 5" in refused(torch.zeros(4, 1), targets=torch.zeros(5, 1))
    same_key = ({"x": torch.zeros(4, 1)}, {"x": torch.zeros(5, 1)})
    assert "inputs[0].x has 4 samples, inputs[1].x 5" in refused(same_key)
    for names in (["a"], []):
        assert "ids is a list of length" in refused({"x": torch.zeros(4, 1), "ids": names})
    assert cut({"x": torch.zeros(4, 1), "ids": ["a"]}, 2, split=["ids"])[1]["ids"] == ["a"]


def test_b56_a_list_of_two_is_refused_unless_one_reading_is_known() -> None:
    def batch(n: int) -> Any:
        return {"x": torch.arange(n), "pair": [torch.arange(n), torch.arange(n)]}

    message = refused(batch(2), 1)
    assert 'split={"pair": "samples"}' in message and 'split={"pair": "fields"}' in message
    assert cut(batch(2), 1, split={"pair": "samples"})[0]["pair"][0].tolist() == [0, 1]
    assert [t.tolist() for t in cut(batch(2), 1, split={"pair": "fields"})[1]["pair"]] == [[1], [1]]
    splitter = Splitter()
    assert len(splitter.pieces(batch(6), None, 3)[0].inputs["pair"]) == 2
    last = splitter.pieces(batch(2), None, 1)
    assert [t.tolist() for t in last[1].inputs["pair"]] == [[1], [1]], "read as in the batch before"
    with pytest.raises(SplitError, match="earlier it held fields"):
        splitter.pieces({"x": torch.arange(3), "pair": ["a", "b", "c"]}, None, 1)


def test_b56_a_batch_of_lists_alone() -> None:
    images = [torch.zeros(3, size, size) for size in (4, 5, 6, 7)]
    marks = [{"boxes": torch.zeros(n, 4)} for n in (1, 0, 2, 1)]
    pieces = Splitter().pieces(images, marks, 3)
    assert sizes_of(pieces) == [2, 2] and [len(p.targets) for p in pieces] == [2, 2]
    assert cut((torch.zeros(4), torch.zeros(4)), 2)[0][0].shape == (2,), "a tuple of inputs holds arguments"
    message = refused([torch.zeros(3, 2), torch.zeros(3, 2)])
    assert "2 as well as 3 samples" in message and 'split={"inputs": "samples"}' in message
    assert sizes_of(Splitter({"inputs": "fields"}).pieces([torch.zeros(3, 2), torch.zeros(3, 2)], None, 2)) == [2, 1]
    targets = (torch.zeros(5), torch.zeros(5, 2))
    assert Splitter().pieces(torch.zeros(5, 1), targets, 5)[0].targets[1].shape == (5, 2)
    assert "no field of the batch has a first axis" in refused({"a": 1.0, "b": "text"})


def test_b56_a_vector_of_floats_as_long_as_a_parameter_is_refused() -> None:
    sizes = frozenset({10, 64})

    def batch(n: int) -> Any:
        return {"x": torch.zeros(n, 3), "t": torch.rand(n), "labels": torch.arange(n)}

    message = refused(batch(10), 4, model_sizes=sizes)
    assert message.count('split={"t": ') == 2 and "labels" not in message
    assert len(cut(batch(10), 4, split={"t": "samples"}, model_sizes=sizes)[0]["t"]) == 4
    assert len(cut(batch(10), 4, split={"inputs.t": "shared"}, model_sizes=sizes)[0]["t"]) == 10
    assert len(cut(batch(10), 10, model_sizes=sizes)[0]["t"]) == 10, "one piece is the batch itself"
    splitter = Splitter(model_sizes=sizes)
    splitter.pieces(batch(12), None, 4)
    assert len(splitter.pieces(batch(10), None, 4)[0].inputs["t"]) == 4, "it has followed the batch's size before"
    assert len(Splitter(model_sizes=sizes).pieces(torch.zeros(10), torch.zeros(10), 4)[0].targets) == 4
    numbers = {"x": torch.zeros(2, 3), "size": (224, 224)}
    assert "tuple of 2 numbers" in refused(numbers, 1)


def test_unknown_names_are_refused_with_the_fields_that_exist() -> None:
    batch = {"x": torch.zeros(4, 1), "view": {"two words": torch.zeros(7)}}
    message = refused(batch, split=["pryor"])
    assert "'pryor'" in message and "inputs.view['two words']" in message
    assert len(cut(batch, 2, split=["two words"])[0]["view"]["two words"]) == 7
    assert len(cut(batch, 2, split=["view"])[0]["view"]["two words"]) == 7
    splitter = Splitter(["mask"])
    splitter.pieces({"x": torch.zeros(4, 1), "mask": torch.zeros(9)}, None, 2)
    assert len(splitter.pieces({"x": torch.zeros(4, 1)}, None, 2)) == 2, "a later batch may lack the field"
    assert "without a first axis" in refused({"x": torch.zeros(4), "t": 0.5}, split={"t": "samples"})
    assert "holds fields of its own" in refused(batch, split={"view": "samples"})


# Containers (B57, B58)


def test_b57_mappings_keep_type_keys_and_factory() -> None:
    items = {"x": torch.arange(4), "n": 3}
    for whole in (UserDict(items), OrderedDict(items), types.MappingProxyType(items), defaultdict(list, items)):
        first = cut((whole,), 2)[0][0]
        assert type(first) is type(whole) and list(first) == ["x", "n"] and first["x"].tolist() == [0, 1]
        assert whole["x"].tolist() == [0, 1, 2, 3], "the batch itself stays whole"
    assert cut((defaultdict(list, items),), 2)[0][0].default_factory is list
    queue = cut({"x": torch.arange(4), "q": deque("abcd", maxlen=4)}, 2)[1]["q"]
    assert queue == deque("cd") and queue.maxlen == 4


def test_b57_outputs_of_transformers_keep_their_type() -> None:
    pytest.importorskip("transformers")
    from transformers import BatchEncoding
    from transformers.modeling_outputs import BaseModelOutput

    encoded = cut((BatchEncoding({"input_ids": torch.arange(8).reshape(4, 2)}),), 2)[1][0]
    assert type(encoded) is BatchEncoding and encoded.input_ids.tolist() == [[4, 5], [6, 7]]
    output = cut((BaseModelOutput(last_hidden_state=torch.arange(4)),), 2)[1][0]
    assert type(output) is BaseModelOutput and output.last_hidden_state.tolist() == [2, 3]
    assert output["last_hidden_state"] is output.last_hidden_state


def test_a_mapping_that_cannot_be_rebuilt_never_harms_the_batch() -> None:
    class TwoThings(Mapping):  # type: ignore[type-arg]
        def __init__(self, one: Any, two: Any) -> None:
            self.items_ = {"one": one, "two": two}

        def __getitem__(self, key: str) -> Any:
            return self.items_[key]

        def __iter__(self) -> Any:
            return iter(self.items_)

        def __len__(self) -> int:
            return len(self.items_)

    whole = TwoThings(torch.arange(4), torch.arange(4))
    assert "TwoThings cannot be built" in refused((whole,))
    assert whole["one"].tolist() == [0, 1, 2, 3]


@dataclasses.dataclass
class Loose:
    x: Tensor
    scale: dataclasses.InitVar[float]
    cache: Tensor | None = dataclasses.field(init=False, default=None)
    note: str = "n"

    def __post_init__(self, scale: float) -> None:
        self.x = self.x * scale


def test_b58_dataclasses_are_rebuilt_with_their_own_rules() -> None:
    frozen = cut((View(torch.arange(10), "camera"),), 4)
    assert [v[0].rows for v in frozen] == [4, 3, 3] and frozen[1][0].source == "camera"
    loose = Loose(torch.arange(4), 2.0)
    loose.cache, loose.extra = torch.arange(4), torch.arange(4)  # type: ignore[attr-defined]
    piece = cut((loose,), 2)[1][0]
    assert type(piece) is Loose and piece.x.tolist() == [4, 6], "the scale is not applied a second time"
    assert piece.cache.tolist() == [2, 3] and piece.extra.tolist() == [2, 3] and piece.note == "n"


class Opaque:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Registered(Opaque):
    pass


def test_b58_unknown_objects_are_refused_by_name() -> None:
    message = refused({"x": torch.zeros(4, 1), "graph": Opaque(torch.zeros(4))})
    assert "inputs.graph is an object of class Opaque" in message and 'split={"graph": "shared"}' in message
    shared = Opaque(torch.zeros(4))
    assert cut({"x": torch.zeros(4, 1), "graph": shared}, 2, split=["graph"])[1]["graph"] is shared
    assert cut({"x": torch.zeros(4, 1), "each": [Opaque(torch.zeros(1))] * 4}, 3)[1]["each"][0].x.shape == (1,)
    register_pytree_node(Registered, lambda r: ([r.x], None), lambda xs, _: Registered(xs[0]))
    assert cut((Registered(torch.arange(4)),), 2)[1][0].x.tolist() == [2, 3]


def test_b58_arrays_are_cut_as_views() -> None:
    numpy = pytest.importorskip("numpy")
    whole = numpy.arange(8).reshape(4, 2)
    piece = cut({"x": torch.zeros(4, 1), "a": whole, "n": numpy.float32(1)}, 3)[0]
    assert numpy.shares_memory(piece["a"], whole) and piece["a"].shape == (2, 2) and piece["n"] == 1


# Packed, nested, sparse (B59, B60)


def packed(lengths: list[int], enforce_sorted: bool) -> PackedSequence:
    rows = [torch.arange(n, dtype=F64)[:, None] + 10 * i for i, n in enumerate(lengths)]
    return pack_sequence(rows, enforce_sorted=enforce_sorted)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.integers(1, 9), st.booleans())
def test_b59_pieces_are_packed_again_from_their_own_sequences(lengths: list[int], size: int, in_order: bool) -> None:
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    whole, first = packed(lengths, in_order), 0
    for piece in Splitter().pieces(whole, None, size):
        own = lengths[first : first + piece.samples]
        rows, found = pad_packed_sequence(piece.inputs, batch_first=True)
        assert found.tolist() == own and rows.shape[1] == max(own)
        assert (piece.inputs.sorted_indices is None) == in_order
        for i, n in enumerate(own):
            assert rows[i, :n, 0].tolist() == [10 * (first + i) + t for t in range(n)]
        first += piece.samples
    assert first == len(lengths)


def test_b59_last_states_and_gradient_are_those_of_the_batch() -> None:
    torch.manual_seed(0)
    lengths = [2, 7, 1, 4, 4, 6, 3, 5, 2, 1]
    whole = pack_sequence([torch.randn(n, 3, dtype=F64) for n in lengths], enforce_sorted=False)
    rnn = torch.nn.GRU(3, 4).double()
    states = rnn(whole)[1][0]
    right = torch.autograd.grad(states.square().sum(), list(rnn.parameters()))
    parts = torch.cat([rnn(piece)[1][0] for piece in cut(whole, 4)])
    grads = torch.autograd.grad(parts.square().sum(), list(rnn.parameters()))
    assert torch.allclose(states, parts, rtol=0, atol=1e-12)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(right, grads, strict=True))


def test_b60_jagged_rows_are_views_and_share_their_offsets() -> None:
    rows = [torch.full((n, 2), float(i)) for i, n in enumerate((2, 4, 1))]
    left = torch.nested.nested_tensor(rows, layout=torch.jagged)
    right = torch.nested.nested_tensor_from_jagged(left.values() * 2, left.offsets())
    for piece, (first, end) in zip(cut({"l": left, "r": right}, 2), ((0, 2), (2, 3)), strict=True):
        assert [t.tolist() for t in piece["l"].unbind()] == [t.tolist() for t in rows[first:end]]
        assert piece["l"].values().untyped_storage().data_ptr() == left.values().untyped_storage().data_ptr()
        assert [t.tolist() for t in (piece["l"] + piece["r"]).unbind()] == [(t * 3).tolist() for t in rows[first:end]]
    turned = cut((left.transpose(1, 2),), 2)[0][0]
    assert [t.shape for t in turned.unbind()] == [(2, 2), (2, 4)]
    gaps = torch.nested.narrow(torch.arange(15.0).reshape(3, 5), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 3, 1]),
                               layout=torch.jagged)  # fmt: skip
    found = [t.tolist() for piece in cut((gaps,), 2) for t in piece[0].unbind()]
    assert found == [t.tolist() for t in gaps.unbind()]


def test_b60_nested_and_sparse_pieces_hold_the_same_rows() -> None:
    rows = [torch.full((n, 2), float(i)) for i, n in enumerate((2, 4, 1))]
    found = [t.tolist() for piece in cut((torch.nested.nested_tensor(rows),), 2) for t in piece[0].unbind()]
    assert found == [t.tolist() for t in rows]
    matrix = torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 0], [4, 0, 0]])
    stack = torch.stack([matrix, matrix * 2, matrix * 3])
    for whole in (matrix.to_sparse(), matrix.to_sparse_csr(), stack.to_sparse(), stack.to_sparse_csr()):
        pieces = [piece[0] for piece in cut((whole,), 3 if whole.dim() == 2 else 2)]
        assert len(pieces) == 2 and all(piece.layout == whole.layout for piece in pieces)
        assert torch.equal(torch.cat([piece.to_dense() for piece in pieces]), whole.to_dense())
    message = refused({"x": matrix, "m": matrix.to_sparse_csc()})
    assert "inputs.m is a tensor of layout torch.sparse_csc" in message


def test_a_cut_at_a_wrong_border_is_caught() -> None:
    whole = torch.arange(5)
    right, wrong = cut_leaf(whole, [0, 3, 5], {}), cut_leaf(whole, [0, 2, 5], {})
    assert [len(t) for t in right] == [3, 2] and not all(
        torch.equal(a, b[:2]) for a, b in zip(right, wrong, strict=True)
    )


# Samples that are no rows (B61, B62): the user's own function


def patches_by_sample(inputs: Any, targets: Any, micro_batch_size: int | None) -> Any:
    first = image = patch = 0
    counts, each = inputs["images"], inputs["grid"].prod(1)
    for size in [end - start for start, end in pairwise(even_borders(len(counts), micro_batch_size))]:
        images = sum(counts[first : first + size])
        pixels = int(each[image : image + images].sum())
        part = {"images": counts[first : first + size], "grid": inputs["grid"][image : image + images],
                "pixels": inputs["pixels"][patch : patch + pixels]}  # fmt: skip
        yield size, part, targets[first : first + size]
        first, image, patch = first + size, image + images, patch + pixels


def image_loss(model: Any, inputs: Any, targets: Tensor) -> Tensor:
    features = torch.stack([part.sum(0) for part in model(inputs["pixels"]).split(inputs["grid"].prod(1).tolist())])
    samples = torch.stack([part.sum(0) for part in features.split(inputs["images"])])
    return mse_loss(samples, targets, reduction="sum")


def test_b61_image_patches_by_the_users_function() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).double()
    inputs = {"images": [2, 0, 1, 1], "grid": torch.tensor([[2, 2], [2, 3], [1, 2], [2, 4]]),
              "pixels": torch.randn(20, 3, dtype=F64)}  # fmt: skip
    targets = torch.randn(4, 2, dtype=F64)
    right = torch.autograd.grad(image_loss(model, inputs, targets), model.weight)[0]
    assert Splitter(patches_by_sample).count(inputs, targets) == 4
    for size in (1, 2, 3, 4):
        pieces = [p for p in Splitter(patches_by_sample).pieces(inputs, targets, size) if len(p.inputs["pixels"])]
        empty = [p for p in Splitter(patches_by_sample).pieces(inputs, targets, size) if not len(p.inputs["pixels"])]
        assert all(p.samples == 1 and p.first == 1 for p in empty)
        grads = [torch.autograd.grad(image_loss(model, p.inputs, p.targets), model.weight)[0] for p in pieces]
        assert torch.allclose(sum(grads), right, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]


def graphs_one_by_one(inputs: Any, targets: Any, micro_batch_size: int | None) -> Any:
    nodes, edges, owner = inputs
    for first, end in pairwise(even_borders(int(owner.max()) + 1, micro_batch_size)):
        mine = (owner >= first) & (owner < end)
        start = int(mine.nonzero()[0])
        own_edges = edges[:, mine[edges[0]]] - start
        yield end - first, (nodes[mine], own_edges, owner[mine] - first), targets[first:end]


def graph_loss(model: Any, inputs: Any, targets: Tensor) -> Tensor:
    nodes, edges, owner = inputs
    hidden = model(nodes).index_add(0, edges[1], model(nodes)[edges[0]])
    graphs = hidden.new_zeros(len(targets), hidden.shape[1]).index_add(0, owner, hidden)
    return cross_entropy(graphs, targets, reduction="sum")


def test_b62_graphs_by_the_users_function() -> None:
    torch.manual_seed(0)
    model, counts = torch.nn.Linear(3, 2).double(), [2, 6, 3, 1]
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(counts))
    edges = torch.tensor([[0, 1, 2, 3, 4, 7, 8, 9], [1, 0, 3, 4, 2, 6, 9, 10]])
    inputs, targets = (torch.randn(12, 3, dtype=F64), edges, owner), torch.tensor([0, 1, 1, 0])
    right = torch.autograd.grad(graph_loss(model, inputs, targets), model.weight)[0]
    for size in (1, 2, 3, 4):
        pieces = Splitter(graphs_one_by_one).pieces(inputs, targets, size)
        grads = [torch.autograd.grad(graph_loss(model, p.inputs, p.targets), model.weight)[0] for p in pieces]
        assert torch.allclose(sum(grads), right, rtol=1e-12, atol=1e-12)  # type: ignore[arg-type]
    assert "disagree" in refused((inputs[0], inputs[1].T, inputs[2]), targets=targets), "rows are no graphs"


@pytest.mark.parametrize("item", [(0, None, None), (True, 1, 1), (2, 1), 3])
def test_a_split_function_that_yields_something_else_is_refused(item: Any) -> None:
    assert "yield (samples, inputs, targets)" in refused(None, split=lambda *_: [item])


# Trees


def test_map_leaves_keeps_what_does_not_change() -> None:
    tree = {"a": [torch.zeros(2), "text"], "v": View(torch.zeros(3), "s"), "p": Pair(1, None)}
    assert map_leaves(lambda leaf: leaf, tree) is tree
    changed = map_leaves(lambda leaf: leaf + 1 if isinstance(leaf, Tensor) else leaf, tree)
    assert changed["p"] is tree["p"] and changed["v"].angle.tolist() == [1, 1, 1] and changed["v"].rows == 3
    assert children("text") is None and rebuild("text", []) == "text"
