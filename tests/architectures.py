"""Small Hugging Face models with random weights, and batches on which a mean of means is far off.

Each entry of `TEXT` and `VISION` makes a model that is two layers deep and runs without a download; `batch_for` makes
its batch. Texts have very different numbers of targets, behind prompts and in front of padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

VOCAB, LENGTH, CLASSES, SIDE = 64, 12, 5, 32
TARGETS = (12, 6, 1, 4, 2, 9, 3)  # of each text, in front of the padding
PROMPTS = (0, 4, 2, 0, 1, 3, 5)  # and what stands before them

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
LLAMA = {**SMALL, **SPECIAL, "num_key_value_heads": 2, "max_position_embeddings": 32}
GEMMA = {**LLAMA, "head_dim": 8}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
BERT = {**SMALL, **STILL, "pad_token_id": 0, "max_position_embeddings": 32, "num_labels": CLASSES}
SEEN = {"image_size": SIDE, "patch_size": 8, "num_labels": CLASSES}
VIT = {**{name: SMALL[name] for name in SMALL if name != "vocab_size"}, **STILL, **SEEN}
STAGES = {"depths": [1, 1], "image_size": SIDE, "num_labels": CLASSES}
WINDOWS = {
    **STILL,
    **STAGES,
    "embed_dim": 16,
    "num_heads": [2, 4],
    "window_size": 4,
    "patch_size": 4,
    "drop_path_rate": 0.0,
}
MOE = {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
EXPERTS = {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16, "experts_implementation": "eager"}  # fmt: skip

Made = Callable[[], nn.Module]


def make(model: str, config: str, **options: Any) -> Made:
    """A model by the names of its class and of its configuration's class."""

    def made() -> nn.Module:
        torch.manual_seed(0)
        built: nn.Module = getattr(hf, model)(getattr(hf, config)(**options))
        return built.double().train()

    return made


def causal(name: str, **options: Any) -> Made:
    return make(f"{name}ForCausalLM", f"{name}Config", **options)


def seen(name: str, **options: Any) -> Made:
    return make(f"{name}ForImageClassification", f"{name}Config", **options)


TEXT: dict[str, Made] = {
    "GPT2": make("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCAB, n_positions=32, n_embd=32, n_layer=2, n_head=4,
                 resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **SPECIAL),
    "Llama": causal("Llama", **LLAMA),
    "Mistral": causal("Mistral", **LLAMA),
    "Qwen2": causal("Qwen2", **LLAMA),
    "Qwen3": causal("Qwen3", **GEMMA),
    "Gemma": causal("Gemma", **GEMMA),
    "Gemma2": causal("Gemma2", **GEMMA),
    "Phi": causal("Phi", **LLAMA),
    "OPT": causal("OPT", vocab_size=VOCAB, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4,
                  max_position_embeddings=32, word_embed_proj_dim=32, dropout=0.0, **SPECIAL),
    "Bloom": causal("Bloom", vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4, **SPECIAL),
    "GPTNeoX": causal("GPTNeoX", **SMALL, **SPECIAL, max_position_embeddings=32),
    "Falcon": causal("Falcon", **SMALL, **SPECIAL),
    "Mamba": causal("Mamba", vocab_size=VOCAB, hidden_size=32, state_size=4, num_hidden_layers=2, **SPECIAL),
    "Rwkv": causal("Rwkv", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, context_length=32, **SPECIAL),
    "Mixtral": causal("Mixtral", **MOE),
    "Qwen2Moe": causal("Qwen2Moe", **EXPERTS),
    "Bert": make("BertForMaskedLM", "BertConfig", **BERT),
    "Roberta": make("RobertaForMaskedLM", "RobertaConfig", **BERT),
    "Electra tokens": make("ElectraForTokenClassification", "ElectraConfig", **BERT, embedding_size=16),
    "DistilBert texts": make("DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCAB, dim=32,
                             n_layers=2, n_heads=4, hidden_dim=48, max_position_embeddings=32, dropout=0.0,
                             attention_dropout=0.0, seq_classif_dropout=0.0, num_labels=CLASSES),
    "Albert": make("AlbertForMaskedLM", "AlbertConfig", **BERT, embedding_size=16),
    "Deberta": make("DebertaV2ForMaskedLM", "DebertaV2Config", **BERT, relative_attention=True,
                    pos_att_type=["p2c", "c2p"]),
    "T5": make("T5ForConditionalGeneration", "T5Config", vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2,
               num_heads=4, dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2),
    "Bart": make("BartForConditionalGeneration", "BartConfig", vocab_size=VOCAB, d_model=32, encoder_layers=2,
                 decoder_layers=2, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4,
                 decoder_attention_heads=4, max_position_embeddings=32, dropout=0.0, decoder_start_token_id=2,
                 forced_eos_token_id=2, **SPECIAL),
}  # fmt: skip

