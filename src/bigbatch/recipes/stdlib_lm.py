"""Code, byte by byte: a small transformer learns to write the bodies of Python's own functions (door 1).

A sample is one function of the standard library. Its signature is the prompt, its body the target; prompt and padding
are ignored in the loss (-100). Functions differ much in length, so micro-batches hold different numbers of target
bytes: the batch's loss is divided by its target bytes, never by its micro-batches.

Legend of shapes: B samples, T bytes, V = 256 values of a byte, C channels.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bigbatch.terms import Recipe

IGNORED = -100
END = 0  # no source text holds this byte: it closes a function, and fills up shorter samples
LONGEST = 192
EVAL_ROWS = 64
Function = tuple[bytes, bytes]


def functions(source: str) -> Iterator[Function]:
    r"""Prompt and body of each function and method of a source text, moved to the left margin.

    >>> list(functions("class A:\n    def twice(self, x):\n        return 2 * x\n"))
    [(b'def twice(self, x):\n    ', b'return 2 * x')]
    """
    lines = source.encode().splitlines(keepends=True)
    blocks: list[Any] = [ast.parse(source)]
    while blocks:
        for node in blocks.pop().body:
            if isinstance(node, ast.ClassDef):
                blocks.append(node)
            if isinstance(node, ast.FunctionDef):
                yield _parted(lines, node)


def _parted(lines: Sequence[bytes], node: ast.FunctionDef) -> Function:
    """One function, cut where the first statement of its body starts."""
    margin, first = node.col_offset, node.body[0]
    text = [line[margin:] if line[:margin].isspace() else line for line in lines[node.lineno - 1 : node.end_lineno]]
    head = first.lineno - node.lineno
    column = max(first.col_offset - margin, 0)
    prompt = b"".join(text[:head]) + text[head][:column]
    return prompt, (text[head][column:] + b"".join(text[head + 1 :])).rstrip()


@lru_cache(maxsize=1)
def library() -> tuple[list[Function], list[Function]]:
    """Functions of at most `LONGEST` bytes to learn from, and those of every eighth file, which are held out."""
    parts: tuple[list[Function], list[Function]] = ([], [])
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    for number, file in enumerate(files):
        source = file.read_text(encoding="utf-8", errors="replace")
        fitting = [f for f in functions(source) if len(f[0]) + len(f[1]) < LONGEST]
        parts[number % 8 == 7].extend(fitting)
    return parts


def collate(samples: Sequence[Function]) -> tuple[Tensor, Tensor]:
    r"""Bytes (B, T) and the bytes that follow them (B, T); prompt and padding are ignored.

    >>> inputs, targets = collate([(b"f:", b"xy"), (b"g", b"z")])
    >>> targets.tolist() == [[-100, ord("x"), ord("y"), END], [ord("z"), END, -100, -100]]
    True
    """
    longest = max(len(prompt) + len(body) for prompt, body in samples)
    inputs = torch.full((len(samples), longest), END)
    targets = torch.full((len(samples), longest), IGNORED)
    for row, (prompt, body) in enumerate(samples):
        text = torch.tensor([*prompt, *body, END])
        inputs[row, : len(text) - 1] = text[:-1]
        targets[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
    return inputs, targets


class Block(nn.Module):
    """Attention to earlier bytes, then two layers on each byte alone; each is added to what came in."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.byte_norm = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.byte = nn.Sequential(nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels))

    def forward(self, x_BTC: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x_BTC)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3)
        q, k, v = qkv.unbind(2)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTC = x_BTC + self.out(seen.transpose(1, 2).flatten(2))
        added: Tensor = self.byte(self.byte_norm(x_BTC))
        return x_BTC + added


class Writer(nn.Module):
    """Bytes (B, T) to scores (B, V, T) of the next byte; a byte sees itself and earlier ones only."""

    def __init__(self, channels: int = 64, heads: int = 4, blocks: int = 2, nearby: int = 8) -> None:
        super().__init__()
        self.nearby = nearby
        self.bytes = nn.Embedding(256, channels)
        self.places = nn.Embedding(LONGEST, channels)
        self.words = nn.Conv1d(channels, channels, nearby)
        self.blocks = nn.Sequential(*(Block(channels, heads) for _ in range(blocks)))
        self.norm, self.scores = nn.LayerNorm(channels), nn.Linear(channels, 256)

    def forward(self, bytes_BT: Tensor) -> Tensor:
        x_BCT = self.bytes(bytes_BT).transpose(1, 2)
        x_BCT = x_BCT + self.words(functional.pad(x_BCT, (self.nearby - 1, 0)))
        places = torch.arange(bytes_BT.shape[1], device=bytes_BT.device)
        x_BTC = self.blocks(x_BCT.transpose(1, 2) + self.places(places))
        scores: Tensor = self.scores(self.norm(x_BTC))
        return scores.transpose(1, 2)


def unigram_entropy(train: Sequence[Function], held_out: Sequence[Function]) -> float:
    """Nats a byte that the bytes' frequencies alone would lose on the held-out bodies (Laplace's rule: one each)."""
    counts = torch.bincount(_body_bytes(train), minlength=256) + 1
    return -(counts / counts.sum()).log()[_body_bytes(held_out)].mean().item()


def _body_bytes(samples: Sequence[Function]) -> Tensor:
    return torch.tensor([byte for _, body in samples for byte in (*body, END)])


@torch.no_grad()
def metrics(model: nn.Module, eval_data: Sequence[Function]) -> Mapping[str, float]:
    """Held-out loss in nats a target byte, beside what the bytes' frequencies alone would lose."""
    device = next(model.parameters()).device
    lost, target_bytes = 0.0, 0
    ordered = sorted(eval_data, key=lambda sample: len(sample[0]) + len(sample[1]))
    for start in range(0, len(ordered), EVAL_ROWS):
        inputs, targets = (tensor.to(device) for tensor in collate(ordered[start : start + EVAL_ROWS]))
        lost += functional.cross_entropy(model(inputs), targets, reduction="sum").item()
        target_bytes += int((targets != IGNORED).sum())
    return {"held_out_loss": lost / target_bytes, "unigram_entropy": unigram_entropy(library()[0], eval_data)}


def optimizer(parameters: Any, lr: float) -> torch.optim.Optimizer:
    """AdamW with a shorter memory of squared gradients, as is usual for transformers."""
    return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.98))


def scheduler(optimizer: torch.optim.Optimizer, updates: int) -> torch.optim.lr_scheduler.LRScheduler:
    """The rate rises for a tenth of the updates and falls linearly to nothing."""
    rise = max(updates // 10, 1)

    def share(position: int) -> float:
        return min((position + 1) / rise, (updates - position) / max(updates - rise, 1), 1.0)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def recipe() -> Recipe:
    """The job `bigbatch train stdlib-lm`."""
    train, held_out = library()
    return Recipe(
        name="stdlib-lm",
        model=Writer(),
        loss_fn=nn.CrossEntropyLoss(ignore_index=IGNORED),
        train_data=train,
        eval_data=held_out,
        optimizer=optimizer,
        scheduler=scheduler,
        metrics=metrics,
        collate=collate,
        defaults={"batch_size": 32, "micro_batch_size": 10, "epochs": 2, "lr": 6e-3, "precision": "fp32", "seed": 0},
    )
