"""Runs a user's own configuration beside the whole batch and says equal or not, by how much, and why."""

from bigbatch.verifier.verdict import Cause, Verdict
from bigbatch.verifier.verify import verify

__all__ = ["Cause", "Verdict", "verify"]
