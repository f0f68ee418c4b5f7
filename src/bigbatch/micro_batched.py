"""Door 2: a model that runs in micro-batches, so that any loss on its outputs has the gradient of the whole batch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bigbatch.core import batch_norm as batch_norms
from bigbatch.core import models
from bigbatch.core.arguments import gathered, spread
from bigbatch.core.batch import Batch
from bigbatch.core.batch_norm import BatchNorm
from bigbatch.core.buffers import Buffers
from bigbatch.core.rng import preserved_rng
from bigbatch.core.split import Piece, Splitter
from bigbatch.core.units import parse_bytes
from bigbatch.engines import lockstep, recompute, replayed
from bigbatch.errors import OptionError
from bigbatch.fit.need import Place, need_of
from bigbatch.fit.oom import is_out_of_memory, let_go
from bigbatch.fit.sizer import Sizer, check_auto

OWN = frozenset({"_wrapped", "_door", "forward"})


@dataclass
class Door:
    """How one model is run in micro-batches.

    Attributes:
        micro_batch_size: samples in one micro-batch, or "auto".
        activations: "recompute", "offload" or "keep".
        keep_bytes: memory to spend on keeping the activations of the last micro-batches; None for no more than needed.
        batch_norm: "exact" or "local".
        splitter: cuts the arguments of a call.
        modules: the model, and modules that it holds in plain attributes.
        sizer: chooses the size where it is automatic.
        around: what a proof puts around the forward of a micro-batch.
        checked: micro-batch sizes whose outputs are known to be joinable.
        sample_bytes: bytes that the backward of one sample keeps, once measured.
        norms: how batch norm is treated.
    """

    micro_batch_size: int | str
    activations: str
    keep_bytes: int | None
    batch_norm: str
    splitter: Splitter
    modules: list[nn.Module]
    sizer: Sizer
    norms: BatchNorm
    around: Callable[[Piece], Any] | None = None
    checked: set[int] = field(default_factory=set)
    sample_bytes: float | None = None

    def run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The model's outputs for the whole batch."""
        inputs = gathered(args, kwargs)
        inner = models.inner_modules(self.modules)
        if not isinstance(self.micro_batch_size, str):
            size = self.micro_batch_size
            return self.norms.sighted(lambda: self._attempt(model, inputs, inner, size), inner)
        parameters = models.parameters_of(inner)
        place = Place(inner, models.device_of(parameters), parameters)
        need = need_of([(inputs, None)], self.splitter, place, self.batch_norm)

        def too_large(size: int) -> None:
            self.sizer.tuner = self.sizer.tuner.failed(size, need.cost)

        tries = replayed.Tries(too_large, is_out_of_memory, let_go)

        def attempt(size: int) -> Any:
            return self.norms.sighted(lambda: self._attempt(model, inputs, inner, size, tries), inner)

        return self.sizer.run(attempt, need)[0]

    def _attempt(
        self,
        model: nn.Module,
        inputs: Any,
        inner: list[nn.Module],
        micro_batch_size: int,
        tries: replayed.Tries | None = None,
    ) -> Any:
        """The outputs from micro-batches of one size; with `tries`, a backward that runs out of memory goes smaller."""
        pieces = self.splitter.pieces(inputs, None, micro_batch_size)
        positional, keywords = spread(inputs)
        if not pieces:
            return model(*positional, **keywords)

        def forward(piece: Piece) -> Any:
            positional, keywords = spread(piece.inputs)
            if self.around is None:
                return model(*positional, **keywords)
            with self.around(piece):
                return model(*positional, **keywords)

        parameters = models.parameters_of(inner)
        device = models.device_of(parameters)
        batch = Batch([inputs], pieces, inner, Buffers(inner), device)
        size = pieces[0].samples
        check = (
            None
            if size in self.checked
            else functools.partial(recompute.refuse_tied_axes, batch, forward, self.splitter)
        )
        joint = self.norms.is_joint(inner, len(pieces))
        kept = 1 if len(pieces) == 1 else 0 if joint else self._kept(batch, forward)
        with batch.buffers.put_back_on_error():
            if joint:
                outputs = lockstep.outputs(batch, forward, self.activations, check)
            elif tries is not None and torch.is_grad_enabled():
                outputs = replayed.run(batch, forward, parameters, self.splitter, tries, kept=kept, check=check)
            else:
                outputs = recompute.run(batch, forward, self.activations, kept, check)
        self.checked.add(size)
        return outputs

    def _kept(self, batch: Batch, forward: recompute.Forward) -> int:
        """How many of the last micro-batches the stated budget keeps; the first time, one of them is measured."""
        if self.keep_bytes is None or not torch.is_grad_enabled():
            return 0
        if self.sample_bytes is None:
            first = recompute.fresh(recompute.moved(batch.pieces[0], batch.device), batch.pieces[0])
            constants = [*models.parameters_of(batch.inner), *batch.buffers.originals]
            with preserved_rng(models.generators_of(batch.inner)), batch.buffers.replayed():
                self.sample_bytes = recompute.saved_bytes(forward, first, constants) / first.samples
        return affordable([piece.samples for piece in batch.pieces], self.sample_bytes, self.keep_bytes)


