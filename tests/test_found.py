"""Uses in which a door was found to be silently wrong, to leak, or to fail where plain PyTorch does not."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import bigbatch
from bigbatch import Accumulator, BigBatchError, MicroBatched
from bigbatch.core.live import Live
from bigbatch.windows import Window

pytestmark = pytest.mark.filterwarnings("ignore")
DOUBLE = torch.float64
DOORS = ["accumulator", "recompute", "offload", "keep"]


def inputs() -> Tensor:
    return torch.randn(10, 6, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


TARGETS = torch.tensor([0, 3, 1, 2, 0, 2, 2, 1, 3, 0])


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def unknown(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def built(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind().double()


def through(door: str, model: nn.Module, loss_fn: Any = unknown) -> None:
    if door == "accumulator":
        Accumulator(model, loss_fn, micro_batch_size=3).backward(inputs(), TARGETS)
    else:
        loss_fn(MicroBatched(model, 3, activations=door)(inputs()), TARGETS).backward()


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-11, atol=1e-13)


class OwnGenerator(nn.Module):
    """Draws its noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(6, 4), torch.Generator().manual_seed(0)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows) * torch.rand(len(rows), 4, generator=self.generator, dtype=DOUBLE)


@pytest.mark.parametrize("door", ["accumulator", "recompute"])
def test_a_second_forward_draws_the_same_numbers_from_a_generator_of_the_models_own(door: str) -> None:
    """Recomputation replays the generators that modules hold, or refuses them by name."""
    ours, whole = built(OwnGenerator), built(OwnGenerator)
    unknown(whole(inputs()), TARGETS).backward()
    try:
        through(door, ours)
    except BigBatchError:
        return
    assert_same(gradients(ours), gradients(whole))


class Balanced(nn.Module):
    """A routed layer that leaves its load-balance term behind as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, rows: Tensor) -> Tensor:
        shares = self.router(rows).softmax(-1)
        self.balance = shares.mean(0).square().sum()
        return self.layer(rows) * shares[:, :1]


@pytest.mark.parametrize("door", DOORS)
def test_a_term_left_on_the_model_by_the_last_micro_batch_is_refused_or_right(door: str) -> None:
    """A loss that reads an attribute which a forward left behind gets the whole batch's, or a refusal."""
    ours, whole = built(Balanced), built(Balanced)
    (unknown(whole(inputs()), TARGETS) + whole.balance).backward()
    try:
        through(door, ours, lambda outputs, targets: unknown(outputs, targets) + ours.balance)
    except BigBatchError:
        return
    assert_same(gradients(ours), gradients(whole))


@pytest.mark.parametrize(("name", "value"), [("label_smoothing", 0.3), ("ignore_index", 2), ("reduction", "sum")])
def test_an_option_of_the_loss_that_changes_later_is_followed(name: str, value: Any) -> None:
    """An option set on the loss after the Accumulator was built is used from then on."""
    ours, whole, loss_fn = layers(), layers(), nn.CrossEntropyLoss()
    accumulator = Accumulator(ours, loss_fn, micro_batch_size=3)
    setattr(loss_fn, name, value)
    loss_fn(whole(inputs()), TARGETS).backward()
    try:
        accumulator.backward(inputs(), TARGETS)
    except BigBatchError:
        return
    assert_same(gradients(ours), gradients(whole))


@pytest.mark.parametrize("door", ["recompute", "offload", "keep"])
def test_inputs_written_to_before_the_backward_raise(door: str) -> None:
    """Overwriting the batch between forward and backward raises, as plain PyTorch does, or changes nothing."""
    ours, whole, rows = layers(), layers(), inputs()
    unknown(whole(inputs()), TARGETS).backward()
    outputs = MicroBatched(ours, 3, activations=door)(rows)
    rows.zero_()
    try:
        unknown(outputs, TARGETS).backward()
    except (BigBatchError, RuntimeError):
        return
    assert_same(gradients(ours), gradients(whole))


