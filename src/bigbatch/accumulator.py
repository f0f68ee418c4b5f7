"""Door 1: the loss adds up, so the batch is run micro-batch by micro-batch: g = Σ_k w_k ∇loss_k."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

from bigbatch.core import batch_norm as batch_norms
from bigbatch.core import models
from bigbatch.core.batch import Batch
from bigbatch.core.batch_norm import BatchNorm
from bigbatch.core.buffers import Buffers
from bigbatch.core.gradients import NOTHING, Border, added_at_once, once
from bigbatch.core.held import held
from bigbatch.core.own_loss import OwnLoss
from bigbatch.core.rules import RuleNow, refuse_plain_function
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.sums import check_grad_dtype
from bigbatch.engines import blocks, recompute
from bigbatch.engines.gradient import Items, OnOutputs, Task
from bigbatch.engines.randomness import MODES, Randomness
from bigbatch.fit.need import Place, need_of
from bigbatch.fit.sizer import Shown, Sizer, check_auto
from bigbatch.terms import StepReport
from bigbatch.windows import in_a_row, items_of


class Accumulator:
    """Gives the gradient of the whole batch while one micro-batch at a time is in memory.

    Args:
        model: a module, or a plain function that returns the loss (then `loss_fn=None`, and `reduction` is stated).
        loss_fn: `loss_fn(outputs, targets)` returns a scalar. The losses of `torch.nn` and `torch.nn.functional` are
            known by their denominators. None: the model returns its own loss, as Hugging Face models do.
        micro_batch_size: samples in one micro-batch; None runs a batch in one piece and a window as delivered;
            "auto" goes down inside the batch at hand when memory runs out, up again later, and settles on the fastest
            size that fits. The gradient does not depend on it; which dropout masks are drawn does.
        memory: the budget of "auto", for weights, gradients, optimizer state and activations: bytes, "2GiB", or a
            fraction of the device as a float. It guides and refuses nothing. None: what CUDA has free; the CPU's all.
        reduction: "auto", "mean" (over samples), "sum", or `count(inputs, targets)`, the denominator of one
            micro-batch: a number, a 0-d tensor or a dict of them. The counts of the batch are summed before any
            forward and handed on: `loss_fn(outputs, targets, count)` divides its sums by them.
        batch_norm: "exact" lets batch norm in training mode see the whole batch, by running the forwards of all
            micro-batches side by side; "local" lets it see one micro-batch at a time, as plain accumulation does.
        activations: what becomes of activations until the backward. "offload" moves them to the host. "recompute"
            does something where the whole batch is needed at once: it throws them away until a second forward, for a
            loss that nobody can weigh, and offloads them for batch norm, which cannot be recomputed. "keep" leaves
            them.
        checkpoint: True: the model's repeated blocks keep only their inputs and run forward again in the backward.
            Hugging Face models are switched by their own switch.
        randomness: "by_sample" gives a sample the same random numbers (dropout masks, noise) whatever the split: they
            follow from one number a batch, the operator and the sample's place in the batch. "global" draws them
            from PyTorch's generators as they come.
        split: names of fields that all samples share, `{name: "shared" | "samples" | "fields"}`, or a function
            `split(inputs, targets, micro_batch_size)` that yields `(samples, inputs, targets)`.
        autocast: the dtype of `torch.autocast` around forward and loss; None leaves autocast as the caller set it.
        scaler: a `torch.amp.GradScaler`; gradients are multiplied by its scale, the returned loss is not.
        grad_dtype: None adds up gradients of bfloat16 and float16 parameters in float32, which takes 4 bytes a
            parameter until the call returns, and rounds the sum once to the parameter's dtype, which is what optimizers
            take. torch.float32 leaves the sum in `.grad` as it is, for an optimizer that has float32 weights of its
            own; plain backwards add to it in float32 from then on (`Tensor.grad_dtype`). torch.bfloat16 and
            torch.float16 add up in that dtype, as plain PyTorch does.
        modules: the modules behind a plain function, where they cannot be found through it.

    Raises:
        BigBatchError: an option, a batch, a loss or a model that would need a guess. No `.grad` has changed then.

    Source: how mean losses go wrong under accumulation, https://huggingface.co/blog/gradient_accumulation.

    >>> _ = torch.manual_seed(0)
    >>> model, loss_fn = nn.Linear(4, 3), nn.CrossEntropyLoss()
    >>> inputs, targets = torch.randn(10, 4), torch.randint(0, 3, (10,))
    >>> accumulator = Accumulator(model, loss_fn, micro_batch_size=4)
    >>> loss = accumulator.backward(inputs, targets)
    >>> torch.allclose(loss, loss_fn(model(inputs), targets))
    True
    >>> accumulator.report.micro_batches, accumulator.report.denominator
    (3, 10)
    """

    def __init__(
        self,
        model: Callable[..., Any],
        loss_fn: Callable[..., Tensor] | None,
        *,
        micro_batch_size: int | str | None = "auto",
        memory: int | str | float | None = None,
        reduction: str | Callable[..., Any] = "auto",
        batch_norm: str = "exact",
        activations: str = "recompute",
        checkpoint: bool = False,
        randomness: str = "global",
        split: Any = None,
        autocast: torch.dtype | None = None,
        scaler: torch.amp.GradScaler | None = None,
        grad_dtype: torch.dtype | None = None,
        modules: Iterable[nn.Module] | None = None,
    ) -> None:
        models.check_option("batch_norm", batch_norm, batch_norms.MODES)
        models.check_option("activations", activations, recompute.ACTIVATIONS)
        models.check_option("randomness", randomness, MODES)
        check_auto(micro_batch_size, memory)
        check_grad_dtype(grad_dtype)
        self.sizer = Sizer(memory) if micro_batch_size == "auto" else None
        self.model, self.loss_fn, self.micro_batch_size = model, loss_fn, micro_batch_size
        self.batch_norm, self.activations, self.checkpoint = batch_norm, activations, checkpoint
        self.autocast, self.scaler, self.grad_dtype = autocast, scaler, grad_dtype
        found = held({"model": model, "loss_fn": loss_fn})
        self.modules = list(found.modules.values() if modules is None else modules)
        self.loose = found.own
        self.report: StepReport | None = None
        self.norms, self.randomness = BatchNorm(batch_norm, self.modules), Randomness(randomness)
        self.around: Callable[[Piece], AbstractContextManager[object]] | None = None
        models.refuse_parallel(self.modules)
        if checkpoint:
            blocks.places_of(models.inner_modules(self.modules))
        self.splitter = Splitter(split, models.sizes_of(models.parameters_of(models.inner_modules(self.modules))))
        self.rule_now = RuleNow(model, loss_fn, reduction)
        self.rule = self.rule_now()
        count = reduction if callable(reduction) else None
        asked = self.rule is None and loss_fn is None
        self.own_loss = OwnLoss(model, self.modules, self.splitter, count) if asked else None
        refuse_plain_function(model, loss_fn, reduction, self.modules)

    def backward(
        self, inputs: Any, targets: Any = None, *, on_outputs: Callable[[Any, Any], object] | None = None
    ) -> Tensor:
        """Adds the gradient of the whole batch's loss to `.grad`; was `loss_fn(model(inputs), targets).backward()`.

        Args:
            inputs: the batch: a tensor is `model(inputs)`, a tuple `model(*inputs)`, a mapping `model(**inputs)`; or a
                `Window`, whose micro-batches are `(inputs, targets)` pairs (inputs alone where `loss_fn` is None).
            targets: what `loss_fn` compares with; None where they travel in `inputs`, or in the window.
            on_outputs: called with the detached outputs and the targets of every micro-batch, for metrics.

        Returns:
            The loss of the whole batch: 0-d, detached, on the model's device, without waiting for it.

        Raises:
            BigBatchError: the batch cannot be cut, or the loss cannot be weighed, without guessing. Every `.grad` and
                every buffer is then as it was before the call, as after any other error inside.
        """
        start, self.rule = time.perf_counter(), self.rule_now()
        inner = models.inner_modules(self.modules)
        parameters = models.parameters_of(inner)
        place = Place(inner, models.device_of(parameters), parameters)
        delivered = items_of(inputs, targets, paired=self.loss_fn is not None)
        size, retries = self.micro_batch_size, 0

        def attempt(size: int | None, show: OnOutputs) -> tuple[Tensor, dict[str, Any]]:
            return self.norms.sighted(lambda: self._attempt(delivered, place, show, size), inner)

        if not isinstance(size, str):
            loss, facts = attempt(size, on_outputs)
        else:
            need, shown = need_of(delivered, self.splitter, place, self._attempt), Shown(on_outputs)
            (loss, facts), retries = cast(Sizer, self.sizer).run(lambda size: attempt(size, shown.again()), need)
            shown.hand_on()
        self.report = StepReport(**facts, retries=retries, seconds=time.perf_counter() - start)
        return loss

    def state_dict(self) -> dict[str, Any]:
        """What has been learnt about micro-batch sizes, ready for JSON; empty where the size was given."""
        return {} if self.sizer is None else self.sizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from what `state_dict` returned."""
        if self.sizer is not None and state:
            self.sizer.load_state_dict(state)

    def _attempt(
        self, delivered: Items, place: Place, on_outputs: OnOutputs, size: int | None
    ) -> tuple[Tensor, dict[str, Any]]:
        """The batch's loss, and facts for the report, by micro-batches of one size; an error leaves all as it was."""
        inner, device = place.inner, place.device
        adds_up = self.rule is not None or self.own_loss is not None  # otherwise one backward runs through it all
        border = Border(list(delivered), adds_up or self.sizer is not None)
        pieces = in_a_row([self.splitter.pieces(*item, size) for item in border.items])
        batch = Batch([part for item in border.items for part in item], pieces, inner, Buffers(inner), device)
        task = Task(
            model=self.model,
            loss_fn=self.loss_fn,
            rule=self.rule,
            own_loss=self.own_loss,
            joint=self.norms.is_joint(inner, len(pieces)),
            activations=self.activations,
            checkpoint=self.checkpoint,
            splitter=self.splitter,
            autocast=self.autocast,
            scale=self.scaler.scale if self.scaler is not None else None,
            around=self.around,
            randomness=self.randomness,
            grad_dtype=self.grad_dtype,
        )
        trained = [*place.parameters, *self.loose, *border.trained()]
        in_front = once(lambda: border.used_up) if border.leaves else NOTHING
        with batch.buffers.put_back_on_error(), in_front, added_at_once(trained, self.grad_dtype):
            loss, denominator = task.run(batch, border.items, on_outputs)
            batch.buffers.settle()
            border.backward()
        sizes = [piece.samples for piece in pieces]
        return loss, {
            "samples": sum(sizes),
            "micro_batches": len(sizes),
            "micro_batch_size": max(sizes, default=0),
            "denominator": denominator,
            "peak_bytes": models.peak_bytes(device),
        }
