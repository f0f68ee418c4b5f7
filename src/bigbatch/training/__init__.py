"""`bigbatch train`: a recipe, trained by Accelerate's loop, with figures, pictures and a proof."""

from __future__ import annotations

from bigbatch.training.loop import Result, check, train
from bigbatch.training.settings import Settings, decide

__all__ = ["Result", "Settings", "check", "decide", "train"]
