"""Pieces that meet at a batch norm are the whole batch's batch norm: outputs, gradients, running statistics, bytes."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from bigbatch.core import joint_norm
from bigbatch.core.joint_norm import enter, leave, meet, move
from bigbatch.core.live import Live
from bigbatch.errors import ModelError

CHANNELS = 3
SHAPES = [(), (5,), (4, 3), (2, 3, 2)]
HALF = [torch.bfloat16, torch.float16]


def joined(
    pieces: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> list[Tensor]:
    waiting = [enter(piece) for piece in pieces]
    met = meet(waiting, weight, bias, eps)
    return [leave(met, piece) for piece in waiting]


def alone(
    pieces: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> list[Tensor]:
    """The usual loop: every piece sees its own statistics only."""
    return [F.batch_norm(piece, None, None, weight, bias, True, eps=eps) for piece in pieces]


def whole(
    pieces: Sequence[Tensor], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> list[Tensor]:
    out = F.batch_norm(torch.cat(list(pieces)), None, None, weight, bias, True, eps=eps)
    return list(out.split([len(piece) for piece in pieces]))


def gradients(norm: Any, case: Case) -> list[Tensor | None]:
    """Outputs, then the gradients of pieces, weight and bias, of a loss over the outputs that the case uses."""
    pieces, weight, bias = case.leaves()
    out = norm(pieces, weight, bias, case.eps)
    loss = sum((y * y * g).sum() + (y * g).sum() for y, g, used in zip(out, case.pulls, case.used, strict=True) if used)
    if isinstance(loss, Tensor) and loss.requires_grad:
        loss.backward()
    return [*(y.detach() for y in out), *(leaf if leaf is None else leaf.grad for leaf in (*pieces, weight, bias))]


@dataclass
class Case:
    pieces: list[Tensor]
    pulls: list[Tensor]
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    wanted: list[bool]
    used: list[bool]

    def to(self, *where: Any, **how: Any) -> Case:
        """The same numbers, of another dtype or elsewhere."""
        pieces, pulls = ([tensor.to(*where, **how) for tensor in tensors] for tensors in (self.pieces, self.pulls))
        affine = [tensor if tensor is None else tensor.to(*where) for tensor in (self.weight, self.bias)]
        return Case(pieces, pulls, *affine, self.eps, self.wanted, self.used)

    def leaves(self) -> tuple[list[Tensor], Tensor | None, Tensor | None]:
        tensors = [*self.pieces, self.weight, self.bias]
        pairs = zip(tensors, self.wanted, strict=True)
        fresh = [tensor if tensor is None else tensor.clone().requires_grad_(wanted) for tensor, wanted in pairs]
        return [piece for piece in fresh[:-2] if piece is not None], fresh[-2], fresh[-1]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Uneven pieces, one sample among them, of every rank; anything may be frozen, missing or unused."""
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda sizes: sum(sizes) > 3))
    shape = draw(st.sampled_from(SHAPES))
    flags = st.lists(st.booleans(), min_size=len(sizes) + 2, max_size=len(sizes) + 2)
    affine = [torch.randn(CHANNELS, dtype=torch.float64) if draw(st.booleans()) else None for _ in range(2)]
    return Case(
        pieces=[torch.randn(size, CHANNELS, *shape, dtype=torch.float64) * 2 + 1 for size in sizes],
        pulls=[torch.randn(size, CHANNELS, *shape, dtype=torch.float64) for size in sizes],
        weight=affine[0],
        bias=affine[1],
        eps=draw(st.sampled_from([1e-5, 1e-3, 0.5])),
        wanted=draw(flags),
        used=draw(flags)[: len(sizes)],
    )


