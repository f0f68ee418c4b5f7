"""The gradient of the big batch, exactly, on the GPU you have."""

from bigbatch.accumulator import Accumulator
from bigbatch.errors import BigBatchError
from bigbatch.micro_batched import MicroBatched
from bigbatch.planner import Plan, plan
from bigbatch.terms import Recipe, StepReport
from bigbatch.verifier import Verdict, verify
from bigbatch.windows import windows

__all__ = [
    "Accumulator",
    "BigBatchError",
    "MicroBatched",
    "Plan",
    "Recipe",
    "StepReport",
    "Verdict",
    "plan",
    "verify",
    "windows",
]