class ModeTold(nn.Module):
    """Computes something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.tanh(self.layer(rows) * (2.0 if self.training else 1.0))


def test_eval_between_forward_and_backward_does_not_change_the_gradient() -> None:
    """A second forward runs in the mode of the first one."""
    ours, whole = built(ModeTold), built(ModeTold)
    unknown(whole(inputs()), TARGETS).backward()
    outputs = MicroBatched(ours, 3)(inputs())
    ours.eval()
    try:
        unknown(outputs, TARGETS).backward()
    except BigBatchError:
        return
    assert_same(gradients(ours), gradients(whole))


class Observed(nn.Module):
    """Holds an observer of quantisation, whose buffers begin at plus and minus infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.observer = nn.Linear(6, 4), MovingAverageMinMaxObserver()

    def forward(self, rows: Tensor) -> Tensor:
        return self.observer(self.layer(rows))


class RebuiltMask(nn.Module):
    """Builds its mask of minus infinities again in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mask", self.built())

    def built(self) -> Tensor:
        return torch.full((4, 4), -torch.inf, dtype=DOUBLE).triu(1)

    def forward(self, rows: Tensor) -> Tensor:
        self.mask = self.built()
        return self.layer(rows) + self.mask[-1]


@pytest.mark.parametrize("door", ["accumulator", "keep"])
@pytest.mark.parametrize("kind", [Observed, RebuiltMask])
def test_infinite_buffers_do_not_become_nan(kind: Any, door: str) -> None:
    """A buffer that is infinite before or after a forward is never turned into NaN by averaging its moves."""
    model = built(kind)
    through(door, model)
    assert not any(buffer.isnan().any() for buffer in model.buffers())


class Counting(nn.Module):
    """Counts its samples in whole numbers, as expert loads and pointers of queues do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += len(rows)
        return self.layer(rows)


def test_a_whole_number_that_moves_differently_in_each_micro_batch_is_refused_or_right() -> None:
    """A counter of samples ends at the number of samples, or is refused; 10 samples are cut 3, 3, 2, 2."""
    model = built(Counting)
    try:
        through("accumulator", model)
    except BigBatchError:
        return
    assert int(model.seen) == 10


class ComplexMean(nn.Module):
    """Keeps a moving average of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4, dtype=torch.complex128))

    def forward(self, rows: Tensor) -> Tensor:
        outputs = self.layer(rows)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * torch.complex(outputs, -outputs).mean(0))
        return outputs


def test_complex_moving_averages_are_averaged() -> None:
    """A complex buffer moves as a real one does: once, by the average over micro-batches."""
    ours, whole = ComplexMean(), ComplexMean()
    ours.layer.double(), whole.layer.double()
    whole.load_state_dict(ours.state_dict())
    whole(inputs())
    through("accumulator", ours)
    torch.testing.assert_close(ours.mean, whole.mean)


class Hidden(nn.Module):
    """Hides a layer from `modules()` in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.hidden = nn.Linear(6, 4), [nn.BatchNorm1d(4).double()]

    def forward(self, rows: Tensor) -> Tensor:
        return self.hidden[0](self.layer(rows))


@pytest.mark.parametrize("door", ["accumulator", "keep"])
def test_batch_norm_hidden_in_a_list_sees_the_whole_batch(door: str) -> None:
    """A module in a plain attribute of a module counts among the modules."""
    ours, whole = built(Hidden), built(Hidden)
    unknown(whole(inputs()), TARGETS).backward()
    through(door, ours)
    assert_same(gradients(ours), gradients(whole))
    assert_same(list(ours.hidden[0].buffers()), list(whole.hidden[0].buffers()))


