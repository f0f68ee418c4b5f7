"""Door 2: a model that runs in micro-batches, so that any loss on its outputs has the gradient of the whole batch."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch
from torch import nn

from bigbatch.core import batch_norm as batch_norms
from bigbatch.core import models
from bigbatch.core.batch_norm import BatchNorm
from bigbatch.core.held import held
from bigbatch.core.split import Splitter
from bigbatch.core.sums import check_grad_dtype
from bigbatch.core.units import parse_bytes
from bigbatch.door import Door
from bigbatch.engines import blocks, recompute
from bigbatch.engines.randomness import MODES, Randomness
from bigbatch.errors import OptionError
from bigbatch.fit.sizer import Sizer, check_auto
from bigbatch.terms import StepReport

OWN = frozenset({"_wrapped", "_door", "forward", "report"})


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
        checkpoint: as in `Accumulator`, also in a second forward and where activations are offloaded or kept.
        keep_bytes: memory, as a number or such as "2GiB", in which the last micro-batches keep their activations
            instead, so that memory to spare is spent on time. The first call measures one micro-batch for it.
        batch_norm: as in `Accumulator`; "exact" offloads activations, or keeps them, and recomputes none.
        randomness: as in `Accumulator`; every call draws a seed of its own.
        split: as in `Accumulator`; a function gets the arguments of the call as `inputs`, and None as targets.
        autocast: the dtype of `torch.autocast` around the model's forward, the second one too; None leaves autocast
            as the caller set it. The loss is outside of it.
        grad_dtype: as in `Accumulator`. By default, gradients of bfloat16 and float16 parameters are added up in
            float32; they have no derivatives of second order then.

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
        checkpoint: bool = False,
        keep_bytes: int | str | None = None,
        batch_norm: str = "exact",
        randomness: str = "global",
        split: Any = None,
        autocast: torch.dtype | None = None,
        grad_dtype: torch.dtype | None = None,
    ) -> None:
        models.check_option("activations", activations, recompute.ACTIVATIONS)
        models.check_option("batch_norm", batch_norm, batch_norms.MODES)
        models.check_option("randomness", randomness, MODES)
        check_grad_dtype(grad_dtype)
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
        modules = list(held({"model": model}).modules.values())
        if checkpoint:
            blocks.places_of(models.inner_modules(modules))
        self.__dict__["_door"] = Door(
            micro_batch_size=micro_batch_size,
            activations=activations,
            checkpoint=checkpoint,
            keep_bytes=budget,
            splitter=splitter,
            modules=modules,
            sizer=Sizer(memory),
            norms=BatchNorm(batch_norm, modules),
            randomness=Randomness(randomness),
            without_graph=Sizer(memory),
            autocast=autocast,
            grad_dtype=grad_dtype,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._door.run(self._wrapped, args, kwargs)

    forward = __call__

    @property
    def report(self) -> StepReport | None:
        """What the last call did, and how often memory ran out in backwards since; None before the first call."""
        return self._door.report  # type: ignore[no-any-return]

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