def same(got: Sequence[Tensor | None], want: Sequence[Tensor | None], tolerance: float = 1e-12) -> bool:
    """Equal to a share of the largest number of all, and None where the other is None."""

    def pair(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        return a.dtype == b.dtype and a.shape == b.shape and bool(((a - b).abs() <= tolerance * size).all())

    size = max(float(tensor.abs().max()) for tensor in want if tensor is not None)
    return all(map(pair, got, want))


def simple_case(sizes: Sequence[int] = (3, 1, 4), offset: float = 0.0) -> Case:
    pieces, pulls = ([torch.randn(size, CHANNELS, 4, 3, dtype=torch.float64) for size in sizes] for _ in range(2))
    weight, bias = torch.rand(2, CHANNELS, dtype=torch.float64) + 0.5
    flags = [True] * (len(sizes) + 2)
    return Case([piece + offset for piece in pieces], pulls, weight, bias, 1e-5, flags, flags[: len(sizes)])


@given(cases())
def test_pieces_give_the_whole_batch_outputs_and_gradients(case: Case) -> None:
    assert same(gradients(joined, case), gradients(whole, case))


def test_statistics_of_one_piece_alone_are_caught() -> None:
    case = simple_case()
    assert same(gradients(joined, case), gradients(whole, case))
    assert not same(gradients(alone, case), gradients(whole, case))


def test_a_forgotten_piece_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    together = joint_norm.together
    monkeypatch.setattr(joint_norm, "together", lambda counts, statistics: together(counts[1:], statistics[1:]))
    assert not same(gradients(joined, simple_case()), gradients(whole, simple_case()))


@pytest.mark.parametrize("node", ["_Enter", "_Meet", "_Leave"])
def test_a_wrong_way_back_is_caught(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every node's backward matters: what it hands on is doubled, for one piece or for the sums."""
    right = getattr(joint_norm, node).backward
    twice = staticmethod(lambda ctx, *grads: tuple(g if g is None else 2 * g for g in right(ctx, *grads)))
    monkeypatch.setattr(getattr(joint_norm, node), "backward", twice)
    assert not same(gradients(joined, simple_case()), gradients(whole, simple_case()))


@pytest.mark.parametrize("used", range(3))
def test_a_loss_of_one_output_reaches_every_input(used: int) -> None:
    case = simple_case()
    case.used = [index == used for index in range(3)]
    got = gradients(joined, case)
    assert same(got, gradients(whole, case)) and all(grad is not None and grad.any() for grad in got)


def test_an_output_that_is_used_but_gets_no_gradient_counts_as_zero() -> None:
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    case, results = simple_case(), []
    for norm in (joined, whole):
        pieces, weight, bias = case.leaves()
        first, *rest = norm(pieces, weight, bias)
        loss = Nothing.apply(first).sum() + sum((y**3).sum() for y in rest)  # type: ignore[no-untyped-call]
        results.append(torch.autograd.grad(loss, [*pieces, weight, bias]))
    assert same(*results)


def test_a_gradient_of_one_input_only_can_be_asked_for() -> None:
    case, results = simple_case(), []
    for norm in (joined, whole):
        pieces, weight, bias = case.leaves()
        loss = (norm(pieces, weight, bias)[0] ** 3).sum()
        results.append([torch.autograd.grad(loss, leaf, retain_graph=True)[0] for leaf in (pieces[2], weight, bias)])
    assert same(*results)


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    pieces, weight, bias = simple_case().leaves()
    loss = sum((y**3).sum() for y in joined(pieces, weight, bias))
    first = torch.autograd.grad(loss, [*pieces, weight], retain_graph=True)
    assert all(map(torch.equal, first, torch.autograd.grad(loss, [*pieces, weight])))


def test_pieces_may_enter_and_leave_in_threads_of_their_own() -> None:
    case = simple_case()

    def threaded(pieces: list[Tensor], weight: Tensor, bias: Tensor, eps: float) -> list[Any]:
        waiting: list[Any] = [None] * len(pieces)
        out: list[Any] = [None] * len(pieces)

        def run(work: Any) -> None:
            for index in range(len(pieces)):
                thread = threading.Thread(target=work, args=(index,))
                thread.start()
                thread.join()

        run(lambda index: waiting.__setitem__(index, enter(pieces[index] * 1)))
        met = meet(waiting, weight, bias, eps)
        run(lambda index: out.__setitem__(index, leave(met, waiting[index])))
        return out

    assert same(gradients(threaded, case), gradients(whole, case))


def errors(case: Case) -> Tensor:
    """[2, 4]: ours and PyTorch's errors against the whole batch in float64, as shares of the norm.

    Those of all outputs, of all gradients of pieces, of weight and of bias.
    """
    oracle, count, found = gradients(whole, case.to(torch.float64)), len(case.pieces), []
    for norm in (joined, whole):
        got = gradients(norm, case)
        for part in (slice(0, count), slice(count, 2 * count), slice(-2, -1), slice(-1, None)):
            one, right = (
                torch.cat([x.double().flatten() for x in side[part] if x is not None]) for side in (got, oracle)
            )
            found.append((one - right).norm() / right.norm())
    return torch.stack(found).view(2, 4)


@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("offset", [0, 1e3, 1e6])
def test_a_large_offset_costs_no_more_than_in_pytorch(offset: float, kind: torch.memory_format) -> None:
    drawn = [simple_case([16] * 8, offset).to(torch.float32, memory_format=kind) for _ in range(20)]
    ours, theirs = torch.stack([errors(case) for case in drawn]).median(0).values
    assert (ours <= 2 * theirs).all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("wide", [False, True])
def test_half_precision_is_as_exact_as_the_whole_batch(dtype: torch.dtype, wide: bool) -> None:
    case = simple_case([16] * 8).to(dtype)
    assert case.weight is not None and case.bias is not None
    if wide:
        case.weight, case.bias = case.weight.float(), case.bias.float()
    got, want = gradients(joined, case), gradients(whole, case)
    assert [x.dtype for x in got if x is not None] == [x.dtype for x in want if x is not None]
    ours, theirs = errors(case)
    assert (ours[:2] <= 1.2 * theirs[:2]).all()
    # The few numbers of a narrow weight's gradient are rounded to its dtype, which is a matter of luck.
    assert (ours[2:] <= 1.2 * theirs[2:] + (0 if wide else torch.finfo(dtype).eps)).all()


def test_autocast_changes_nothing() -> None:
    case = simple_case().to(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for dtype in (torch.bfloat16, torch.float32):
            outputs = joined([piece.to(dtype) for piece in case.pieces], case.weight, case.bias)
            assert {y.dtype for y in outputs} == {dtype}


@pytest.mark.parametrize(
    ("shape", "memory_format"), [((4, 3), torch.channels_last), ((2, 4, 3), torch.channels_last_3d)]
)
def test_memory_format_is_kept(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    for kind in (memory_format, torch.contiguous_format):
        pieces = [torch.randn(2, CHANNELS, *shape).contiguous(memory_format=kind).requires_grad_() for _ in range(3)]
        outputs = joined(pieces)
        assert all(y.is_contiguous(memory_format=kind) for y in outputs)
        # The gradient of a sum has no strides of its own, as a gradient often has none.
        grads = torch.autograd.grad(sum(y.sum() for y in outputs), pieces)
        assert all(grad.is_contiguous(memory_format=kind) for grad in grads)


def test_inputs_need_not_be_dense() -> None:
    case = simple_case()
    case.pieces = [torch.randn(8, 3, 4, CHANNELS, dtype=torch.float64).transpose(1, 3)[::2] for _ in range(3)]
    case.pulls = [torch.randn(1, CHANNELS, 1, 1, dtype=torch.float64).expand(4, -1, 4, 3) for _ in range(3)]
    assert same(gradients(joined, case), gradients(whole, case))


@pytest.mark.parametrize("momentum", [0.1, 0.9, 1.0, 0.0, None])
@pytest.mark.parametrize(
    ("dtype", "buffers", "bound"),
    [
        (torch.float64, torch.float64, 1e-14),
        (torch.float32, torch.float32, 3e-6),
        (torch.bfloat16, torch.float32, 3e-6),
        (torch.bfloat16, torch.bfloat16, 0.04),  # both round to 8 bits each time
    ],
)
def test_running_statistics_move_as_in_pytorch(
    dtype: torch.dtype, buffers: torch.dtype, bound: float, momentum: float | None
) -> None:
    norm = nn.BatchNorm2d(CHANNELS, momentum=momentum, affine=False).to(buffers)
    mean, var = torch.zeros(CHANNELS, dtype=buffers), torch.ones(CHANNELS, dtype=buffers)
    for step in range(3):
        x = torch.randn(7, CHANNELS, 4, 3).to(dtype) * 2 + 1
        norm(x)
        met = meet([enter(piece) for piece in x.split(3)])
        move(mean, var, met, 1 / (step + 1) if momentum is None else momentum)
    torch.testing.assert_close(mean, norm.running_mean, rtol=bound, atol=bound)
    torch.testing.assert_close(var, norm.running_var, rtol=bound, atol=bound)


def test_a_biased_running_variance_is_caught_and_each_may_be_missing() -> None:
    x, norm = torch.randn(7, CHANNELS, 4, 3, dtype=torch.float64), nn.BatchNorm2d(CHANNELS).double()
    norm(x)
    met = meet([enter(piece) for piece in x.split(3)])
    mean, var = torch.zeros(CHANNELS, dtype=torch.float64), torch.ones(CHANNELS, dtype=torch.float64)
    biased = var.lerp(met.joint.var, 0.1)
    for buffers in ((mean, None), (None, var), (None, None)):
        move(*buffers, met, 0.1)
    assert norm.running_mean is not None and norm.running_var is not None
    torch.testing.assert_close(mean, norm.running_mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(var, norm.running_var, rtol=1e-14, atol=0)
    assert not torch.allclose(biased, norm.running_var, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", [(1, 3), (1, 3, 1, 1)])
def test_one_value_a_channel_is_refused_as_in_pytorch(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    with pytest.raises(ValueError) as theirs:
        F.batch_norm(x, None, None, training=True)
    with pytest.raises(ValueError) as ours:
        meet([enter(x)])
    assert str(ours.value) == str(theirs.value)
    assert [y.shape for y in joined([x, x + 1])] == 2 * [shape]


def test_without_grad_there_is_no_graph() -> None:
    pieces, weight, bias = simple_case().leaves()
    with torch.no_grad():
        outputs = joined(pieces, weight, bias)
        assert not any(y.requires_grad for y in outputs)
        assert same(outputs, whole(pieces, weight, bias))


@pytest.mark.parametrize("power", [1, 3])
def test_a_second_derivative_is_refused(power: int) -> None:
    """The power of 1 is the dangerous one: its gradient at the outputs is constant, so that autograd sees no graph."""
    pieces, weight, bias = simple_case().leaves()
    loss = sum((y**power).sum() for y in joined(pieces, weight, bias))
    with pytest.raises(ModelError, match="create_graph"):
        torch.autograd.grad(loss, pieces, create_graph=True)


def test_an_input_that_is_written_to_is_refused_and_an_output_may_be() -> None:
    pieces, weight, bias = simple_case().leaves()
    inner = [piece * 1 for piece in pieces]
    outputs = joined(inner, weight, bias)
    loss = sum(y.relu_().sum() for y in outputs)
    inner[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def test_nothing_is_saved_but_the_inputs_themselves() -> None:
    pieces, weight, bias = simple_case().leaves()
    inner = [piece * 1 for piece in pieces]
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = joined(inner, weight, bias)
    assert sorted(map(storage, saved)) == sorted(2 * [storage(x) for x in inner])
    assert not {storage(y) for y in outputs} & {storage(x) for x in inner}
    shapes = {(x.shape, x.stride(), x.storage_offset(), x._version) for x in saved}
    assert shapes == {(x.shape, x.stride(), x.storage_offset(), x._version) for x in inner}


@pytest.mark.parametrize("graph", [False, True])
def test_an_input_dies_when_its_owner_drops_it(graph: bool) -> None:
    """With a graph it lives on in what was saved, which here has gone elsewhere."""
    x = [torch.randn(4, CHANNELS, 8, requires_grad=graph) * 1 for _ in range(2)]
    alive = [weakref.ref(piece.untyped_storage()) for piece in x]
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
        waiting = [enter(piece) for piece in x]
        met = meet(waiting)
        outputs = [leave(met, piece) for piece in waiting]
        x.clear()
    assert [reference() for reference in alive] == [None, None]
    assert waiting and outputs[0].requires_grad == graph


def backward_peak(norm: Any, count: int = 8) -> tuple[float, float]:
    """Pieces alive before the backward, and at its worst moment."""
    pieces = [torch.randn(16, CHANNELS, 32, 32) for _ in range(count)]
    pulls = [torch.randn_like(piece) for piece in pieces]
    scale = torch.rand(CHANNELS, 1, 1, requires_grad=True)
    size = pieces[0].numel() * 4
    with Live() as live:
        outputs = norm([piece * scale for piece in pieces])
        losses = [(y * pull).sum() for y, pull in zip(outputs, pulls, strict=True)]
        del outputs
        before = live.live_bytes
        live.reset_peak()
        torch.autograd.backward(losses)
    return before / size, live.peak_bytes / size


def test_the_way_back_holds_the_frontier_once_and_a_few_pieces() -> None:
    before, peak = backward_peak(joined)
    assert before < 8.1  # the inputs that were saved
    assert peak - before < 8 + 3  # the gradients of all outputs, and what is made for one piece
    before, peak = backward_peak(whole)
    assert peak - before > 8 + 3


def test_the_way_forward_makes_the_outputs_and_nothing_else() -> None:
    pieces = [torch.randn(16, CHANNELS, 32, 32) for _ in range(8)]
    with Live() as live, torch.no_grad():
        joined(pieces)
    assert live.peak_bytes < 8.1 * pieces[0].numel() * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF])
@pytest.mark.parametrize("kind", [torch.contiguous_format, torch.channels_last])
def test_the_same_on_a_gpu(dtype: torch.dtype, kind: torch.memory_format) -> None:
    case = simple_case([16] * 8).to(torch.float32).to("cuda", dtype, memory_format=kind)
    if dtype in HALF:
        case.weight, case.bias = (None if x is None else x.float() for x in (case.weight, case.bias))
    ours, theirs = errors(case)
    assert (ours <= 2 * theirs + (1e-12 if dtype == torch.float64 else 1e-6)).all()
    assert all(y.is_contiguous(memory_format=kind) for y in joined(case.pieces))