def test_a_loader_that_reuses_its_buffer_is_refused_or_right() -> None:
    """A window whose micro-batches are one buffer, filled again each time, is not run on the last content K times."""
    rows, buffer, ours, whole = inputs(), torch.empty(5, 6, dtype=DOUBLE), layers(), layers()
    unknown(whole(rows), TARGETS).backward()

    def loader() -> Iterator[tuple[Tensor, Tensor]]:
        for first in (0, 5):
            yield buffer.copy_(rows[first : first + 5]), TARGETS[first : first + 5]

    try:
        for window in bigbatch.windows(loader(), 2):
            Accumulator(ours, nn.CrossEntropyLoss()).backward(window)
    except BigBatchError:
        return
    assert_same(gradients(ours), gradients(whole))


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), unknown])
def test_on_outputs_may_write_to_what_it_is_shown(loss_fn: Any) -> None:
    """A metric that works in place does not change the loss."""
    model = layers()
    wanted = loss_fn(model(inputs()), TARGETS)
    accumulator = Accumulator(model, loss_fn, micro_batch_size=3)
    found = accumulator.backward(inputs(), TARGETS, on_outputs=lambda outputs, _: outputs.sigmoid_())
    torch.testing.assert_close(found, wanted.detach())


@pytest.mark.parametrize("options", [{"activations": "offload"}, {"keep_bytes": "1MiB"}])
def test_outputs_dropped_without_a_backward_leave_nothing_alive(options: Any) -> None:
    """A graph that is thrown away (evaluation with gradients, an error) frees its activations."""
    model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 4)).double()
    with Live() as live:
        for _ in range(3):
            outputs = MicroBatched(model, 3, **options)(inputs())
            del outputs
        gc.collect()
    assert live.live_bytes == 0


def test_moving_or_training_the_wrapper_gives_the_wrapper_back() -> None:
    """`model = MicroBatched(model).to(device)` and `.train()` stay micro-batched."""
    wrapper = MicroBatched(layers(), 3)
    assert wrapper.to("cpu") is wrapper
    assert wrapper.train() is wrapper


def test_targets_that_are_broadcast_do_not_hide_the_number_of_elements() -> None:
    """A mean over elements is weighed by the elements of the loss, also where targets of shape (N, 1) are broadcast."""
    layer = nn.Linear(6, 1).double()
    short, long = (torch.randn(4, steps, 6, dtype=DOUBLE) for steps in (3, 9))
    goals = torch.randn(4, 1, dtype=DOUBLE)
    with torch.no_grad():
        parts = [F.mse_loss(layer(rows)[..., 0], goals, reduction="sum") for rows in (short, long)]
    try:
        found = Accumulator(lambda rows: layer(rows)[..., 0], nn.MSELoss()).backward(
            Window(((short, goals), (long, goals)), last=True)
        )
    except BigBatchError:
        return
    torch.testing.assert_close(found, sum(parts) / 48)


def test_a_hook_that_fails_after_the_window_leaves_gradients_as_they_were() -> None:
    """Every .grad is as before the call after an error in a post-accumulate hook too."""
    model = layers()
    accumulator = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    accumulator.backward(inputs(), TARGETS)
    before = [gradient.clone() for gradient in gradients(model)]

    def fail(_: Tensor) -> None:
        raise RuntimeError("a hook of the user's")

    next(model.parameters()).register_post_accumulate_grad_hook(fail)
    with pytest.raises(RuntimeError):
        accumulator.backward(inputs(), TARGETS)
    assert_same(gradients(model), before)


def test_an_error_takes_back_gradients_of_loose_parameters_and_inputs() -> None:
    """A parameter that only the loss's closure holds has no half gradient after an error."""
    factor, calls = nn.Parameter(torch.tensor(0.5, dtype=DOUBLE)), []

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return F.cross_entropy(outputs * factor, targets)

    with pytest.raises(RuntimeError):
        Accumulator(layers(), loss_fn, micro_batch_size=3, reduction="mean").backward(inputs(), TARGETS)
    assert factor.grad is None


