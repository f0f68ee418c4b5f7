"""What a proof found: equal or not, the difference beside the bound that rounding explains, and the causes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from bigbatch.terms import table

SOURCE = "Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019: probabilistic rounding error of a sum"


@dataclass(frozen=True)
class Cause:
    """One reason for a difference, found by an experiment.

    Attributes:
        name: "batch norm", "samples tied by a layer", "samples tied by the loss", "mean of means", "wrong scale",
            "wrong shares", "lost micro-batches", "gradient changed", "missing gradient",
            "buffers", "weights moved", "loss", "randomness",
            "not deterministic", "not finite" or "unknown".
        found: what the experiment showed.
        do: what to do about it.

    >>> print(Cause("batch norm", "layer 1 saw one micro-batch at a time", "freeze it"))
    batch norm: layer 1 saw one micro-batch at a time. Do: freeze it.
    """

    name: str
    found: str
    do: str

    def __str__(self) -> str:
        return f"{self.name}: {self.found}. Do: {self.do}."


@dataclass(frozen=True)
class Verdict:
    """Whether a configuration gives the gradient of the whole batch.

    Attributes:
        equal: the gradients differ by no more than rounding explains, and buffers and weights end where they should;
            so does the loss that a door returns (what a loop of the user's returns is noted, not judged).
        difference: ||ours - whole|| / ||whole|| over all gradients together; infinite where one is missing.
        bound: how large that may become by rounding alone.
        loss_difference: the same for the loss; None where nothing was returned.
        worst_parameter: the parameter that is farthest off.
        worst_difference: by how much, relative to its own gradient.
        causes: why they are not equal; empty where they are.
        dtype: what both sides were computed in.
        samples: samples in the batch.
        micro_batches: micro-batches that were run; 0 where it could not be told which samples a loop gave the model.
        micro_batch_size: samples in the largest of them.
        terms: the longest sum on the gradient's way, of which the bound is made.
        condition: how much the gradient magnifies rounding, of which the bound is made.
        notes: what was decided on the way (a micro-batch size, a dtype, dropout).
        source: where the bound comes from.

    >>> verdict = Verdict(False, 0.18, 4e-14, 0.2, "0.weight", 0.2, (), torch.float64, 10, 3, 4)
    >>> print(str(verdict).splitlines()[0])
    verdict           NOT equal
    >>> verdict.to_dict()["dtype"]
    'float64'
    """

    equal: bool
    difference: float
    bound: float
    loss_difference: float | None
    worst_parameter: str
    worst_difference: float
    causes: tuple[Cause, ...]
    dtype: torch.dtype
    samples: int
    micro_batches: int
    micro_batch_size: int
    terms: int = 0
    condition: float = 1.0
    notes: tuple[str, ...] = ()
    source: str = SOURCE

    def to_dict(self) -> dict[str, Any]:
        """The same for machines, ready for JSON; a number that is not finite becomes None."""
        values = {name: _finite(value) for name, value in vars(self).items()}
        causes = [dict(vars(cause)) for cause in self.causes]
        return {**values, "causes": causes, "notes": list(self.notes), "dtype": _name(self.dtype)}

    def __str__(self) -> str:
        loss = "not returned" if self.loss_difference is None else f"{self.loss_difference:.1e}"
        rows = {
            "verdict": "equal" if self.equal else "NOT equal",
            "difference": f"{self.difference:.1e} of the whole batch's gradient",
            "bound": f"{self.bound:.1e} by rounding in {_name(self.dtype)}, "
            f"{self.terms} terms, condition {self.condition:.2g}",
            "source": self.source,
            "loss difference": loss,
            "worst parameter": f"{self.worst_parameter or 'none'} ({self.worst_difference:.1e})",
            "samples": self.samples,
            "micro-batches": self.micro_batches,
            "micro-batch size": self.micro_batch_size,
        }
        lines = [f"note: {note}" for note in self.notes] + [f"cause: {cause}" for cause in self.causes]
        return "\n".join([table(rows), *lines])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
