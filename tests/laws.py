"""The laws that every engine and every option obeys, each a function of a case and a way to run it.

The oracle is plain PyTorch: one forward and one backward over the whole batch, in float64. A law says nothing when it
holds and raises AssertionError when it does not.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_map

from bigbatch import Accumulator, MicroBatched, windows
from bigbatch.core.live import Live
from bigbatch.core.rng import Draws
from bigbatch.errors import SplitError

N = 10
SIZES = (1, 2, 3, 5, N - 1, N, N + 5)
CUTS = ([4, 4, 2], [1, 9], [5, 3, 2], [2, 2, 2, 2, 2], [N])
DOOR_1 = ("sequential", "joint")
DOOR_2 = ("recompute", "offload", "keep", "mixed")
Around = Callable[[Any], AbstractContextManager[Any]]


def cut_rows(tree: Any, first: int, last: int) -> Any:
    """Samples [first, last) of a batch of tensors, told in the plainest way; 0-d tensors are shared."""
    return tree_map(lambda leaf: leaf[first:last] if isinstance(leaf, Tensor) and leaf.dim() else leaf, tree)


@dataclass(frozen=True)
class Case:
    """A model, a batch of N samples and a loss.

    Attributes:
        name: what is awkward here.
        model: makes the model.
        batch: makes inputs and targets.
        loss: makes `loss_fn(outputs, targets)`; where it makes None the model returns its own loss.
        reduction: as in `Accumulator`; None where the loss ties samples together, so that only door 2 can run it.
        whole: the loss of the whole batch, where a person would call `loss_fn` otherwise.
        split: as in `Accumulator`.
        rows: samples [first, last) of inputs or targets.
        random: the forward draws random numbers.
        tolerance: relative; larger where a part of the model is not float64.
        ways: the engines that can run it; None for all.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, Any]]
    loss: Callable[[], Any]
    reduction: Any = "auto"
    whole: Callable[[Any, Any], Tensor] | None = None
    split: Any = None
    rows: Callable[[Any, int, int], Any] = cut_rows
    random: bool = False
    tolerance: float = 1e-12
    ways: tuple[str, ...] | None = None

    def ways_to_run(self) -> list[str]:
        """All engines, but for the sequential one where the loss ties samples together."""
        return [way for way in self.ways or DOOR_1 + DOOR_2 if way != "sequential" or self.reduction is not None]


@dataclass
class Job:
    """One model and one loss, made for one run; equal for equal cases."""

    model: nn.Module
    loss_fn: Any

    def modules(self) -> list[nn.Module]:
        return [part for part in (self.model, self.loss_fn) if isinstance(part, nn.Module)]

    def parameters(self) -> dict[str, nn.Parameter]:
        return {f"{i}.{name}": p for i, part in enumerate(self.modules()) for name, p in part.named_parameters()}

    def buffers(self) -> dict[str, Tensor]:
        return {f"{i}.{name}": b.detach() for i, part in enumerate(self.modules()) for name, b in part.named_buffers()}


@dataclass
class Result:
    """What a run left behind."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


@contextmanager
def in_float64(seed: int) -> Iterator[None]:
    """Everything made inside is float64 and the same each time; the caller's random numbers are left alone."""
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def made(case: Case) -> Job:
    with in_float64(1):
        return Job(case.model(), case.loss())


def batch_of(case: Case) -> tuple[Any, Any]:
    with in_float64(2):
        return case.batch()


def rows_of(case: Case, first: int, last: int) -> tuple[Any, Any]:
    inputs, targets = batch_of(case)
    return case.rows(inputs, first, last), case.rows(targets, first, last)


def left(job: Job, loss: Tensor) -> Result:
    gradients = {name: None if p.grad is None else p.grad.detach().clone() for name, p in job.parameters().items()}
    return Result(loss.detach(), gradients, {name: buffer.clone() for name, buffer in job.buffers().items()})


