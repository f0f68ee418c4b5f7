"""Small awkward models: each has one thing that an engine must not stumble over."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint

D, H, C, T, V = 4, 6, 3, 5, 7  # features, hidden units, classes, positions, vocabulary; none is N


class Two(nn.Module):
    """Linear, something in the middle, linear; most of the animals below are this with another middle."""

    def __init__(self, middle: Any = torch.tanh) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(D, H), nn.Linear(H, C), middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


class Tied(nn.Module):
    """One matrix embeds the tokens and reads them out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(V, H), nn.Linear(H, H)
        self.head = nn.Linear(H, V, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        past = self.embed(ids).cumsum(1)
        return self.head(self.mix(past).tanh()).transpose(1, 2)


class Recurrent(nn.Module):
    """A recurrent core; the time axis comes first inside."""

    def __init__(self, core: type[nn.Module], **options: Any) -> None:
        super().__init__()
        self.core, self.last = core(D, H, **options), nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.core(x.transpose(0, 1))[0][-1])


class LearnedStart(nn.Module):
    """The initial state is a parameter that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.core, self.last = (
            nn.Parameter(torch.randn(1, 1, H)),
            nn.GRU(D, H, batch_first=True),
            nn.Linear(H, C),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.core(x, self.start.expand(1, len(x), H).contiguous())[0][:, -1])


class Attention(nn.Module):
    """Attention with a mask of the padding, and a second output that the loss does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.last = nn.MultiheadAttention(D, 2, batch_first=True), nn.Linear(D, C)

    def forward(self, x: Tensor, padding: Tensor) -> dict[str, Tensor]:
        out, weights = self.attend(x, x, x, key_padding_mask=padding)
        return {"logits": self.last(out.mean(1)), "weights": weights}


