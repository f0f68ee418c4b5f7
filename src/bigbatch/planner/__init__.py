"""Will it fit, what does it cost, and what to turn on."""

from bigbatch.planner.plan import plan
from bigbatch.planner.records import Plan

__all__ = ["Plan", "plan"]
