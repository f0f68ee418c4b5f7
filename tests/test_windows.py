"""A loader's micro-batches become windows, and a window's gradient is that of one batch four times larger."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bigbatch import Accumulator, windows
from bigbatch.errors import OptionError
from bigbatch.windows import Window


@given(items=st.integers(0, 25), steps=st.integers(1, 9))
def test_every_item_once_in_order_and_only_the_last_window_is_short(items: int, steps: int) -> None:
    found = list(windows(range(items), accum_steps=steps))
    assert [item for window in found for item in window] == list(range(items))
    assert all(len(window) == steps for window in found[:-1]) and all(
        1 <= len(window) <= steps for window in found[-1:]
    )
    assert [window.last for window in found] == [False] * (len(found) - 1) + [True] * bool(found)
    assert len(windows(range(items), accum_steps=steps)) == len(found)


def test_a_dropped_tail_is_caught() -> None:
    found = [window for window in windows(range(10), accum_steps=4) if len(window) == 4]
    assert [item for window in found for item in window] != list(range(10))


def test_a_generator_is_read_one_item_ahead_and_no_further() -> None:
    read: list[int] = []

    def stream() -> Iterator[int]:
        for i in range(6):
            read.append(i)
            yield i

    iterator = iter(windows(stream(), accum_steps=2))
    assert read == []
    for window in range(2):
        assert next(iterator).micro_batches == (2 * window, 2 * window + 1)
        assert read == list(range(2 * window + 3))
    assert next(iterator) == Window((4, 5), last=True)  # known to be the last without len()
    assert list(iterator) == []


def test_no_length_is_needed() -> None:
    found = windows((i for i in range(5)), accum_steps=3)
    with pytest.raises(TypeError):
        len(found)
    assert [len(window) for window in found] == [3, 2]

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(7)

    assert [len(window) for window in windows(DataLoader(Stream(), batch_size=2), accum_steps=3)] == [3, 1]


def test_one_pass_for_every_epoch_draws_anew() -> None:
    data = TensorDataset(torch.arange(12))
    loader = DataLoader(data, batch_size=2, shuffle=True)
    batches = windows(loader, accum_steps=4)
    epochs = [torch.cat([item[0] for window in batches for item in window]) for _ in range(2)]
    assert len(batches) == 2 and not torch.equal(*epochs) and torch.equal(epochs[0].sort()[0], epochs[1].sort()[0])


def test_leaving_early_and_an_empty_loader() -> None:
    assert list(windows([], accum_steps=4)) == []
    for window in windows(range(100), accum_steps=4):
        assert window.micro_batches == (0, 1, 2, 3)
        break


@pytest.mark.parametrize("steps", [0, -1, 1.5, "4", True, None])
def test_steps_that_count_nothing_are_refused(steps: Any) -> None:
    with pytest.raises(OptionError, match=f"accum_steps={steps!r}"):
        windows([], accum_steps=steps)


def lesson(model: nn.Module, loader: Any, accum_steps: int) -> list[Tensor]:
    """The loop that lessons show: the loss divided, one step and one zero_grad a cycle."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, (rows, labels) in enumerate(loader):
        (F.cross_entropy(model(rows), labels) / accum_steps).backward()
        if (step + 1) % accum_steps == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def ours(model: nn.Module, loader: Any, accum_steps: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulator = Accumulator(model, nn.CrossEntropyLoss())
    for window in windows(loader, accum_steps=accum_steps):
        accumulator.backward(window)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def model_and_loader(samples: int, size: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    data = TensorDataset(torch.randn(samples, 5, dtype=torch.float64), torch.randint(0, 3, (samples,)))
    return model, DataLoader(data, batch_size=size)


def test_four_small_batches_equal_one_four_times_larger() -> None:
    by_lesson = lesson(*model_and_loader(64, 4), accum_steps=4)
    by_window = ours(*model_and_loader(64, 4), accum_steps=4)
    large = lesson(*model_and_loader(64, 16), accum_steps=1)
    torch.testing.assert_close(by_lesson, large, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(by_window, large, rtol=1e-12, atol=1e-14)


def test_the_partial_last_window_is_right_where_the_lesson_drops_it() -> None:
    large = lesson(*model_and_loader(58, 16), accum_steps=1)
    torch.testing.assert_close(ours(*model_and_loader(58, 4), accum_steps=4), large, rtol=1e-12, atol=1e-14)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(lesson(*model_and_loader(58, 4), accum_steps=4), large, rtol=1e-12, atol=1e-14)


def test_a_window_may_be_cut_further() -> None:
    model, loader = model_and_loader(14, 5)
    other = copy.deepcopy(model)
    (window,) = windows(loader, accum_steps=3)
    accumulator = Accumulator(model, nn.CrossEntropyLoss(), micro_batch_size=2)
    loss = accumulator.backward(window)
    whole = F.cross_entropy(other(loader.dataset.tensors[0]), loader.dataset.tensors[1])
    whole.backward()
    torch.testing.assert_close(loss, whole.detach(), rtol=1e-12, atol=0)
    for found, expected in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-15)
    assert (accumulator.report.samples, accumulator.report.micro_batches) == (14, 8)


def refilled(memory: str, items: int = 5) -> Iterator[Tensor]:
    """One buffer, filled again for every item in one of several ways."""
    buffer = torch.zeros(2)
    for i in range(items):
        if memory == "torch":
            yield buffer.fill_(i)
        elif memory == "views":
            buffer.fill_(i)
            yield buffer[:]
        else:
            buffer.numpy()[:] = i
            yield torch.from_numpy(buffer.numpy())


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("memory", ["torch", "views", "numpy"])
def test_a_loader_that_fills_one_buffer_again_is_refused(memory: str, steps: int) -> None:
    """Windows hold several items and the one behind them, so a second filling would change what was gathered."""
    with pytest.raises(OptionError, match="a window of micro-batches.*yield copies"):
        list(windows(refilled(memory), accum_steps=steps))
    found = list(windows((buffer.clone() for buffer in refilled(memory)), accum_steps=steps))
    assert [float(item[0]) for window in found for item in window] == [0, 1, 2, 3, 4]


def test_a_buffer_is_refused_inside_of_structures_and_in_the_item_ahead() -> None:
    def loader(buffers: int) -> Iterator[Any]:
        ring = [torch.zeros(2) for _ in range(buffers)]
        for i in range(6):
            yield {"rows": [ring[i % buffers].fill_(i), "text"]}, 3

    for buffers in (1, 2):  # the item ahead is the third one
        with pytest.raises(OptionError, match=r"shape \(2,\) was written to"):
            list(windows(loader(buffers), accum_steps=2))
    for k, window in enumerate(windows(loader(buffers=3), accum_steps=2)):
        assert [float(item[0]["rows"][0][0]) for item in window] == [2 * k, 2 * k + 1]


def test_one_unchanged_tensor_may_come_many_times() -> None:
    rows, array = torch.arange(8.0), torch.zeros(2).numpy()
    twice = torch.from_numpy(array), torch.from_numpy(array)  # inputs that are their own targets
    with torch.inference_mode():
        free = torch.zeros(2)
    for items in ([(rows, rows)] * 5, [rows[:4], rows[:4], rows[4:]], [twice] * 3, [free] * 3, [rows.to("meta")] * 3):
        assert sum(len(window) for window in windows(items, accum_steps=2)) == len(items)


def test_a_container_that_is_filled_again_keeps_what_was_yielded() -> None:
    def loader() -> Iterator[dict[str, Any]]:
        batch: dict[str, Any] = {}
        for i in range(5):
            batch["rows"] = torch.full((2,), i)
            yield batch

    found = list(windows(loader(), accum_steps=2))
    assert [int(item["rows"][0]) for window in found for item in window] == [0, 1, 2, 3, 4]