VISION: dict[str, Made] = {
    "ViT": seen("ViT", **VIT),
    "DeiT": seen("DeiT", **VIT),
    "Beit": seen("Beit", **VIT, drop_path_rate=0.0),
    "Dinov2": seen("Dinov2", **VIT),
    "IJepa": seen("IJepa", **VIT),
    "ViTMSN": seen("ViTMSN", **VIT),
    "Swin": seen("Swin", **WINDOWS),
    "Swinv2": seen("Swinv2", **WINDOWS),
    "ConvNext": seen("ConvNext", hidden_sizes=[16, 32], num_stages=2, **STAGES),
    "ConvNextV2": seen("ConvNextV2", hidden_sizes=[16, 32], num_stages=2, **STAGES),
    "Pvt": seen("Pvt", **STILL, image_size=SIDE, num_labels=CLASSES, depths=[1, 1, 1, 1], drop_path_rate=0.0,
                hidden_sizes=[8, 16, 24, 32], num_attention_heads=[1, 2, 3, 4], mlp_ratios=[2, 2, 2, 2]),
    "PoolFormer": seen("PoolFormer", depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_labels=CLASSES,
                       drop_path_rate=0.0),
    "Segformer": seen("Segformer", **STILL, depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], num_labels=CLASSES,
                      num_attention_heads=[1, 2, 3, 4], classifier_dropout_prob=0.0, drop_path_rate=0.0),
    "FocalNet": seen("FocalNet", embed_dim=16, depths=[1, 1], focal_levels=[2, 2], focal_windows=[3, 3],
                     hidden_sizes=[16, 32], image_size=SIDE, patch_size=4, drop_path_rate=0.0, num_labels=CLASSES),
    "Clip": seen("CLIP", vision_config={k: v for k, v in VIT.items() if k not in STILL}, num_labels=CLASSES),
    "Siglip": seen("Siglip", vision_config={k: v for k, v in VIT.items() if k not in STILL}, num_labels=CLASSES),
}  # fmt: skip


def texts(targets: tuple[int, ...] = TARGETS, length: int = LENGTH) -> dict[str, Tensor]:
    """Tokens padded at the right, and as many targets in each row as were asked for."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCAB, (len(targets), length), generator=generator)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (wanted, prompt) in enumerate(zip(targets, PROMPTS, strict=False)):
        end = min(prompt + wanted, length)
        mask[row, :end] = 1
        labels[row, end - wanted : end] = ids[row, end - wanted : end]
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def batch_for(name: str) -> dict[str, Tensor]:
    """The batch for one of the models above."""
    generator = torch.Generator().manual_seed(1)
    if name in VISION:
        pixels = torch.randn(len(TARGETS), 3, SIDE, SIDE, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, CLASSES, (len(TARGETS),), generator=generator)}
    batch = texts()
    if name == "Rwkv":
        del batch["attention_mask"]  # its forward does not use one
    if name.endswith("tokens"):
        batch["labels"] = torch.where(batch["labels"] == -100, -100, batch["labels"] % CLASSES)
    if name.endswith("texts"):
        batch["labels"] = torch.randint(0, CLASSES, (len(TARGETS),), generator=generator)
    return batch


class _InDouble(TorchFunctionMode):
    """Wherever a model or its loss asks for float32, it gets float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        given = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **given)


@contextmanager
def in_double() -> Iterator[None]:
    """Float64 from end to end: many models take norms, softmaxes and the loss in float32, whatever they are given."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InDouble():
            yield
    finally:
        torch.set_default_dtype(before)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradients that a model holds, which it then forgets."""
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def whole_batch(model: nn.Module, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The definition of right: one forward and backward of the model's own loss over the whole batch."""
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), gradients(model)


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The length of the difference of two gradients, relative to the expected one's."""
    assert found.keys() == expected.keys()
    apart = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return (apart / sum(float(gradient.square().sum()) for gradient in expected.values())) ** 0.5
