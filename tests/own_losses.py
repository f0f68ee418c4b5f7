"""Small language models that return a loss of their own, each divided by something else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

V, H, IGNORED = 11, 6, -100


class Words(nn.Module):
    """A small language model whose subclasses have a loss of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(V, H), nn.GRU(H, H, batch_first=True), nn.Linear(H, V)
        self.double()

    def losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """[samples, positions], zero where the label is ignored."""
        logits = self.head(self.mix(self.words(input_ids))[0])
        return F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")


class Plain(Words):
    """A mean over target tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.losses(input_ids, labels).sum() / (labels != IGNORED).sum()


class Shifted(Plain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids[:, :-1], labels[:, 1:])


class Handed(Words):
    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        items = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return self.losses(input_ids, labels).sum() / items


class Deaf(Plain):
    """Takes any keyword and hears none."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        return super().forward(input_ids, labels)


class HandsOn(Plain):
    """Takes any keyword and hands it to somebody who does not."""

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> Any:
        return super().forward(input_ids, labels, **others)


class EachText(Words):
    """A mean over texts of the mean over their tokens."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return (self.losses(input_ids, labels).sum(1) / (labels != IGNORED).sum(1)).mean()


class ByMask(Words):
    """A mean over what a mask shows, without labels."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return (self.losses(input_ids, input_ids) * attention_mask).sum() / attention_mask.sum()


class InTuple(Plain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids, labels), self.words(input_ids)


class InDict(Plain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return {"loss": super().forward(input_ids, labels)}


class InObject(Plain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return SimpleNamespace(loss=super().forward(input_ids, labels))


class InTraining(Plain):
    """Has a loss in training mode only."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return {"loss": super().forward(input_ids, labels)} if self.training else {"logits": input_ids}


class Dropping(Plain):
    """Drops a third of everything, and counts how often it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("runs", torch.zeros(()))

    def losses(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        self.runs += 1
        hidden = F.dropout(self.mix(self.words(input_ids))[0], 0.3, self.training)
        logits = self.head(hidden).transpose(1, 2)
        return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")


class AddsUp(Words):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.losses(input_ids, labels).sum()


class SpreadOut(Plain):
    """A mean over tokens, and a term that looks at all samples together, in training only."""

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        spread = self.words(input_ids).mean(1).std(0, correction=0).sum() if self.training else 0.0
        return super().forward(input_ids, labels) + 0.01 * spread


class PartlyHanded(Handed):
    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        return super().forward(input_ids, labels, num_items_in_batch) + 1e-6 * self.words(input_ids).square().mean()


class TwoTerms(Plain):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return super().forward(input_ids, labels) + 0.1 * self.words(input_ids[:, 0]).square().mean()
