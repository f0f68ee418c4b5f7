"""Both doors on CUDA: the same gradients, no waiting for the device, and memory that the allocator confirms."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import bigbatch

pytestmark = pytest.mark.gpu


def deep(width: int = 512, layers: int = 24, dropout: float = 0.0) -> nn.Sequential:
    blocks = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))]
    return nn.Sequential(*blocks, nn.Linear(width, 16)).cuda()


def batch(samples: int, width: int = 512, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, width, dtype=dtype), torch.randint(0, 16, (samples,))


def gradient(model: nn.Module) -> Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


def peak(step: object, model: nn.Module) -> int:
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()  # type: ignore[operator]
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("activations", [None, "recompute", "offload", "keep"])
def test_a_batch_on_the_host_gives_the_whole_batch_gradient(activations: str | None) -> None:
    model, loss_fn = deep(64, 4).double(), nn.CrossEntropyLoss()
    inputs, targets = batch(50, 64, torch.float64)
    whole = copy.deepcopy(model)
    loss_fn(whole(inputs.cuda()), targets.cuda()).backward()
    if activations is None:
        bigbatch.Accumulator(model, loss_fn, micro_batch_size=8).backward(inputs, targets)
    else:
        loss_fn(bigbatch.MicroBatched(model, 8, activations=activations)(inputs), targets.cuda()).backward()
    assert (gradient(model) - gradient(whole)).norm() <= 1e-12 * gradient(whole).norm()


def test_recomputation_replays_the_masks_of_the_device() -> None:
    model = deep(64, 4, dropout=0.5).double()
    inputs, _ = batch(48, 64, torch.float64)
    gradients = []
    for activations in ("keep", "recompute"):
        model.zero_grad()
        torch.cuda.manual_seed(3)
        bigbatch.MicroBatched(model, 8, activations=activations)(inputs).sin().sum().backward()
        gradients.append(gradient(model))
    assert torch.equal(*gradients)


def test_a_step_does_not_wait_for_the_device() -> None:
    model, loss_fn = deep(64, 4), nn.CrossEntropyLoss()
    inputs, targets = (tensor.cuda() for tensor in batch(64, 64))
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=8)
    accumulator.backward(inputs, targets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = accumulator.backward(inputs, targets)
        with pytest.raises(RuntimeError):  # the check itself can fail
            loss.item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_allocator_confirms_the_memory_of_both_doors() -> None:
    model, loss_fn, size = deep(), nn.CrossEntropyLoss(), 1024
    inputs, targets = batch(16 * size)
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=size)
    wrapped = bigbatch.MicroBatched(model, size)
    on_device = targets.cuda()
    one = peak(lambda: loss_fn(model(inputs[:size].cuda()), on_device[:size]).backward(), model)
    allowed = 1.15 * (one + 16 * size * 16 * 4 + 2 * inputs[:size].nbytes)
    assert peak(lambda: accumulator.backward(inputs, targets), model) <= allowed
    assert peak(lambda: loss_fn(wrapped(inputs), on_device).backward(), model) <= allowed
    whole = peak(lambda: loss_fn(model(inputs.cuda()), on_device).backward(), model)
    assert whole > 4 * allowed  # so the bound says something


def test_offloaded_activations_leave_the_device() -> None:
    model, size = deep(), 1024
    inputs, _ = batch(8 * size)
    kept = bigbatch.MicroBatched(model, size, activations="keep")
    offloaded = bigbatch.MicroBatched(model, size, activations="offload")
    there = peak(lambda: kept(inputs).sin().sum().backward(), model)
    away = peak(lambda: offloaded(inputs).sin().sum().backward(), model)
    assert away < there / 3


def test_autocast_with_a_scaler_on_the_device() -> None:
    model, loss_fn = deep(64, 4), nn.CrossEntropyLoss()
    inputs, targets = batch(48, 64)
    whole = copy.deepcopy(model)
    with torch.autocast("cuda", torch.float16):
        loss_fn(whole(inputs.cuda()), targets.cuda()).backward()
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=16, autocast=torch.float16, scaler=scaler)
    accumulator.backward(inputs, targets)
    scaler.unscale_(optimizer)
    assert (gradient(model) - gradient(whole)).norm() <= 2e-2 * gradient(whole).norm()


def convolutional(layers: int = 8, width: int = 64) -> nn.Sequential:
    blocks = [
        layer
        for _ in range(layers)
        for layer in (nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
    ]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 16))
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head).cuda()


@pytest.mark.parametrize("activations", ["offload", "keep"])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batch_norm_over_the_whole_batch(activations: str, memory_format: torch.memory_format) -> None:
    model, loss_fn = convolutional(3, 16).double().to(memory_format=memory_format), nn.CrossEntropyLoss()
    images = torch.randn(24, 3, 48, 48, dtype=torch.float64).to(memory_format=memory_format)
    targets, whole = torch.randint(0, 16, (24,)), copy.deepcopy(model)
    loss_fn(whole(images.cuda()), targets.cuda()).backward()
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    bigbatch.Accumulator(first, loss_fn, micro_batch_size=5, activations=activations).backward(images, targets)
    loss_fn(bigbatch.MicroBatched(second, 5, activations=activations)(images), targets.cuda()).backward()
    for ours in (first, second):
        assert (gradient(ours) - gradient(whole)).norm() <= 1e-10 * gradient(whole).norm()
        for moved, expected in zip(ours.buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(moved, expected, rtol=1e-12, atol=1e-12)


def test_a_batch_norm_step_does_not_wait_for_the_device() -> None:
    model, loss_fn = convolutional(2, 16), nn.CrossEntropyLoss()
    images, targets = torch.randn(16, 3, 32, 32, device="cuda"), torch.randint(0, 16, (16,), device="cuda")
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=4)
    accumulator.backward(images, targets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        accumulator.backward(images, targets)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_batch_norm_holds_the_frontier_and_not_the_depth() -> None:
    model, loss_fn = convolutional(16), nn.CrossEntropyLoss()
    images, targets = torch.randn(64, 3, 64, 64), torch.randint(0, 16, (64,))
    accumulator = bigbatch.Accumulator(model, loss_fn, micro_batch_size=4)
    accumulator.backward(images, targets)
    ours = peak(lambda: accumulator.backward(images, targets), model)
    whole = peak(lambda: loss_fn(model(images.cuda()), targets.cuda()).backward(), model)
    assert ours <= whole / 4
