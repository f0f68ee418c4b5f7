"""Hugging Face models that return their own loss: in micro-batches, each has the gradient of its whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import architectures
from architectures import BERT, EXPERTS, MOE, TARGETS, TEXT, VISION, VIT, batch_for, causal, distance, gradients, texts
from bigbatch import Accumulator, MicroBatched, windows
from bigbatch.core.batch_norm import BATCH_NORM
from bigbatch.errors import LossError, SplitError

TOLERANCE = 1e-10
NAMES = [*TEXT, *VISION]
SHIFTED = sum(TARGETS) - 2  # two rows have no prompt, so that nothing foretells their first token
ALL = sum(TARGETS)


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with architectures.in_double():
        yield
    torch.set_num_threads(threads)


def made(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    model = {**TEXT, **VISION}[name]()
    return model, batch_for(name)


def assert_whole(model: nn.Module, batch: Any, accumulator: Accumulator, window: Any = None) -> None:
    """The accumulator gives the loss and the gradient of one forward and backward over the whole batch."""
    loss, expected = architectures.whole_batch(model, batch)
    found = accumulator.backward(batch if window is None else window)
    assert abs(float(found - loss)) <= TOLERANCE * abs(float(loss))
    assert distance(gradients(model), expected) <= TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_whole_batch(name: str) -> None:
    model, batch = made(name)
    for size in (2, 3):
        assert_whole(model, batch, Accumulator(model, None, micro_batch_size=size))


@pytest.mark.parametrize("name", ["Llama", "Bert", "T5"])
def test_a_mean_of_means_is_caught(name: str) -> None:
    model, batch = made(name)
    _, expected = architectures.whole_batch(model, batch)
    Accumulator(model, None, micro_batch_size=3, reduction="mean").backward(batch)
    assert distance(gradients(model), expected) > 0.1


def test_there_are_enough_architectures() -> None:
    assert len(TEXT) >= 15 and len(VISION) >= 10
    for make in VISION.values():
        assert not any(isinstance(module, BATCH_NORM) for module in make().modules())


@pytest.mark.parametrize(
    ("name", "denominator"),
    [("GPT2", SHIFTED), ("Mamba", SHIFTED), ("Bert", ALL), ("T5", ALL), ("DistilBert texts", len(TARGETS)), ("ViT", 7)],
)
def test_the_denominator_is_that_of_the_model(name: str, denominator: int) -> None:
    model, batch = made(name)
    accumulator = Accumulator(model, None, micro_batch_size=2)
    accumulator.backward(batch)
    assert accumulator.report is not None and accumulator.report.denominator == denominator


@pytest.mark.parametrize(("name", "options"), [("Mixtral", MOE), ("Qwen2Moe", EXPERTS)])
def test_a_load_balance_term_is_refused(name: str, options: dict[str, Any]) -> None:
    """The same models without the term are in the list above."""
    model = causal(name, **options, output_router_logits=True)()
    with pytest.raises(LossError, match="a part of it is not divided"):
        Accumulator(model, None, micro_batch_size=3).backward(texts())
    assert all(p.grad is None for p in model.parameters())


def test_two_terms_with_two_denominators_are_refused() -> None:
    """Masked tokens and the order of two sentences: one loss, divided by tokens and by samples."""
    model = architectures.make("BertForPreTraining", "BertConfig", **BERT)()
    batch = {**texts(), "next_sentence_label": torch.tensor([0, 1, 1, 0, 1, 0, 0])}
    with pytest.raises(LossError, match="no mean over samples or target tokens"):
        Accumulator(model, None, micro_batch_size=3).backward(batch)


def test_extracted_answers() -> None:
    model = architectures.make("BertForQuestionAnswering", "BertConfig", **{**BERT, "num_labels": 2})()
    where = {"start_positions": torch.arange(7) % 3, "end_positions": torch.arange(7) % 5}
    batch = {**{name: value for name, value in texts().items() if name != "labels"}, **where}
    assert_whole(model, batch, Accumulator(model, None, micro_batch_size=3))


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
def test_classes_that_are_no_numbers(problem: str) -> None:
    model = architectures.make("BertForSequenceClassification", "BertConfig", **BERT, problem_type=problem)()
    batch = {**texts(), "labels": torch.rand(7, architectures.CLASSES)}
    assert_whole(model, batch, Accumulator(model, None, micro_batch_size=3))


def test_pixels_without_a_class() -> None:
    """Segmentation ignores the value 255, which stands in the configuration and not in the labels' name."""
    options = {"depths": [1] * 4, "hidden_sizes": [8, 16, 24, 32], "num_attention_heads": [1, 2, 3, 4]}
    still = {**architectures.STILL, "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0}
    model = architectures.make("SegformerForSemanticSegmentation", "SegformerConfig", **options, **still)()
    for module in model.modules():
        if isinstance(module, BATCH_NORM):
            module.eval()
    labels = torch.randint(0, 2, (4, 32, 32))
    labels[0, 3:], labels[2, :, 9:] = 255, 255
    assert_whole(
        model,
        {"pixel_values": torch.randn(4, 3, 32, 32), "labels": labels},
        Accumulator(model, None, micro_batch_size=1),
    )


@pytest.mark.parametrize("name", ["Llama", "T5", "Bert"])
def test_micro_batches_of_one_text_without_padding(name: str) -> None:
    """A loader's items have lengths of their own, and cannot be stacked; nor is there a whole batch without padding."""
    model, batch = made(name)
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(len(TARGETS))]
    items = [{key: value[:, : int(row["attention_mask"].sum())] for key, value in row.items()} for row in rows]
    accumulator = Accumulator(model, None)
    (window,) = windows(items, accum_steps=len(items))
    assert_whole(model, batch, accumulator, window)
    (part,) = windows(items[:3], accum_steps=7)
    assert_whole(model, {key: value[:3] for key, value in batch.items()}, accumulator, part)


