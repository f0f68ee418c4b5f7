"""Peak memory of one way to run a batch, at any micro-batch size, from one step at two small sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.core.held import held
from bigbatch.core.live import dense_parts
from bigbatch.core.models import inner_modules, parameters_of
from bigbatch.core.rules import rule_for
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.tree import tensors_of
from bigbatch.engines.blocks import repeated_blocks
from bigbatch.planner.curves import Curve, Kinds, curve, on_device_bytes
from bigbatch.planner.fixed import BUFFERS, Fixed, fixed_of
from bigbatch.planner.ledger import ACTIVATIONS, GRADIENTS, HOST, TEMPORARY, Ledger
from bigbatch.planner.records import Way
from bigbatch.planner.scratch import Scratch
from bigbatch.planner.stand_ins import refuse_lazy
from bigbatch.planner.trace import Job, measured, traced

INPUTS = "inputs"
FEW = (2, 4)  # samples of the micro-batches that are run: batch norm refuses one alone
MORE = (16, 32)  # of small samples, which cost little: an operator's scratch space is a line from a few samples on
SMALL = 20_000  # elements
SAMPLES = 4  # of the user's batch, which are repeated


Part = Callable[[int, int], Kinds]
Windows = Mapping[tuple[int, int], Ledger]


@dataclass(frozen=True)
class Peak:
    """The worst moment of an update: bytes on the device by kind, and the most bytes on the host."""

    kinds: Mapping[str, int]
    host_bytes: int

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Prediction:
    """The memory of one way to run a batch.

    Attributes:
        way: how it is run.
        fixed: what is held whatever the size.
        parts: the parts of a window.
        sample_bytes: bytes of one sample's inputs and targets.
        batch_there: whether the whole batch lies on the device, and not only the micro-batches at hand.
        flops: floating-point operations for one sample.
        how: "fake tensors", or "measured" and why.
        checkpoints: blocks of a forward that are checkpointed.
        state_bytes: what each of them keeps of the random numbers' state, which no operator makes.
        gradient_share: what this rank holds of the gradients.
    """

    way: Way
    fixed: Fixed
    parts: Sequence[Part]
    sample_bytes: float
    batch_there: bool
    flops: float
    how: str
    checkpoints: int = 0
    state_bytes: int = 0
    gradient_share: float = 1.0

    def at(self, micro_batch_size: int, micro_batches: int) -> Peak:
        """The worst moment of an update with so many micro-batches of so many samples."""
        here = micro_batches if self.batch_there else min(2, micro_batches)
        lent = micro_batches if self.way.engine == "lockstep" else 1  # each micro-batch has buffers of its own
        always = {**self.fixed.to_dict(), GRADIENTS: 0, INPUTS: here * micro_batch_size * self.sample_bytes}
        always[BUFFERS] *= 1 + lent
        step: Kinds = {GRADIENTS: self.fixed.gradients, TEMPORARY: self.fixed.step}
        states = self.checkpoints + (micro_batches if self.way.activations == "recompute" else 0)
        kept = {ACTIVATIONS: states * self.state_bytes}
        window = [together(self._named(part(micro_batch_size, micro_batches)), kept) for part in self.parts]
        moments = [together(always, moment) for moment in (*window, step)]
        host = max(moment.get(HOST, 0.0) for moment in moments)
        worst = max(moments, key=on_device_bytes)
        return Peak({kind: round(size) for kind, size in worst.items() if kind != HOST}, round(host) + self.fixed.host)

    def _named(self, kinds: Kinds) -> Kinds:
        """Sums that are on their way to `.grad`, in one backward through all micro-batches, are gradients too."""
        gradients, temporary = kinds.get(GRADIENTS, 0.0) * self.gradient_share, kinds.get(TEMPORARY, 0.0)
        summed = max(0.0, min(temporary, self.fixed.gradients - gradients)) if self.way.engine != "sequential" else 0.0
        return {**kinds, GRADIENTS: gradients + summed, TEMPORARY: temporary - summed}


def together(*parts: Kinds) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for part in parts:
        for kind, size in part.items():
            found[kind] += size
    return dict(found)


def job_of(
    model: Callable[..., Any],
    loss_fn: Callable[..., Tensor] | None,
    inputs: Any,
    targets: Any,
    optimizer: Any = None,
    reduction: str | Callable[..., Any] = "auto",
    split: Any = None,
) -> Job:
    """What is to be run, with a few samples of the user's batch.

    Args:
        model: a module or a function.
        loss_fn: None where the model returns its own loss.
        inputs: at least one sample.
        targets: what belongs to them.
        optimizer: an optimizer, or a function of the parameters that makes one; None where there is none.
        reduction: as in `Accumulator`.
        split: as in `Accumulator`.
    """
    inner = inner_modules(held({"model": model, "loss_fn": loss_fn}).modules.values())
    refuse_lazy(inner)
    singles = Splitter(split).pieces(inputs, targets, 1)[:SAMPLES]
    return Job(model, loss_fn, inner, singles, optimizer, rule_for(model, loss_fn, reduction))


def predicted(job: Job, way: Way, fixed: Fixed | None = None, scratch: Scratch | None = None) -> Prediction:
    """The prediction for one way.

    Args:
        job: what is run.
        way: how.
        fixed: as from `fixed_of`, where it is known already.
        scratch: what is known of operators already.
    """
    device = device_of(job)
    scratch = scratch or Scratch(None if device.type == "meta" else device)
    try:
        small = scratch.device is not None and elements(job) <= SMALL
        windows = windows_of(job, way, MORE if small else FEW, partial(traced, job, way, scratch=scratch))
        how = "fake tensors"
    except Exception as error:
        if device.type == "meta":
            raise
        windows = windows_of(job, way, FEW, partial(measured, job, way, scratch=scratch))
        how = f"measured on {FEW[0]} and {FEW[1]} samples: fake tensors do not do ({type(error).__name__})"
    size, count = next(iter(windows))
    fixed = fixed or fixed_of(job)
    return Prediction(
        way,
        fixed,
        parts_of(job, windows, fixed.gathered),
        sample_bytes=sum(sample_bytes(single) for single in job.singles) / len(job.singles),
        batch_there=device.type == "cpu" or way.engine == "lockstep",
        flops=windows[size, count].flops / (size * count),
        how=how,
        checkpoints=len(repeated_blocks(job.inner)) if way.checkpoint else 0,
        state_bytes=torch.get_rng_state().nbytes if device.type == "cpu" else 0,
    )


def elements(job: Job) -> int:
    """Of the largest field of a sample."""
    return max((tensor.numel() for tensor in tensors_of((job.singles[0].inputs, job.singles[0].targets))), default=0)


def windows_of(job: Job, way: Way, sizes: tuple[int, int], trace: Callable[[int, int], Ledger]) -> Windows:
    """Windows of few micro-batches of few samples: one, or two and three where every further one adds to them.

    A loss may compare each sample with each other: it is a parabola in the samples that it sees.
    """
    if way.engine == "sequential":
        return {(size, 1): trace(size, 1) for size in (sizes if job.adds_up else (*sizes, 2 * sizes[1]))}
    return {(size, count): trace(size, count) for count in (2, 3) for size in sizes}


def parts_of(job: Job, windows: Windows, gathered: int) -> list[Part]:
    """The parts of a window, and what is held in each at its worst moment; gradients gather in so many bytes."""
    one, two, three = ({size: window for (size, many), window in windows.items() if many == n} for n in (1, 2, 3))
    if one and job.adds_up:
        return [partial(of_sequence, curve(one, range(2)), curve(one, range(2), again=True), gathered)]
    # What is larger than a line lies in the loss; what operators take for themselves is none, so it has two points.
    least = min(size for size, _ in windows)
    whole = {size * n: window for (size, n), window in windows.items() if (size, n) != (least, 3)}
    alone = {size: window for size, window in one.items() if size <= 2 * least}
    parts: list[Part] = []
    for k, (name, _) in enumerate((one or two)[least].phases[:-1]):
        phase = range(k, k + 1)
        if "loss" in name:
            parts.append(partial(of_batch, curve(whole, phase)))
        elif one:
            parts.append(partial(of_batch, curve(alone, phase)))
        else:
            parts.append(partial(of_window, curve(two, phase), curve(three, phase)))
    return parts


def of_sequence(first: Curve, again: Curve, gathered: int, micro_batch_size: int, micro_batches: int) -> Kinds:
    """The second micro-batch finds gradients, and every further one finds the same."""
    alone = first.worst(micro_batch_size)
    if micro_batches == 1:
        return alone
    later = together(again.worst(micro_batch_size), {GRADIENTS: gathered})
    return max((alone, later), key=on_device_bytes)


def side_by_side(whole: Prediction, way: Way) -> Prediction:
    """Micro-batches that together hold what the whole batch would."""
    return replace(whole, way=way, parts=[partial(at_once, part) for part in whole.parts])


def at_once(part: Part, micro_batch_size: int, micro_batches: int) -> Kinds:
    return part(micro_batch_size * micro_batches, 1)


def of_batch(whole: Curve, micro_batch_size: int, micro_batches: int) -> Kinds:
    return whole.worst(micro_batch_size * micro_batches)


def of_window(two: Curve, three: Curve, micro_batch_size: int, micro_batches: int) -> Kinds:
    """Every micro-batch beyond the second adds what the third one adds."""
    less, more = unsplit(two.worst(micro_batch_size)), unsplit(three.worst(micro_batch_size))
    added = {k: (micro_batches - 2) * (more.get(k, 0.0) - less.get(k, 0.0)) for k in {*less, *more}}
    return {kind: max(0.0, less.get(kind, 0.0) + more_bytes) for kind, more_bytes in added.items()}


def unsplit(kinds: Kinds) -> Kinds:
    """Gradients among the temporary: in one backward through all micro-batches their sums are both, in turn."""
    return {**kinds, GRADIENTS: 0.0, TEMPORARY: kinds.get(TEMPORARY, 0.0) + kinds.get(GRADIENTS, 0.0)}


def sample_bytes(piece: Piece) -> int:
    """Bytes of inputs and targets, also where they are views of a larger batch."""
    parts = [part for tensor in tensors_of((piece.inputs, piece.targets)) for part in dense_parts(tensor)]
    return sum(part.numel() * part.element_size() for part in parts)


def device_of(job: Job) -> torch.device:
    return next((parameter.device for parameter in parameters_of(job.inner)), torch.device("cpu"))
