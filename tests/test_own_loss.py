"""A model that returns its own loss is asked for the denominator, and answers rightly or is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

import own_losses
from architectures import MOE, TEXT, VISION, batch_for, causal, distance, gradients, texts, whole_batch
from bigbatch import Accumulator, windows
from bigbatch.core import own_loss
from bigbatch.core.own_loss import OwnLoss, copied
from bigbatch.core.split import Splitter
from bigbatch.errors import LossError
from own_losses import (
    AddsUp,
    ByMask,
    Deaf,
    Dropping,
    EachText,
    Handed,
    HandsOn,
    InDict,
    InObject,
    InTraining,
    InTuple,
    PartlyHanded,
    Plain,
    Shifted,
    SpreadOut,
    TwoTerms,
    Words,
)

H, V, IGNORED = own_losses.H, own_losses.V, own_losses.IGNORED
Batch = dict[str, Tensor]

RIGHT = [Plain, Shifted, Handed, Deaf, HandsOn, EachText, InTuple, InDict, InObject, InTraining]
REFUSED = {
    AddsUp: "it adds up",
    SpreadOut: "no mean over samples",
    PartlyHanded: "a part of it is not divided",
    TwoTerms: "no mean over samples",
}


def batch(targets: list[int], length: int = 8) -> Batch:
    """Random texts with so many targets each, behind nothing and in front of padding."""
    ids = torch.randint(0, V, (len(targets), length))
    return {
        "input_ids": ids,
        "labels": torch.where(torch.arange(length) < torch.tensor(targets)[:, None], ids, IGNORED),
    }


def whole(model: nn.Module, inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    loss = output[0] if isinstance(output, tuple) else output["loss"] if isinstance(output, dict) else output
    loss = getattr(loss, "loss", loss)
    loss.backward()
    return loss.detach(), gradients(model)


def assert_whole(model: nn.Module, inputs: Any, accumulator: Accumulator, window: Any = None) -> None:
    loss, expected = whole(model, inputs)
    found = accumulator.backward(inputs if window is None else window)
    torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
    assert distance(gradients(model), expected) <= 1e-12


@pytest.mark.parametrize("kind", RIGHT)
@settings(max_examples=8)
@given(targets=st.lists(st.integers(1, 8), min_size=3, max_size=9), size=st.integers(1, 4), seed=st.integers(0, 9))
def test_equals_the_whole_batch(kind: type[Words], targets: list[int], size: int, seed: int) -> None:
    """Texts of one length leave it open what counts; whatever the first batch shows, the next ones are right too."""
    torch.manual_seed(seed)
    model = kind()
    accumulator = Accumulator(model, None, micro_batch_size=size)
    for wanted in ([max(targets[0], 2)] * len(targets), [max(each, 2) for each in targets], [8, 2, 5, 3]):
        assert_whole(model, batch(wanted), accumulator)


@pytest.mark.parametrize("kind", [Plain, Shifted])
def test_the_wrong_denominator_is_caught(kind: type[Words]) -> None:
    model, inputs = kind(), batch([8, 2, 5, 3])
    _, expected = whole(model, inputs)
    Accumulator(model, None, micro_batch_size=2, reduction="mean").backward(inputs)
    assert distance(gradients(model), expected) > 0.05


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_mean_is_refused(kind: type[Words]) -> None:
    model = kind()
    with pytest.raises(LossError, match=REFUSED[kind]):
        Accumulator(model, None, micro_batch_size=2).backward(batch([8, 2, 5, 3, 3]))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", [Plain, Handed])
def test_arguments_without_names(kind: type[Words]) -> None:
    """Labels are told by their numbers: equal lengths leave it open what counts, other lengths decide."""
    model = kind()
    accumulator = Accumulator(model, None, micro_batch_size=2)
    for targets in ([5] * 6, [8, 2, 5, 3, 3]):
        assert_whole(model, tuple(batch(targets).values()), accumulator)


def test_a_mask_instead_of_labels() -> None:
    model = ByMask()
    accumulator = Accumulator(model, None, micro_batch_size=2)
    for targets in ([5] * 6, [8, 2, 5, 3, 3]):
        inputs = batch(targets)
        mask = (inputs["labels"] != IGNORED).long()
        assert_whole(model, {"input_ids": inputs["input_ids"], "attention_mask": mask}, accumulator)


@pytest.mark.parametrize("kind", [Plain, Handed, EachText])
def test_a_window_whose_items_have_other_lengths(kind: type[Words]) -> None:
    model, padded = kind(), batch([8, 2, 5, 3, 3])
    items = [{name: rows[i : i + 1, :n] for name, rows in padded.items()} for i, n in enumerate((8, 4, 6, 5, 7))]
    (window,) = windows(items, accum_steps=9)
    assert_whole(model, padded, Accumulator(model, None), window)


def test_lengths_that_tell_nothing_are_refused_until_the_count_is_stated() -> None:
    """Texts without padding and without prompts: cut to one length, each has as many targets as the other."""
    items = [batch([n], n) for n in (8, 4, 6, 5)]
    model = Plain()
    (window,) = windows(items, accum_steps=4)
    with pytest.raises(LossError, match="several denominators fit"):
        Accumulator(model, None).backward(window)
    pieces = [piece for item in items for piece in Splitter().pieces(item, None, None)]
    for kind, form in ((Plain, "mean"), (Handed, "counted")):
        asked = OwnLoss(model := kind(), [model], Splitter(), lambda inputs, _: (inputs["labels"] != IGNORED).sum())
        assert asked.rule(pieces, None).form == form


def test_a_shared_field() -> None:
    class Scaled(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor, scale: Tensor, prior: Tensor) -> Any:  # type: ignore[override]
            return super().forward(input_ids, labels) * scale + prior.sum()

    model, shared = Scaled(), {"scale": torch.tensor(2.0), "prior": torch.rand(V)}
    accumulator = Accumulator(model, None, micro_batch_size=2, split=["prior"])
    assert_whole(model, {**batch([8, 2, 5, 3, 3]), **shared}, accumulator)


def test_asking_leaves_no_trace() -> None:
    """What differs from a run without a question is seen in a model that draws, counts and has a part in evaluation."""
    states = []
    for reduction in ("auto", "mean"):
        torch.manual_seed(3)
        model = Dropping()
        model.mix.eval()
        model.head.weight.grad = held = torch.ones_like(model.head.weight)
        inputs = batch([5] * 6)
        Accumulator(model, None, micro_batch_size=2, reduction=reduction).backward(inputs)
        assert model.head.weight.grad is held
        modes = [module.training for module in model.modules()]
        states.append((torch.get_rng_state(), model.runs, modes, held, model.words.weight.grad))
    for found, expected in zip(*states, strict=True):
        torch.testing.assert_close(found, expected)
    assert states[0][2] == [True, True, False, True]


def test_a_refusal_leaves_no_trace() -> None:
    torch.manual_seed(3)
    model = Dropping()
    inputs, state = batch([8, 2, 5, 3]), torch.get_rng_state()
    inputs["labels"] = inputs["labels"].masked_fill(inputs["labels"] != IGNORED, 1)
    model.forward = AddsUp.forward.__get__(model)  # type: ignore[method-assign]
    with pytest.raises(LossError, match="it adds up"):
        Accumulator(model, None, micro_batch_size=2).backward(inputs)
    assert torch.equal(torch.get_rng_state(), state) and model.runs == 0
    assert all(module.training for module in model.modules()) and all(p.grad is None for p in model.parameters())


def test_dropout_does_not_disturb_the_answer() -> None:
    model = Dropping()
    accumulator = Accumulator(model, None, micro_batch_size=2)
    accumulator.backward(batch([8, 2, 5, 3, 3]))
    assert accumulator.report is not None and accumulator.report.denominator == 21


def test_local_batch_norm_is_no_reason_to_refuse() -> None:
    class Normed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(H).double()

        def losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.norm(self.words(input_ids).transpose(1, 2)).transpose(1, 2))
            return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")

    accumulator = Accumulator(model := Normed(), None, micro_batch_size=2, batch_norm="local")
    with pytest.warns(UserWarning, match="local"):
        accumulator.backward(batch([8, 2, 5, 3, 3]))
    assert accumulator.report is not None and accumulator.report.denominator == 21
    assert model.norm.training and model.norm.num_batches_tracked == 1


@pytest.mark.parametrize("kind", [Plain, Handed])
def test_a_loss_in_low_precision(kind: type[Words]) -> None:
    model, inputs = kind().bfloat16(), batch([8, 2, 5, 3])
    accumulator = Accumulator(model, None, micro_batch_size=2)
    if kind is Plain:
        with pytest.raises(LossError, match="low precision"):
            accumulator.backward(inputs)
        return
    accumulator.backward(inputs)
    assert accumulator.report is not None and accumulator.report.denominator == 18


@pytest.mark.parametrize(("name", "denominator"), [("Llama", 35), ("Mixtral", 35), ("ViT", 7)])
def test_transformers_in_low_precision(name: str, denominator: int) -> None:
    model, inputs = {**TEXT, **VISION}[name]().bfloat16(), batch_for(name)
    accumulator = Accumulator(model, None, micro_batch_size=3)
    accumulator.backward(inputs)
    found = gradients(model)
    _, expected = whole_batch(model, inputs)
    assert accumulator.report is not None and accumulator.report.denominator == denominator
    assert distance(found, expected) < 0.05


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_low_precision_does_not_hide_a_load_balance_term(dtype: torch.dtype) -> None:
    model = causal("Mixtral", **MOE, output_router_logits=True, router_aux_loss_coef=1e-5)().to(dtype)
    with pytest.raises(LossError, match="a part of it is not divided"):
        Accumulator(model, None, micro_batch_size=3).backward(texts())


def test_copies_of_inputs_of_any_kind() -> None:
    packed = pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)])
    leaf = torch.zeros(2, requires_grad=True)
    twin = copied({"packed": packed, "leaf": leaf, "text": "a"})
    twin["packed"].data.add_(1)
    assert not packed.data.any() and twin["text"] == "a" and twin["leaf"].is_leaf and twin["leaf"].requires_grad
    assert torch.equal(twin["packed"].batch_sizes, packed.batch_sizes)
    twice = copied([leaf, leaf])
    assert twice[0] is twice[1] is not leaf


def test_a_question_on_the_batch_itself_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    class InPlace(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
            return super().forward(input_ids.add_(1).remainder_(V), labels)

    def moved() -> bool:
        model, inputs = InPlace(), batch([8, 2, 5, 3, 3])
        kept = inputs["input_ids"].clone()
        OwnLoss(model, [model], Splitter()).rule(Splitter().pieces(inputs, None, 2), None)
        return not torch.equal(inputs["input_ids"], kept)

    assert not moved()
    monkeypatch.setattr(own_loss, "copied", lambda tree: tree)
    assert moved()
