"""Small float32 models with random weights, and batches of any size for them: text, vision, audio and the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from bigbatch.recipes.stdlib_lm import IGNORED, Writer

V, L, C, SIDE = 500, 24, 10, 32  # vocabulary, tokens, classes, pixels
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BODY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
SEEN = {"image_size": SIDE, "num_labels": C}
HALF = {"image_size": SIDE, "patch_size": 4, "num_labels": C}


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        name: of the model.
        kind: what it works on.
        make: the model, always with the same weights.
        loss_fn: None where the model returns its own loss.
        batch: inputs and targets of so many samples.
        sizes: three micro-batch sizes; none is one that the planner runs.
        adds_up: whether the loss is a mean or a sum over samples.
    """

    name: str
    kind: str
    make: Callable[[], nn.Module]
    loss_fn: Callable[..., Tensor] | None
    batch: Callable[[int], tuple[Any, Any]]
    sizes: tuple[int, int, int] = (3, 8, 20)
    adds_up: bool = True


# --- Models


class Logits(nn.Module):
    """The scores of a Hugging Face model."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, inputs: Tensor) -> Tensor:
        return self.body(inputs).logits


class TextEncoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
        self.embed, self.body = nn.Embedding(V, 64), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.last = nn.Linear(64, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.body(self.embed(ids)).mean(1))


class TiedWords(nn.Module):
    """A language model whose embedding is its last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.last = nn.Embedding(V, 64), nn.GRU(64, 64, batch_first=True), nn.Linear(64, V)
        self.last.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.body(self.embed(ids))[0]).transpose(1, 2)


class BagOfWords(nn.Module):
    """Most of it is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(30000, 32), nn.Linear(32, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.embed(ids).mean(1).relu())


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(V, 64), kind(64, 128, batch_first=True, **options)
        self.last = nn.Linear(256 if options.get("bidirectional") else 128, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.body(self.embed(ids))[0].mean(1))


def convolution(width: int, out: int, **options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(width, out, 3, padding=1, **options), nn.GroupNorm(4, out), nn.ReLU())


class UNet(nn.Module):
    """Down twice and up twice, with skip connections; one class a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = convolution(3, 16), convolution(16, 32), convolution(32, 64)
        self.up_two, self.up_one = nn.ConvTranspose2d(64, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)
        self.back_two, self.back_one, self.last = convolution(64, 32), convolution(32, 16), nn.Conv2d(16, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.one(x)
        two = self.two(F.max_pool2d(one, 2))
        three = self.three(F.max_pool2d(two, 2))
        two = self.back_two(torch.cat([two, self.up_two(three)], 1))
        return self.last(self.back_one(torch.cat([one, self.up_one(two)], 1)))


class MixerBlock(nn.Module):
    """Layers over the patches, then over the channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 32), nn.GELU(), nn.Linear(32, patches))
        self.along = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.Linear(128, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.first_norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.second_norm(x))


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 64, 4, 4)
        self.blocks = nn.Sequential(*(MixerBlock((SIDE // 4) ** 2, 64) for _ in range(3)))
        self.last = nn.Linear(64, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Waves(nn.Module):
    """Residual convolutions over sound, each with twice the dilation of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 16, 5, 2), nn.Linear(16, C)
        self.body = nn.ModuleList(nn.Conv1d(16, 32, 3, padding=2**k, dilation=2**k) for k in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.body:
            x = x + F.glu(layer(x), 1)
        return self.last(x.mean(2))


class TwoViews(nn.Module):
    """Pictures and texts in one space."""

    def __init__(self) -> None:
        super().__init__()
        self.see = nn.Sequential(convolution(3, 16, stride=2), nn.Flatten(2))
        self.look, self.read = nn.Linear(16, 32), nn.Sequential(nn.Embedding(V, 64), nn.Linear(64, 32))

    def forward(self, pictures: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return F.normalize(self.look(self.see(pictures).mean(2))), F.normalize(self.read(ids).mean(1))


def contrastive(outputs: tuple[Tensor, Tensor], _: None) -> Tensor:
    scores = outputs[0] @ outputs[1].T / 0.1
    return F.cross_entropy(scores, torch.arange(len(scores)))


def layers(*sizes: int) -> nn.Sequential:
    pairs = zip(sizes[:-2], sizes[1:-1], strict=True)
    parts = [layer for width, out in pairs for layer in (nn.Linear(width, out), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(*sizes[-2:]))


def frozen_body() -> nn.Module:
    model = convolutions()
    for layer in model[:2]:
        layer.requires_grad_(False)
    return model


def convolutions() -> nn.Sequential:
    stages = convolution(3, 16), convolution(16, 32, stride=2), convolution(32, 64, stride=2)
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, C))


def autoencoder() -> nn.Sequential:
    down = nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 8, 4, 2, 1), nn.ReLU()
    up = nn.ConvTranspose2d(8, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1), nn.Sigmoid()
    return nn.Sequential(*down, *up)