def called(model: Any, inputs: Any) -> Any:
    """A tuple is the arguments, a mapping the keywords, anything else the one argument."""
    if isinstance(inputs, tuple) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def loss_of(case: Case, loss_fn: Any, outputs: Any, targets: Any) -> Tensor:
    if case.whole is not None:
        return case.whole(outputs, targets)
    return outputs.loss if loss_fn is None else loss_fn(outputs, targets)


def whole_batch(case: Case, job: Job, batch: tuple[Any, Any], draws: Draws | None = None) -> Result:
    """The oracle."""
    with draws.record(N) if draws is not None else nullcontext():
        outputs = called(job.model, batch[0])
    loss = loss_of(case, job.loss_fn, outputs, batch[1])
    loss.backward()
    return left(job, loss)


def accumulator(case: Case, job: Job, way: str, size: int | None, **options: Any) -> Accumulator:
    """Door 1; "joint" hides the loss behind a function that nobody can name."""
    options = {"split": case.split, "micro_batch_size": size, **options}
    if way == "sequential":
        return Accumulator(job.model, job.loss_fn, reduction=case.reduction, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Accumulator(job.model, lambda o, t: loss_of(case, job.loss_fn, o, t), modules=job.modules(), **options)


def wrapped(case: Case, model: nn.Module, way: str, size: int, **options: Any) -> MicroBatched:
    """Door 2; "mixed" keeps the activations of about the last half of the samples."""
    activations = "recompute" if way == "mixed" else way
    keep_bytes = N // 2 if way == "mixed" else None
    model = MicroBatched(model, size, activations=activations, keep_bytes=keep_bytes, split=case.split, **options)
    if way == "mixed":
        model._door.sample_bytes = 1.0
    return model


def micro_batches(case: Case, job: Job, batch: Any, way: str, size: int | None, around: Around | None = None) -> Result:
    """The whole batch, or a window as a list of batches, by one of the engines."""
    if way in DOOR_1:
        door = accumulator(case, job, way, size)
        door.around = around
        if isinstance(batch, tuple):
            return left(job, door.backward(*batch))
        (window,) = windows(delivered(case, job, batch), accum_steps=len(batch))
        return left(job, door.backward(window))
    model = wrapped(case, job.model, way, size or N)
    model._door.around = around
    loss = loss_of(case, job.loss_fn, called(model, batch[0]), batch[1])
    loss.backward()
    return left(job, loss)


def delivered(case: Case, job: Job, batches: Iterable[Any]) -> list[Any]:
    """What a loader yields: pairs, or inputs alone where the model returns its own loss."""
    return [batch if job.loss_fn is not None else batch[0] for batch in batches]


def replaying(draws: Draws) -> Around:
    return lambda piece: draws.replay(piece.first, piece.first + piece.samples)


def assert_same(found: Result, expected: Result, tolerance: float = 1e-12) -> None:
    """Gradients apart by no more than `tolerance` of the whole gradient; None where and only where None belongs."""
    assert_close("loss", found.loss, expected.loss, tolerance)
    assert found.gradients.keys() == expected.gradients.keys() and found.buffers.keys() == expected.buffers.keys()
    norms = [gradient.to_dense().norm().item() for gradient in expected.gradients.values() if gradient is not None]
    for name, gradient in expected.gradients.items():
        other = found.gradients[name]
        assert (gradient is None) == (other is None), f"{name}: gradient is {other}, not {gradient}"
        if gradient is not None and other is not None:
            assert other.dtype == gradient.dtype and other.shape == gradient.shape, name
            assert_close(name, other.to_dense(), gradient.to_dense(), tolerance, max(norms))
    for name, buffer in expected.buffers.items():
        assert_close(name, found.buffers[name], buffer, tolerance)


def assert_close(name: str, found: Tensor, expected: Tensor, tolerance: float, size: float = 0.0) -> None:
    assert found.shape == expected.shape, f"{name} has the shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    wide = torch.complex128 if expected.is_complex() else torch.float64
    apart = (found.to(wide) - expected.to(wide)).abs()
    allowed = tolerance * max(size, expected.to(wide).norm().item())
    worst = apart.max().item() if apart.numel() else 0.0
    assert worst <= allowed, f"{name} is off by {worst:.3e}, of which {allowed:.3e} is rounding"


def expected_of(case: Case, batch: tuple[Any, Any]) -> tuple[Result, Around | None]:
    draws = Draws() if case.random else None
    expected = whole_batch(case, made(case), batch, draws)
    assert draws is None or draws.unfollowed == []
    return expected, None if draws is None else replaying(draws)


def equals_the_whole_batch(case: Case, way: str, sizes: Iterable[int] = SIZES) -> None:
    """Loss, every gradient and every buffer, whatever the micro-batch size."""
    expected, around = expected_of(case, batch_of(case))
    for size in sizes:
        assert_same(micro_batches(case, made(case), batch_of(case), way, size, around), expected, case.tolerance)


def equals_the_whole_batch_in_windows(case: Case, way: str, cuts: Iterable[Sequence[int]] = CUTS) -> None:
    """The same for micro-batches of any sizes that a loader delivers, cut further or not; an empty one too."""
    expected, around = expected_of(case, batch_of(case))
    for cut in cuts:
        borders = [sum(cut[:k]) for k in range(len(cut) + 1)]
        for size in (None, 2):
            window = [rows_of(case, first, last) for first, last in zip(borders, borders[1:], strict=False)]
            assert_same(micro_batches(case, made(case), window, way, size, around), expected, case.tolerance)


def partial_last_window_is_right(case: Case, way: str) -> None:
    """Four micro-batches in windows of three: the last window is a batch of its own, of its own size."""
    job, borders = made(case), (0, 3, 6, 8, N)
    door = accumulator(case, job, way, None)
    stream = [rows_of(case, first, last) for first, last in zip(borders, borders[1:], strict=False)]
    for window, (first, last) in zip(
        windows(iter(delivered(case, job, stream)), accum_steps=3), ((0, 8), (8, N)), strict=True
    ):
        loss = door.backward(window)
        expected, _ = expected_of(case, rows_of(case, first, last))
        found = left(job, loss)
        assert_same(Result(found.loss, found.gradients, expected.buffers), expected, case.tolerance)
        assert door.report.samples == last - first and window.last == (last == N)
        for parameter in job.parameters().values():
            parameter.grad = None


def gradients_are_added(case: Case, way: str, size: int = 3) -> None:
    """What `.grad` held stays in it, and the tensor stays the same object; nothing is added where nothing belongs."""
    expected, around = expected_of(case, batch_of(case))
    job = made(case)
    held: dict[str, Tensor] = {}
    for i, (name, parameter) in enumerate(job.parameters().items()):
        gradient = expected.gradients[name]
        if parameter.requires_grad and (gradient is None or gradient.layout == torch.strided):
            held[name] = parameter.grad = torch.full_like(parameter, 0.5 + i)
            expected.gradients[name] = held[name].clone() if gradient is None else gradient + held[name]
    found = micro_batches(case, job, batch_of(case), way, size, around)
    assert_same(found, expected, case.tolerance)
    for name, gradient in held.items():
        assert job.parameters()[name].grad is gradient, f"{name}.grad is another tensor now"


def dtype_and_device_are_kept(case: Case, way: str, size: int = 3) -> None:
    """Gradients are of the parameter's dtype and device, the loss is 0-d, detached and of the whole batch's dtype."""
    job, expected = made(case), whole_batch(case, made(case), batch_of(case))
    dtypes = {name: (p.dtype, p.device) for name, p in job.parameters().items()}
    found = micro_batches(case, job, batch_of(case), way, size)
    assert found.loss.dim() == 0 and not found.loss.requires_grad and found.loss.dtype == expected.loss.dtype
    for name, parameter in job.parameters().items():
        assert (parameter.dtype, parameter.device) == dtypes[name]
        assert parameter.grad is None or (parameter.grad.dtype, parameter.grad.device) == dtypes[name]
    assert {n: b.dtype for n, b in job.buffers().items()} == {n: b.dtype for n, b in expected.buffers.items()}


def buffers_move_once(case: Case, way: str, size: int = 3) -> None:
    """Over two batches in a row, every buffer is where two forwards over whole batches leave it."""
    plain, job = made(case), made(case)
    before = {name: buffer.clone() for name, buffer in plain.buffers().items()}
    for _ in range(2):
        expected = whole_batch(case, plain, batch_of(case))
        assert_same(micro_batches(case, job, batch_of(case), way, size), expected, case.tolerance)
    assert any(not torch.equal(buffer, before[name]) for name, buffer in plain.buffers().items()), "nothing moves here"


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), random.getstate()