class WritesToInputs(nn.Module):
    """Returns its own loss and normalises its inputs in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, rows: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.layer(rows.mul_(0.5)), labels)


def test_questions_to_a_model_with_its_own_loss_leave_the_batch_alone() -> None:
    """Asking the model for its denominator does not write to the user's batch."""
    ours, whole, rows = built(WritesToInputs), built(WritesToInputs), inputs()
    whole(inputs(), TARGETS).backward()
    Accumulator(ours, None, micro_batch_size=3).backward({"rows": rows, "labels": TARGETS})
    assert torch.equal(rows, inputs() * 0.5)
    assert_same(gradients(ours), gradients(whole))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Linear(3, 5), nn.LSTM(5, 7), nn.Linear(7, 4)

    def forward(self, packed: PackedSequence) -> Tensor:
        return self.head(self.cell(packed)[1][0][-1])


def test_a_graph_in_front_of_packed_sequences_is_run_backward_once() -> None:
    """Sequences packed from embeddings that require a gradient work as a tensor does."""
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(steps, 3, generator=generator, dtype=DOUBLE) for steps in (2, 7, 1, 4, 4, 6, 3, 5, 2, 1)]
    ours, whole = built(Recurrent), built(Recurrent)
    for model in (ours, whole):
        packed = pack_sequence([model.embedding(row) for row in rows], enforce_sorted=False)
        if model is whole:
            unknown(model(packed), TARGETS).backward()
        else:
            Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(packed, TARGETS)
    assert_same(gradients(ours), gradients(whole))


def test_lazy_layers_are_made_by_the_first_micro_batch() -> None:
    """A model with lazy layers runs through MicroBatched, or is refused with a plain word."""
    try:
        outputs = MicroBatched(nn.LazyLinear(4).double(), 3)(inputs())
    except BigBatchError:
        return
    assert outputs.shape == (10, 4)


def test_a_count_may_be_a_number_of_numpy() -> None:
    """A count function may return a whole number of NumPy's."""
    accumulator = Accumulator(
        layers(),
        lambda outputs, targets, count: F.cross_entropy(outputs, targets, reduction="sum") / count,
        micro_batch_size=3,
        reduction=lambda _, targets: numpy.int64(len(targets)),
    )
    torch.testing.assert_close(accumulator.backward(inputs(), TARGETS), unknown(layers()(inputs()), TARGETS).detach())


def test_verify_sees_a_second_forward_draw_other_numbers() -> None:
    """A wrapper that gives another gradient than the whole batch, by a generator of the model's own, is not equal."""
    ours, whole = built(OwnGenerator), built(OwnGenerator)
    through("recompute", ours)
    unknown(whole(inputs()), TARGETS).backward()
    pairs = zip(gradients(ours), gradients(whole), strict=True)
    same = all(torch.allclose(left, right) for left, right in pairs)
    assert bigbatch.verify(MicroBatched(built(OwnGenerator), 3), unknown, inputs(), TARGETS).equal == same


def test_verify_leaves_a_loose_temperature_alone() -> None:
    """A tensor that only the loss's closure holds is run as a copy: its .grad is not the proof's."""
    temperature = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)
    bigbatch.verify(
        layers(), lambda outputs, targets: F.cross_entropy(outputs / temperature, targets), inputs(), TARGETS
    )
    assert temperature.grad is None


def test_verify_judges_the_gradient_of_a_loose_temperature() -> None:
    """A loop that gives the temperature K times its gradient, and the model the right one, is not equal."""
    temperature = torch.tensor(0.5, dtype=DOUBLE, requires_grad=True)

    def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs / temperature, targets)

    def loop(model: nn.Module, rows: Tensor, targets: Tensor) -> None:
        F.cross_entropy(model(rows) / temperature.detach(), targets).backward()

    assert not bigbatch.verify(layers(), loss_fn, inputs(), TARGETS, run=loop).equal