@pytest.mark.parametrize("name", ["Llama", "Bert", "T5"])
def test_a_micro_batch_without_targets(name: str) -> None:
    model, batch = made(name)
    batch["labels"][2:4] = -100
    assert_whole(model, batch, Accumulator(model, None, micro_batch_size=2))


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_lengths_that_begin_to_differ(name: str) -> None:
    """While all texts are equally long, many denominators agree; the model is asked again when they part."""
    model, batch = made(name)
    accumulator = Accumulator(model, None, micro_batch_size=2)
    equal = texts((11,) * 6)
    equal["labels"] = torch.where(torch.arange(12) > 0, equal["input_ids"], -100)
    for each in (equal, batch, equal):
        assert_whole(model, each, accumulator)


def test_dropout_does_not_disturb_the_answer() -> None:
    options = {**BERT, "hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
    model = architectures.make("BertForMaskedLM", "BertConfig", **options)()
    accumulator = Accumulator(model, None, micro_batch_size=3)
    accumulator.backward(texts())
    assert accumulator.report is not None and accumulator.report.denominator == ALL


def clip() -> tuple[Any, dict[str, Tensor]]:
    text = {**architectures.SMALL, **architectures.SPECIAL, "max_position_embeddings": 12}
    vision = {name: value for name, value in VIT.items() if name not in architectures.STILL}
    model = architectures.make("CLIPModel", "CLIPConfig", text_config=text, vision_config=vision, projection_dim=16)()
    batch = {name: value for name, value in texts().items() if name != "labels"}
    return model, {**batch, "pixel_values": torch.randn(7, 3, 32, 32)}


def contrast(text: Tensor, image: Tensor, scale: Tensor) -> Tensor:
    """The loss of CLIP: each text names its image, and each image its text, among all of the batch."""
    text, image = (each / each.norm(dim=-1, keepdim=True) for each in (text, image))
    logits, own = text @ image.T * scale.exp(), torch.arange(len(text))
    cross_entropy = nn.functional.cross_entropy
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


class Towers(nn.Module):
    """The two towers of CLIP, without the similarities that tie the samples together."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, **words: Tensor) -> tuple[Tensor, Tensor]:
        text, image = self.model.get_text_features(**words), self.model.get_image_features(pixel_values=pixel_values)
        return text.pooler_output, image.pooler_output


def test_two_towers_in_micro_batches() -> None:
    model, batch = clip()
    loss, expected = architectures.whole_batch(model, {**batch, "return_loss": True})
    found = contrast(*MicroBatched(Towers(model), micro_batch_size=3)(**batch), model.logit_scale)
    found.backward()
    assert abs(float(found.detach() - loss)) <= TOLERANCE
    assert distance(gradients(model), expected) <= TOLERANCE


def test_a_loss_that_ties_samples_is_refused() -> None:
    model, batch = clip()
    with pytest.raises(LossError, match="no mean over samples"):
        Accumulator(model, None, micro_batch_size=3).backward({**batch, "return_loss": True})


@pytest.mark.parametrize("size", [1, 3])
def test_similarities_between_samples_are_not_joined(size: int) -> None:
    model, batch = clip()
    with pytest.raises(SplitError, match="behind the first axis"):
        MicroBatched(model, micro_batch_size=size)(**batch)