class Frozen(Two):
    """A layer without gradients in the middle of others."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(H, H), nn.Tanh()))
        self.middle.requires_grad_(False)


class Unused(Two):
    """Parameters that no forward touches, and a whole head whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.spare, self.other = nn.Parameter(torch.randn(3)), nn.Linear(H, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return self.last(hidden), self.other(hidden)


class Counter(Two):
    """A buffer that is replaced, one that is written to, and one that is constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(H))
        self.register_buffer("scale", torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            self.calls = self.calls + 1
            self.average.lerp_(hidden.detach().mean(0), 0.1)
        return self.last((hidden * self.scale).tanh())


class Functional(nn.Module):
    """Runs a module by `functional_call` with weights that are made from other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(D, C), nn.Parameter(torch.rand(C, 1))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return torch.func.functional_call(self.inner, {"weight": self.inner.weight * self.scale}, (x,))


class Pair(NamedTuple):
    logits: Tensor
    hidden: Tensor


@dataclass
class Output:
    logits: Tensor
    extra: tuple[Tensor, Tensor | None]
    name: str = "output"


class Structured(Two):
    """Returns its logits inside of some structure."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        y = self.last(hidden)
        kinds = {
            "named tuple": Pair(y, hidden),
            "dataclass": Output(y, (hidden, None)),
            "nested": {"a": ((y, hidden), [])},
        }
        return kinds[self.kind]


class MixedDtypes(nn.Module):
    """Integers, booleans and floats go in; one block is float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.narrow = nn.Embedding(V, D), nn.Linear(D, H, dtype=torch.float32)
        self.last = nn.Linear(H, C)

    def forward(self, ids: Tensor, keep: Tensor, weight: Tensor) -> Tensor:
        x = (self.embed(ids) * keep[..., None]).mean(1) * weight
        return self.last(self.narrow(x.float()).tanh().double())


class Ragged(nn.Module):
    """Sequences of different lengths, each of them its own tensor, one a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, H), nn.Linear(H, C)

    def forward(self, batch: Mapping[str, Any]) -> Tensor:
        rows = pad_sequence(batch["rows"], batch_first=True)
        lengths = torch.tensor([len(row) for row in batch["rows"]])
        there = torch.arange(rows.shape[1]) < lengths[:, None]
        return self.last((self.first(rows).tanh() * there[..., None]).sum(1) / lengths[:, None])


class Packed(nn.Module):
    """A packed sequence goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.last = nn.GRU(D, H), nn.Linear(H, C)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.last(pad_packed_sequence(self.core(packed)[0], batch_first=True)[0].sum(1))


class Jagged(nn.Module):
    """A nested (jagged) tensor goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, H), nn.Linear(H, C)

    def forward(self, nested: Tensor) -> Tensor:
        return self.last(torch.nested.to_padded_tensor(self.first(nested).sin(), 0.0).sum(1))


class InPlace(Two):
    """Writes to its input and to what it has computed."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2).add_(1)
        hidden = self.first(x)
        hidden[:, 0] = 0.5
        return self.last(F.relu_(hidden.add_(1)) * 2).tanh_()


class Several(nn.Module):
    """Several inputs, one of them optional, one shared by all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(D, H), nn.Linear(2, H), nn.Linear(H, C)

    def forward(self, image: Tensor, text: Tensor, temperature: Tensor, note: str = "", skip: Any = None) -> Tensor:
        return self.last((self.left(image) * self.right(text)).tanh()) / temperature


class Hooked(Two):
    """Forward, backward and parameter hooks that change what passes by."""

    def __init__(self) -> None:
        super().__init__()
        self.first.register_forward_hook(lambda module, inputs, output: output * 2)
        self.first.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
        self.last.register_full_backward_hook(lambda module, into, out: tuple(g * 3 for g in into))
        self.first.weight.register_hook(lambda gradient: gradient * 0.5)


class Experts(nn.Module):
    """Each sample goes to one expert; some see no sample, one sees few."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, C) for _ in range(5))

    def forward(self, x: Tensor, expert: Tensor) -> Tensor:
        out = x.new_zeros(len(x), C)
        for i in expert.unique().tolist():
            out[expert == i] = self.experts[i](x[expert == i])
        return out


class ByHand(nn.Module):
    """Parameters in lists and dicts, a 0-d one, and weights that some forward makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList([torch.randn(D, H), torch.randn(H)])
        self.named = nn.ParameterDict({"out": torch.randn(H, C), "scale": torch.tensor(1.3)})

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.parts[0] + self.parts[1]).tanh() @ (self.named["out"] * self.named["scale"])


class Siamese(Two):
    """One tower, run twice in one forward."""

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (super().forward(left) * super().forward(right).sigmoid()).sum(1)


class Spectrum(nn.Module):
    """Complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.filter, self.last = nn.Parameter(torch.randn(D // 2 + 1, dtype=torch.complex128)), nn.Linear(D, C)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=D).tanh())


class Cube(torch.autograd.Function):
    """x³, with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient


class Force(nn.Module):
    """Returns the derivative of an energy by its input: a backward inside of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(D, H), nn.Tanh(), nn.Linear(H, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(place).sum(), place, create_graph=True)
        return force


class Checkpointed(Two):
    """Recomputes a part of itself already."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(lambda h: self.first(h).tanh().square(), x, use_reentrant=False))


class Teacher(Two):
    """Holds a copy of itself that it follows without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.first).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(x).tanh()
        return super().forward(x) + (self.first(x) * goal).sum(1, keepdim=True)


class Cached(Two):
    """Fills an attribute and a dict in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.cache[len(x)] = self.hidden = self.first(x).detach()
        return super().forward(x)


class OwnLoss(nn.Module):
    """Returns its own mean over the target tokens after the shift, as causal language models do."""

    def __init__(self, handed: bool) -> None:
        super().__init__()
        self.lm = Tied()
        if handed:
            self.forward = self.divided  # type: ignore[method-assign]

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:  # type: ignore[override]
        logits = self.lm(input_ids)[..., :-1]
        return SimpleNamespace(loss=F.cross_entropy(logits, labels[:, 1:]), logits=logits)

    def divided(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        logits = self.lm(input_ids)[..., :-1]
        if num_items_in_batch is None:
            return SimpleNamespace(loss=F.cross_entropy(logits, labels[:, 1:]), logits=logits)
        total = F.cross_entropy(logits, labels[:, 1:], reduction="sum")
        return SimpleNamespace(loss=total / num_items_in_batch, logits=logits)


class ArcHead(nn.Module):
    """A loss with weights of its own: class centres and a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.centres, self.log_temperature = nn.Parameter(torch.randn(C, C)), nn.Parameter(torch.tensor(0.3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        similar = F.normalize(outputs, dim=1) @ F.normalize(self.centres, dim=1).T
        return F.cross_entropy(similar * self.log_temperature.exp(), targets)