class MicroBatched(nn.Module):
    """Runs a model in micro-batches and joins its outputs; the loop around it does not change.

    The wrapper stands aside for everything but the call: parameters, `state_dict`, `train()`, `to()`, hooks and
    attributes are those of the model itself. In `no_grad`, outputs are made in micro-batches too.

    Args:
        model: any module whose output tensors have the samples first.
        micro_batch_size: samples in one micro-batch; "auto" goes down inside the call, or inside its backward, when
            memory runs out, and up again later. Its activations are recomputed; derivatives of second order need a
            number.
        memory: the budget of "auto", as in `Accumulator`.
        activations: what happens to a micro-batch's activations until its backward: "recompute" (one more forward),
            "offload" (moved to the host) or "keep" (nothing).
        keep_bytes: memory, as a number or such as "2GiB", in which the last micro-batches keep their activations
            instead, so that memory to spare is spent on time. The first call measures one micro-batch for it.
        batch_norm: as in `Accumulator`; "exact" offloads activations, or keeps them, and recomputes none.
        split: as in `Accumulator`; a function gets the arguments of the call as `inputs`, and None as targets.

    Raises:
        BigBatchError: an option, a batch, an output or a model that would need a guess.

    Source: Chen, Xu, Zhang, Guestrin, "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174, for
    recomputation; Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup",
    arXiv:2101.06983, for a loss that needs the whole batch.

    >>> _ = torch.manual_seed(0)
    >>> model, images = nn.Linear(4, 3), torch.randn(10, 4)
    >>> similarity = MicroBatched(model, micro_batch_size=4)(images) @ model(images).T
    >>> similarity.shape, similarity.requires_grad
    (torch.Size([10, 10]), True)
    """

    def __init__(
        self,
        model: nn.Module,
        micro_batch_size: int | str = "auto",
        *,
        memory: int | str | float | None = None,
        activations: str = "recompute",
        keep_bytes: int | str | None = None,
        batch_norm: str = "exact",
        split: Any = None,
    ) -> None:
        models.check_option("activations", activations, recompute.ACTIVATIONS)
        models.check_option("batch_norm", batch_norm, batch_norms.MODES)
        models.refuse_parallel([model])
        check_auto(micro_batch_size, memory)
        if micro_batch_size == "auto" and activations != "recompute":
            raise OptionError(
                f"activations={activations!r} was asked for with an automatic size",
                "a backward that may have to go smaller has to run its forward again",
                "pass a micro_batch_size, or leave activations out",
            )
        budget = None if keep_bytes is None else parse_bytes(keep_bytes, "keep_bytes")
        splitter = Splitter(split, models.sizes_of(model.parameters()))
        # The model's own __setattr__ would be asked, so the two fields of the wrapper are laid past it.
        self.__dict__["_wrapped"] = model
        modules = models.find_modules(model)
        self.__dict__["_door"] = Door(
            micro_batch_size,
            activations,
            budget,
            batch_norm,
            splitter,
            modules,
            Sizer(memory),
            BatchNorm(batch_norm, modules),
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._door.run(self._wrapped, args, kwargs)

    forward = __call__

    def __getattribute__(self, name: str) -> Any:
        if name in OWN or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        wrapped = object.__getattribute__(self, "_wrapped")
        value = getattr(wrapped, name)
        if not inspect.ismethod(value) or value.__self__ is not wrapped:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            result = value(*args, **kwargs)
            return self if result is wrapped else result  # `model = MicroBatched(model).to(device)` stays wrapped

        return method

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._wrapped, name)

    def __getitem__(self, key: Any) -> Any:
        return self._wrapped[key]

    def __repr__(self) -> str:
        return f"MicroBatched({self._wrapped!r}, micro_batch_size={self._door.micro_batch_size})"

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return restored, (self._wrapped, self._door)


def restored(model: nn.Module, door: Door) -> MicroBatched:
    """A wrapper from its two parts, for copy and pickle."""
    wrapper = MicroBatched.__new__(MicroBatched)
    wrapper.__dict__.update(_wrapped=model, _door=door)
    return wrapper


def affordable(samples: list[int], sample_bytes: float, budget: int) -> int:
    """How many of the last micro-batches fit a budget together.

    >>> affordable([4, 4, 3, 3], sample_bytes=10.0, budget=75)
    2
    """
    kept, spent = 0, 0.0
    for size in reversed(samples):
        spent += size * sample_bytes
        if spent > budget:
            break
        kept += 1
    return kept
