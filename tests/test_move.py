"""Moving batches: what can move does, what need not stays the same object, and the next piece is sent ahead."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from bigbatch.core.move import ahead, can_be_sent, one_ahead, to_device
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.tree import leaves


@dataclasses.dataclass(frozen=True)
class View:
    angle: Tensor
    name: str


class Own:
    """An object that knows how to move itself."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)

    def to(self, device: Any) -> Own:
        return self if self.device == torch.device(device) else Own(device)


def mixed() -> UserDict[str, Any]:
    return UserDict(
        packed=pack_sequence([torch.zeros(n, 3) for n in (2, 4, 1)], enforce_sorted=False),
        view=View(torch.zeros(3, 2), "camera"),
        each=[{"xy": torch.zeros(1, 2)}] * 3,
        jagged=torch.nested.nested_tensor([torch.zeros(n, 2) for n in (1, 2, 3)], layout=torch.jagged),
        own=Own(),
        names=["a", "b", "c"],
        module=nn.Linear(1, 1),
    )


def test_nothing_that_is_in_place_is_touched() -> None:
    batch = mixed()
    assert to_device(batch, "cpu") is batch
    pieces = [Piece(3, batch, None)]
    assert next(ahead(pieces, "cpu")) is pieces[0]


def test_everything_that_can_move_does() -> None:
    batch = mixed()
    there = to_device(batch, "meta")
    assert type(there) is UserDict and type(there["view"]) is View and there["view"].name == "camera"
    assert isinstance(there["packed"], PackedSequence) and there["packed"].data.is_meta
    devices = {leaf.device.type for leaf in leaves(there) if isinstance(leaf, Tensor | Own)}
    assert devices == {"meta"}
    assert there["names"] is batch["names"] and there["module"] is batch["module"]
    assert batch["view"].angle.device.type == "cpu", "the batch stays where it is"


def test_a_leaf_that_stays_behind_is_caught() -> None:
    there = to_device(mixed(), "meta")
    there["each"][1] = {"xy": torch.zeros(1, 2)}
    assert {leaf.device.type for leaf in leaves(there) if isinstance(leaf, Tensor)} == {"meta", "cpu"}


def test_pieces_arrive_in_order_with_their_numbers() -> None:
    x, y = torch.arange(10.0)[:, None], torch.arange(10)
    there = list(ahead(Splitter().pieces(x, y, 4), "meta"))
    assert [(p.samples, p.first) for p in there] == [(4, 0), (3, 4), (3, 7)]
    assert all(p.inputs.is_meta and p.targets.is_meta for p in there)
    assert list(ahead([], "cpu")) == []


def test_the_next_is_started_before_the_first_is_used_and_no_other() -> None:
    log: list[str] = []
    for number in one_ahead(range(4), lambda n: log.append(f"start {n}") or n, lambda n: log.append(f"end {n}") or n):  # type: ignore[func-returns-value]
        log.append(f"use {number}")
    started = [log[: log.index(f"use {k}")].count(f"start {k + 1}") for k in range(3)]
    too_early = [f"start {k + 2}" in log[: log.index(f"use {k}")] for k in range(2)]
    assert started == [1, 1, 1] and too_early == [False, False]
    assert [entry for entry in log if entry.startswith("use")] == [f"use {k}" for k in range(4)]


def test_one_after_the_other_would_be_caught() -> None:
    log: list[str] = []
    for number in map(lambda n: log.append(f"start {n}") or n, range(3)):  # type: ignore[func-returns-value]
        log.append(f"use {number}")
    assert f"start {1}" not in log[: log.index("use 0")]


def test_only_plain_tensors_in_the_cpus_memory_are_sent_ahead() -> None:
    batch = mixed()
    assert can_be_sent(batch["packed"]) and can_be_sent(batch["view"].angle)
    assert not can_be_sent(batch["jagged"]) and not can_be_sent(torch.eye(2).to_sparse())
    assert not can_be_sent(torch.zeros(2, device="meta")) and not can_be_sent(torch.zeros(2, requires_grad=True))
    assert not can_be_sent("text")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_pieces_arrive_whole_while_others_are_computed() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(64, 512, 256), "own": Own(), **{k: v for k, v in mixed().items() if k == "names"}}
    batch["names"] = [f"s{i}" for i in range(64)]
    weight = torch.randn(256, 256, device="cuda")
    for piece in ahead(Splitter(["own"]).pieces(batch, batch["x"].sum((1, 2)), 4), "cuda"):
        for _ in range(20):
            _ = piece.inputs["x"] @ weight
        own = batch["x"][piece.first : piece.first + piece.samples]
        assert torch.equal(piece.inputs["x"].cpu(), own) and piece.inputs["own"].device.type == "cuda"
        assert torch.equal(piece.targets.cpu(), own.sum((1, 2)))
        del piece


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_packed_and_nested_pieces_give_the_gradient_of_the_batch() -> None:
    rows = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 7, 1, 4, 4)]
    model = nn.GRU(3, 4).double().cuda()
    inputs, targets = pack_sequence(rows, enforce_sorted=False), torch.randn(5, 4, dtype=torch.float64)
    right = mse_loss(model(inputs.to("cuda"))[1][0], targets.cuda(), reduction="sum")
    right.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    for piece in ahead(Splitter().pieces(inputs, targets, 2), torch.device("cuda")):
        mse_loss(model(piece.inputs)[1][0], piece.targets, reduction="sum").backward()
    for grad, parameter in zip(grads, model.parameters(), strict=True):
        assert torch.allclose(grad, parameter.grad, rtol=1e-10, atol=1e-10)
