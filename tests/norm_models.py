"""Small models with batch norm in training mode: each ties its samples together in another way.

`errors` measures any such case beside the loop that people write by hand, for tests and for tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import laws
from architectures import in_double
from bigbatch.core.split import even_borders
from laws import Case, N, Result

C, D, H, L, V = 3, 4, 6, 5, 7  # classes, features, channels, positions, vocabulary; none is N
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


def classes() -> Tensor:
    return torch.randint(0, C, (N,))


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(N, D), classes()


def fields(dimensions: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Sequences, images or volumes; samples of very different size, so that statistics of a few are far off."""
    sizes = torch.linspace(0.2, 3.0, N).view(N, *[1] * (dimensions + 1))
    return lambda: (torch.randn(N, 2, *[L] * dimensions) * sizes + sizes, classes())


def network(*middle: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A linear layer, layers in the middle, a linear layer."""
    return lambda: nn.Sequential(nn.Linear(D, H), *(make() for make in middle), nn.Linear(H, C))


def convolutions(norm: Callable[[], nn.Module], dimensions: int = 2) -> Callable[[], nn.Module]:
    """A convolution, a norm, and the mean over all places."""

    def made() -> nn.Module:
        first = CONVOLUTIONS[dimensions](2, H, 3)
        return nn.Sequential(first, norm(), nn.Tanh(), nn.Flatten(2), Pooled(), nn.Linear(H, C))

    return made


def norm(dimensions: int = 2, **options: Any) -> Callable[[], nn.Module]:
    """A norm whose weights are no ones and zeros."""

    def made() -> nn.Module:
        layer = NORMS[dimensions](H, **options)
        if layer.affine:
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
        return layer

    return made


def evaluating(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: make().eval()


class Pooled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean(-1)


class Around(nn.Module):
    """Layers around a function: `act(norm(first(x)))`, with a linear layer at the end."""

    def __init__(self, middle: Callable[[nn.Module, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(D, H), nn.Linear(H, C), middle
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x)))


def around(middle: Callable[[Any, Tensor], Tensor], **layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: Around(middle, **{name: make() for name, make in layers.items()})


class NormAct(nn.BatchNorm2d):
    """Norm and activation in one layer, by way of the norm's own forward."""

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(super().forward(x))


class FusedNormAct(nn.BatchNorm2d):
    """Norm and activation in one layer that calls the functional form itself, and counts batches itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.num_batches_tracked.add_(1)
        normal = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(normal, inplace=True)


class Functional(nn.Module):
    """No batch norm module anywhere: parameters and statistics of its own, and a call of the function."""

    def __init__(self, tracked: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(D, H), nn.Linear(H, C)
        self.scale, self.shift = nn.Parameter(torch.rand(H) + 0.5), nn.Parameter(torch.randn(H))
        self.register_buffer("mean", torch.zeros(H) if tracked else None)
        self.register_buffer("variance", torch.ones(H) if tracked else None)

    def forward(self, x: Tensor) -> Tensor:
        normal = F.batch_norm(self.first(x), self.mean, self.variance, self.scale, bias=self.shift, training=True)
        return self.last(normal.tanh())


class Standardised(nn.Conv2d):
    """Batch norm as a tool, on weights: every micro-batch meets with the same ones, and samples are not tied."""

    def forward(self, x: Tensor) -> Tensor:
        weight = F.batch_norm(self.weight.reshape(1, self.out_channels, -1), None, None, training=True, momentum=0.0)
        return F.conv2d(x, weight.reshape_as(self.weight), self.bias)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.m = nn.Conv2d(H, H, 3, padding=1, bias=False), norm()()
        self.b, self.n = nn.Conv2d(H, H, 3, padding=1, bias=False), norm()()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.n(self.b(F.relu(self.m(self.a(x)), inplace=True))))


class Dense(nn.Module):
    """Every layer sees all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(2 + 3 * k) for k in range(3))
        self.convolutions = nn.ModuleList(nn.Conv2d(2 + 3 * k, 3, 3, padding=1) for k in range(3))
        self.last = nn.Linear(11, C)

    def forward(self, x: Tensor) -> Tensor:
        for layer, convolution in zip(self.norms, self.convolutions, strict=True):
            x = torch.cat([x, convolution(F.relu(layer(x)))], 1)
        return self.last(x.square().mean((2, 3)))


class UNet(nn.Module):
    """Down and up again, with skip connections; one class a pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep, self.up = (self.block(*sizes) for sizes in ((2, H), (H, 2 * H), (3 * H, H)))
        self.last = nn.Conv2d(H, C, 1)

    @staticmethod
    def block(width: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = F.interpolate(self.deep(F.max_pool2d(skip, 2)), size=skip.shape[2:])
        return self.last(self.up(torch.cat([skip, deep], 1)))


class Words(nn.Module):
    """Batch norm over the channels of embedded tokens, [N, L, C] seen as [N, C, L]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(V, H), norm(1)(), nn.Linear(H, C)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.norm(self.embed(ids).transpose(1, 2)).tanh().mean(2))