def rng_ends_where_one_forward_leaves_it(case: Case, way: str, size: int = 3) -> None:
    """Random numbers are drawn once a micro-batch, in order; the gradient is that of these draws; the next differ."""
    plain, job = made(case), made(case)
    _, targets = batch_of(case)
    sizes = [len(part) for part in torch.arange(N).tensor_split(-(-N // size))]
    losses = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            parts = [
                called(plain.model, rows_of(case, sum(sizes[:k]), sum(sizes[: k + 1]))[0]) for k in range(len(sizes))
            ]
            loss = loss_of(case, plain.loss_fn, torch.cat(parts), targets)
            loss.backward()
            end = states()
        assert_same(micro_batches(case, job, batch_of(case), way, size), left(plain, loss), case.tolerance)
        assert states() == end, "random numbers were drawn more than once, or not at all"
        losses.append(loss.item())
    assert losses[0] != losses[1], "the second batch got the first one's masks"


def no_gradient_where_none_belongs(case: Case, way: str, size: int = 3) -> None:
    """Unused and frozen parameters keep `grad is None`, and the others do not."""
    expected = whole_batch(case, made(case), batch_of(case))
    found = micro_batches(case, made(case), batch_of(case), way, size)
    without = {name for name, gradient in expected.gradients.items() if gradient is None}
    assert without and without == {name for name, gradient in found.gradients.items() if gradient is None}


def ignored_targets_are_finite(case: Case, way: str, ignored: int = -100, some: Sequence[int] = (0, 1, 2)) -> None:
    """A micro-batch without a target changes nothing; a batch without one gives loss 0 and a gradient of zeros."""

    def batch(rows: Sequence[int]) -> tuple[Any, Any]:
        inputs, targets = batch_of(case)
        targets = targets.clone()
        targets[list(rows)] = ignored
        return inputs, targets

    expected = whole_batch(case, made(case), batch(some))
    for size in (1, 3):
        assert_same(micro_batches(case, made(case), batch(some), way, size), expected, case.tolerance)
    for size in (1, 3, N):
        found = micro_batches(case, made(case), batch(range(N)), way, size)
        assert found.loss.item() == 0.0, f"the loss is {found.loss.item()}"
        assert all(g is None or not g.to_dense().any() for g in found.gradients.values()), "a gradient out of nothing"


def no_samples_is_no_error(case: Case, way: str) -> None:
    """Zero samples: loss 0, no gradient, a report that says so."""
    job = made(case)
    door = accumulator(case, job, way, 3)
    loss = door.backward(*rows_of(case, 0, 0))
    assert loss.item() == 0.0 and loss.dim() == 0
    assert all(parameter.grad is None for parameter in job.parameters().values())
    assert (door.report.samples, door.report.micro_batches) == (0, 0)


def peak_is_one_micro_batch(case: Case, way: str, size: int, ratio: float = 1.15) -> None:
    """Counted bytes: at most `ratio` times one micro-batch's own forward and backward, and the outputs."""

    def peak(work: Callable[[], object]) -> int:
        with Live() as live:
            work()
        return live.peak_bytes

    one, batch, job = rows_of(case, 0, size), batch_of(case), made(case)
    plain = made(case)
    alone = peak(lambda: whole_batch(case, plain, one).loss)
    with torch.no_grad():
        outputs = called(job.model, batch[0])
    # Gradients of the joined outputs are as large as the outputs, and the loss keeps its own copy of them.
    allowed = ratio * alone + 3 * outputs.untyped_storage().nbytes()
    found = peak(lambda: micro_batches(case, job, batch, way, size).loss)
    assert found <= allowed, f"{found} bytes at the worst moment, {allowed:.0f} allowed, {alone} for one micro-batch"


class Failure(RuntimeError):
    """The error that a law plants."""


def failing_at(k: int, where: str) -> Callable[..., Any]:
    """A forward hook that raises in the k-th forward, or lets the k-th backward raise."""
    calls = [0]

    def fail(*_: Any) -> None:
        raise Failure(f"{where} of micro-batch {k}")

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == k and where == "forward":
            fail()
        if calls[0] == k and output.requires_grad:
            output = output.clone()
            output.register_hook(fail)
        return output

    return hook


def an_error_leaves_everything_as_it_was(case: Case, way: str, where: str, k: int, held: bool, size: int = 3) -> None:
    """Every `.grad` and every buffer: the same tensors with the same values, and the door works again afterwards."""
    job = made(case)
    for parameter in job.parameters().values():
        parameter.grad = torch.full_like(parameter, 2.0) if held and parameter.requires_grad else None
    gradients = {name: p.grad for name, p in job.parameters().items()}
    values = {name: None if g is None else g.clone() for name, g in gradients.items()}
    buffers = dict(job.model.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    handle = job.model.register_forward_hook(failing_at(k, where))
    try:
        micro_batches(case, job, batch_of(case), way, size)
    except Failure:
        pass
    else:
        raise AssertionError("the planted error did not come through")
    handle.remove()
    for name, parameter in job.parameters().items():
        assert parameter.grad is gradients[name], f"{name}.grad is another tensor"
        assert parameter.grad is None or torch.equal(parameter.grad, values[name]), f"{name}.grad has changed"
    for name, buffer in job.model.named_buffers():
        assert buffer is buffers[name] and torch.equal(buffer, before[name]), f"{name} has moved"
    for parameter in job.parameters().values():
        parameter.grad = None
    expected = whole_batch(case, made(case), batch_of(case))
    assert_same(micro_batches(case, job, batch_of(case), way, size), expected, case.tolerance)


class Witness(nn.Module):
    """Notes which samples each field of a micro-batch holds."""

    def __init__(self, readers: Mapping[str, Callable[[Any], list[int]] | None]) -> None:
        super().__init__()
        self.weight, self.readers = nn.Parameter(torch.ones(())), readers
        self.seen: list[dict[str, Any]] = []

    def forward(self, **fields: Any) -> Tensor:
        self.seen.append({name: read(fields[name]) if read else fields[name] for name, read in self.readers.items()})
        numbers = [self.seen[-1][name] for name, read in self.readers.items() if read]
        return self.weight * torch.tensor(numbers[0] if numbers else 0.0)


def fields_are_cut_together(
    fields: Mapping[str, Any], readers: Mapping[str, Callable[[Any], list[int]] | None], split: Any = None
) -> None:
    """Sample i of every field, numbered by `readers`, meets sample i of every other; shared fields stay whole."""
    for size in (1, 2, 3, N):
        model = Witness(readers)
        Accumulator(model, lambda o, t: o.sum(), reduction="sum", micro_batch_size=size, split=split).backward(fields)
        cut = [name for name, read in readers.items() if read]
        for name in cut:
            assert [i for seen in model.seen for i in seen[name]] == list(range(N)), f"{name} lost its order"
            assert all(seen[name] == seen[cut[0]] for seen in model.seen), f"{name} has other borders than {cut[0]}"
        for name in readers.keys() - set(cut):
            assert all(seen[name] is fields[name] or seen[name] == fields[name] for seen in model.seen), name


def a_doubtful_field_is_refused(fields: Mapping[str, Any], name: str, split: Any = None) -> None:
    """The error names the field, and no micro-batch has run."""
    model = Witness(dict.fromkeys(fields))
    try:
        Accumulator(model, lambda o, t: o.sum(), reduction="sum", micro_batch_size=3, split=split).backward(fields)
    except SplitError as error:
        assert name in str(error), f"{name} is not named: {error}"
    else:
        raise AssertionError(f"{name} was cut in silence")
    assert model.seen == [] and model.weight.grad is None