def normed_rows() -> nn.Sequential:
    pairs = [part for _ in range(3) for part in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
    return nn.Sequential(*pairs, nn.Linear(64, C))


def made(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same weights every time, and no others drawn after it."""

    def make() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return build().train()

    return make


def own(model: str, **options: Any) -> Callable[[], nn.Module]:
    """A Hugging Face model by the name of its class."""
    kind = getattr(hf, model)
    return lambda: kind(kind.config_class(**options))


def logits(model: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Logits(own(model, **options)())


# --- Batches


def classes(samples: int) -> Tensor:
    return torch.randint(0, C, (samples,))


def pictures(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, SIDE, SIDE), classes(samples)


def words(samples: int, tokens: int = L) -> Tensor:
    return torch.randint(3, V, (samples, tokens))


def texts(samples: int) -> tuple[Tensor, Tensor]:
    return words(samples), classes(samples)


def phrases(samples: int) -> tuple[Tensor, Tensor]:
    """Short texts: a recurrent layer may run every token's operators one after the other."""
    return words(samples, 10), classes(samples)


def next_words(samples: int) -> tuple[dict[str, Tensor], None]:
    ids = words(samples)
    return {"input_ids": ids, "labels": ids}, None


def padded(samples: int) -> tuple[Tensor, Tensor]:
    """Texts of every length; only what stands before the padding is a target."""
    ids = torch.randint(0, 256, (samples, 48))
    outside = torch.arange(48) >= (torch.arange(samples)[:, None] % 40) + 8
    return ids.masked_fill(outside, 0), ids.masked_fill(outside, IGNORED)


def rows(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 64), classes(samples)


CROSS_ENTROPY = nn.CrossEntropyLoss()


def tokens_to(model: str, **options: Any) -> Callable[[], nn.Module]:
    return own(model, vocab_size=V, **options)


def case(name: str, kind: str, build: Callable[[], nn.Module], batch: Any, **options: Any) -> Case:
    return Case(name, kind, made(build), options.pop("loss_fn", CROSS_ENTROPY), batch, **options)


def whisper(samples: int) -> tuple[dict[str, Tensor], None]:
    return {"input_features": torch.randn(samples, 16, 40), "labels": torch.randint(3, V, (samples, 8))}, None


def sounds(samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 1600), classes(samples)


WHISPER = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
           "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_mel_bins": 16, "max_source_positions": 20,
           "max_target_positions": 16, "decoder_start_token_id": 1, **SPECIAL}  # fmt: skip
WAV2VEC = {**BODY, "conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2,
           "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 4, "apply_spec_augment": False,
           "layerdrop": 0.0, "num_labels": C}  # fmt: skip

CASES = [
    case("GPT-2", "text", tokens_to("GPT2LMHeadModel", n_positions=64, n_embd=64, n_layer=3, n_head=4, **SPECIAL),
         next_words, loss_fn=None),
    case("Llama", "text", tokens_to("LlamaForCausalLM", **BODY, num_key_value_heads=2, **SPECIAL), next_words,
         loss_fn=None),
    case("BERT", "text", logits("BertForSequenceClassification", **BODY, vocab_size=V, num_labels=C), texts),
    case("T5", "text", tokens_to("T5ForConditionalGeneration", d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
         decoder_start_token_id=0, pad_token_id=0, eos_token_id=2), next_words, loss_fn=None),
    case("byte decoder, padded", "text", Writer, padded),
    case("TransformerEncoder", "text", TextEncoder, texts),
    case("tied language model", "text", TiedWords, lambda n: (words(n, 10), words(n, 10))),
    case("large embedding", "text", BagOfWords, texts),
    case("ViT", "vision", logits("ViTForImageClassification", **BODY, **HALF), pictures),
    case("ConvNeXt", "vision", logits("ConvNextForImageClassification", hidden_sizes=[16, 32, 64], depths=[2, 2, 2],
         num_stages=3, **SEEN), pictures),
    case("Swin", "vision", logits("SwinForImageClassification", embed_dim=16, depths=[2, 2], num_heads=[2, 4],
         window_size=4, **HALF), pictures),
    case("GroupNorm CNN", "vision", convolutions, pictures),
    case("MLP-Mixer", "vision", Mixer, pictures),
    case("U-Net", "vision", UNet, lambda n: (pictures(n)[0], torch.randint(0, C, (n, SIDE, SIDE)))),
    case("autoencoder", "vision", autoencoder, lambda n: (pictures(n)[0],) * 2, loss_fn=nn.MSELoss()),
    case("frozen CNN", "vision", frozen_body, pictures),
    case("Wav2Vec2", "audio", logits("Wav2Vec2ForSequenceClassification", **WAV2VEC), sounds),
    case("Whisper", "audio", tokens_to("WhisperForConditionalGeneration", **WHISPER), whisper, loss_fn=None),
    case("dilated convolutions", "audio", Waves, lambda n: (torch.randn(n, 1, 800), classes(n))),
    case("LSTM", "recurrent", lambda: Recurrent(nn.LSTM, num_layers=2), phrases),
    case("GRU", "recurrent", lambda: Recurrent(nn.GRU), phrases),
    case("LSTM both ways", "recurrent", lambda: Recurrent(nn.LSTM, bidirectional=True), phrases),
    case("tanh RNN", "recurrent", lambda: Recurrent(nn.RNN), phrases),
    case("ResNet", "batch norm", logits("ResNetForImageClassification", embedding_size=16, hidden_sizes=[16, 32],
         depths=[2, 2], layer_type="basic", num_labels=C), pictures),
    case("MobileNet", "batch norm", logits("MobileNetV1ForImageClassification", depth_multiplier=0.25, **SEEN),
         pictures),
    case("normed perceptron", "batch norm", normed_rows, rows),
    case("perceptron", "rows", lambda: layers(64, 256, 256, 256, C), rows, sizes=(3, 32, 200)),
    case("two views", "contrastive", TwoViews, lambda n: ((pictures(n)[0], words(n)), None), loss_fn=contrastive,
         adds_up=False),
]  # fmt: skip