class ValidWords(Words):
    """Batch norm over the tokens that are no padding, as rows: micro-batches bring different numbers, some none."""

    def forward(self, ids: Tensor) -> Tensor:
        embedded, valid = self.embed(ids), ids > 0
        normal = torch.zeros_like(embedded).masked_scatter(valid[..., None], self.norm(embedded[valid]))
        return self.last(normal.tanh().sum(1))


def padded(least: int) -> tuple[Tensor, Tensor]:
    """Texts of `least` tokens and more."""
    lengths = ((torch.arange(N) + 1) % (L + 1 - least) + least)[:, None]
    return torch.randint(1, V, (N, L)) * (torch.arange(L) < lengths), classes()


class Discriminator(nn.Module):
    """Real and generated images, one after the other, through the same norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions(norm())()

    def forward(self, real: Tensor, fake: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(real)[:, 0], self.body(fake)[:, 0]


def adversarial(outputs: tuple[Tensor, Tensor], _targets: Any = None) -> Tensor:
    return F.softplus(-outputs[0]).mean() + F.softplus(outputs[1]).mean()


class Siamese(nn.Module):
    """One tower, run on two views; the loss compares every sample with every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(D, H), norm(1)(), nn.ReLU(), nn.Linear(H, C), nn.BatchNorm1d(C))

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(left), self.body(right)


def contrastive(outputs: tuple[Tensor, Tensor], _targets: Any = None) -> Tensor:
    left, right = (F.normalize(output, dim=1) for output in outputs)
    return F.cross_entropy(left @ right.T / 0.2, torch.arange(len(left)))


class Follower(nn.Module):
    """A student that follows a teacher whose norms see batches too, without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = network(norm(1), nn.Tanh)(), network(norm(1), nn.Tanh)()

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            goal = self.teacher(x).softmax(1)
        return self.student(x) + goal


class Structured(nn.Module):
    """A mapping in, a mapping with a tuple out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(D, H), norm(1)(), nn.Linear(H, C)

    def forward(self, x: Tensor, more: dict[str, Tensor], scale: float) -> dict[str, Any]:
        hidden = self.norm(self.first(x) * scale + more["shift"])
        return {"logits": self.last(hidden.tanh()), "hidden": (hidden, None)}


class ChannelsLast(nn.Module):
    """Stops where the norm changes how images lie in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(2, H, 3), norm()(), nn.Linear(H, C)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.contiguous(memory_format=torch.channels_last))
        assert hidden.is_contiguous(memory_format=torch.channels_last)
        normal = self.norm(hidden)
        assert normal.is_contiguous(memory_format=torch.channels_last), "the norm left channels_last"
        return self.last(normal.square().mean((2, 3)))


class Autocast(nn.Module):
    """Bfloat16 through the convolution, float32 weights and statistics in the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = convolutions(norm())().to(torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.body[0](x.to(torch.float32))
            normal = self.body[1](hidden)
            assert hidden.dtype == normal.dtype == torch.bfloat16, "the norm returned another dtype"
        return self.body[2:](normal.to(torch.float32))


def frozen_affine() -> nn.Module:
    return norm(1)().requires_grad_(False)


def partly_frozen() -> nn.Module:
    still = norm(1)().eval()
    nn.init.uniform_(still.running_mean)
    return still


def lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(D, H), nn.LazyBatchNorm1d(), nn.Tanh(), nn.Linear(H, C))


def unnormed(model: Any, x: Tensor) -> Tensor:
    """Two places share one layer, which so moves its statistics twice a batch."""
    return model.norm(model.norm(x).tanh() + x)


def ours(case: Case, size: int) -> Result:
    """Door 1 where the loss adds up, door 2 elsewhere."""
    way = "recompute" if case.reduction is None else "sequential"
    return laws.micro_batches(case, laws.made(case), laws.batch_of(case), way, size)


def plain(case: Case, size: int) -> Result:
    """What people write by hand: every micro-batch's loss by its share of the samples, one after the other."""
    job, batch = laws.made(case), laws.batch_of(case)
    samples = next(len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim())
    borders = even_borders(samples, size)
    total = torch.zeros(())
    for first, last in zip(borders, borders[1:], strict=False):
        inputs, targets = laws.rows_of(case, first, last)
        loss = laws.loss_of(case, job.loss_fn, laws.called(job.model, inputs), targets) * ((last - first) / samples)
        loss.backward()
        total = total + loss.detach()
    return laws.left(job, total)


def gradient_error(found: Result, expected: Result) -> float:
    """The length of the difference of two gradients, relative to the expected one's."""
    pairs = [(found.gradients[name], gradient) for name, gradient in expected.gradients.items() if gradient is not None]
    apart = sum(float((other - gradient).square().sum()) for other, gradient in pairs if other is not None)
    return (apart / sum(float(gradient.square().sum()) for _, gradient in pairs)) ** 0.5


