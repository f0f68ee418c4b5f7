"""Recipes: training jobs, found by name, by file or by module.

A recipe is a Python file or module with a function `recipe() -> bigbatch.terms.Recipe`.
"""

from __future__ import annotations

from bigbatch.recipes.find import BUILT_IN, find, load

__all__ = ["BUILT_IN", "find", "load"]