def errors(case: Case, size: int = 3) -> tuple[float, float]:
    """How far from the whole batch's gradient, in float64: bigbatch, and plain accumulation."""
    with in_double():
        expected = laws.whole_batch(case, laws.made(case), laws.batch_of(case))
        return gradient_error(ours(case, size), expected), gradient_error(plain(case, size), expected)


def ce() -> Any:
    return nn.CrossEntropyLoss()


def images() -> tuple[Tensor, Tensor]:
    return fields(2)()


CASES = [
    Case("rows", network(norm(1), nn.ReLU), rows, ce),
    Case("sequences", convolutions(norm(1), 1), fields(1), ce),
    Case("images", convolutions(norm()), images, ce),
    Case("volumes", convolutions(norm(3), 3), fields(3), ce),
    Case("momentum of one", convolutions(norm(momentum=1.0)), images, ce),
    Case("average over all batches", convolutions(norm(momentum=None)), images, ce),
    Case("without weights", convolutions(norm(affine=False)), images, ce),
    Case("without running statistics", convolutions(norm(track_running_stats=False)), images, ce),
    Case("without running statistics, in eval mode", convolutions(evaluating(norm(track_running_stats=False))),
         images, ce),
    Case("large epsilon", convolutions(norm(eps=0.3)), images, ce),
    Case("norm and activation", convolutions(lambda: NormAct(H)), images, ce),
    Case("norm and activation, fused", convolutions(lambda: FusedNormAct(H)), images, ce),
    Case("functional", lambda: Functional(True), rows, ce),
    Case("functional, without running statistics", lambda: Functional(False), rows, ce),
    Case("lazy", lazy, rows, ce),
    Case("shared by two places", around(unnormed, norm=norm(1)), rows, ce),
    Case("called in a loop", around(lambda m, x: [x := m.norm(x).tanh() for _ in range(3)][-1], norm=norm(1)),
         rows, ce),
    Case("first layer", lambda: nn.Sequential(nn.BatchNorm1d(D), nn.Linear(D, C)), rows, ce),
    Case("last layer", lambda: nn.Sequential(nn.Linear(D, C), nn.BatchNorm1d(C)), rows, ce),
    Case("every layer", network(*[norm(1), nn.GELU, lambda: nn.Linear(H, H)] * 4), rows, ce),
    Case("residual", lambda: nn.Sequential(nn.Conv2d(2, H, 3), Residual(), Residual(), nn.Flatten(2), Pooled(),
                                           nn.Linear(H, C)), images, ce),
    Case("dense", Dense, images, ce),
    Case("U-Net", UNet, lambda: (torch.randn(N, 2, 6, 6), torch.randint(0, C, (N, 6, 6))), ce),
    Case("embedded tokens", Words, lambda: (torch.randint(0, V, (N, L)), classes()), ce),
    Case("tokens without padding", ValidWords, lambda: padded(1), ce),
    Case("tokens without padding, some texts empty", ValidWords, lambda: padded(0), ce),
    Case("frozen next to training", network(partly_frozen, nn.Tanh, lambda: nn.Linear(H, H), norm(1), nn.Tanh), rows,
         ce),
    Case("frozen weights", network(frozen_affine, nn.Tanh), rows, ce),
    Case("teacher without gradients", Follower, rows, ce),
    Case("mapping in, mapping out", Structured,
         lambda: ({"x": torch.randn(N, D), "more": {"shift": torch.randn(N, H)}, "scale": 1.5}, classes()),
         lambda: lambda outputs, targets: F.cross_entropy(outputs["logits"], targets), "mean"),
    Case("discriminator", Discriminator, lambda: ((fields(2)()[0], torch.randn(N, 2, L, L)), None),
         lambda: adversarial, "mean"),
    Case("Siamese", Siamese, lambda: ((torch.randn(N, D), torch.randn(N, D)), None), lambda: contrastive, None),
    Case("other norms beside it", network(norm(1), lambda: nn.LayerNorm(H), nn.Tanh, lambda: nn.Unflatten(1, (2, 3)),
                                          lambda: nn.InstanceNorm1d(2, affine=True), nn.Flatten), rows, ce),
    Case("channels last", ChannelsLast, images, ce),
    Case("dropout", network(norm(1), lambda: nn.Dropout(0.4), lambda: nn.Linear(H, H), norm(1), nn.Tanh), rows, ce,
         random=True),
    Case("bfloat16 under autocast", Autocast, images, ce, tolerance=3e-2),
    Case("standardised weights", lambda: nn.Sequential(Standardised(2, H, 3), nn.Tanh(), nn.Flatten(2), Pooled(),
                                                       nn.Linear(H, C)), images, ce),
]  # fmt: skip

BY_NAME = {case.name: case for case in CASES}
