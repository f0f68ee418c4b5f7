"""From a recipe's name, file or module to the recipe itself, with its initial weights drawn from the seed."""

from __future__ import annotations

import importlib
import importlib.util
import random
import sys
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from bigbatch.errors import RecipeError
from bigbatch.terms import Recipe

BUILT_IN = {
    "digits": "bigbatch.recipes.digits",
    "stdlib-lm": "bigbatch.recipes.stdlib_lm",
    "digit-pairs": "bigbatch.recipes.digit_pairs",
}
DEFAULTS = ("batch_size", "micro_batch_size", "epochs", "lr", "precision", "seed")
ACTIVATIONS = (None, "recompute", "offload", "keep")


def find(name: str) -> Callable[[], Recipe]:
    """The function `recipe` of a built-in name (`digits`), a file (`jobs/mine.py`) or a module (`jobs.mine`).

    Whatever goes wrong inside the user's own file is the user's to see: it is passed on unchanged.

    Raises:
        RecipeError: nothing has this name, or what has it holds no function `recipe`.

    >>> find("digits").__module__
    'bigbatch.recipes.digits'
    >>> find("digit")
    Traceback (most recent call last):
    bigbatch.errors.RecipeError: The recipe 'digit' was asked for. Found: no built-in recipe, ... 'digits'?...
    """
    if name in BUILT_IN:
        module = importlib.import_module(BUILT_IN[name])
    elif name.endswith(".py") or "/" in name or "\\" in name:
        module = _from_file(name)
    else:
        module = _from_module(name)
    make = getattr(module, "recipe", None)
    if not callable(make):
        raise RecipeError(
            f"The recipe {name!r} was asked for",
            f"{module.__file__} has no function `recipe`",
            "define `def recipe(): return bigbatch.Recipe(...)` in it",
        )
    return make  # type: ignore[no-any-return]


def load(name: str, seed: int | None = None) -> Recipe:
    """The recipe, with initial weights drawn from `seed` (None: the recipe's own default seed, else 0).

    Raises:
        RecipeError: it cannot be found, or is not a usable `Recipe`.

    >>> load("digits").name
    'digits'
    """
    make = find(name)
    recipe = _built(make, name, seed or 0)
    own = recipe.defaults.get("seed", 0)
    if seed is None and own != 0:
        recipe = _built(make, name, own)
    return recipe


def _built(make: Callable[[], Recipe], name: str, seed: int) -> Recipe:
    torch.manual_seed(seed)
    random.seed(seed)
    made: Any = make()
    fault = _fault(made)
    if fault is not None:
        found, do = fault
        raise RecipeError(f"The recipe {name!r} was asked for", found, do)
    return made  # type: ignore[no-any-return]


def _fault(made: Any) -> tuple[str, str] | None:
    """What is wrong with a recipe and what to do about it; None where nothing is."""
    if not isinstance(made, Recipe):
        return f"recipe() returned {type(made).__name__}", "return a bigbatch.Recipe"
    unknown = [key for key in made.defaults if key not in DEFAULTS]
    if unknown:
        return f"defaults names {unknown[0]!r}", f"use only {', '.join(DEFAULTS)}"
    if made.activations not in ACTIVATIONS:
        return f"activations={made.activations!r}", 'use None, "recompute", "offload" or "keep"'
    if made.activations is not None and made.loss_fn is None:
        return (
            "activations without a loss_fn",
            "give the loss that runs on the joined outputs, or leave activations out",
        )
    for field in ("train_data", "eval_data"):
        data = getattr(made, field)
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
            return f"{field} is a {type(data).__name__} without length or index", "give a map-style dataset"
        if len(data) == 0:
            return f"{field} has 0 samples", "give it at least one"
    return None


def _from_file(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        found = "it is not a Python file" if path.exists() else f"no file {path}"
        raise RecipeError(f"The recipe {name!r} was asked for", found, "name a Python file that exists")
    module = importlib.util.module_from_spec(spec)
    # The file's own imports work as if it were run as a script, and its classes can be found by name.
    sys.path.insert(0, str(path.parent))
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def _from_module(name: str) -> ModuleType:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that exists, but misses one of its own imports, is another matter.
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise
    close = get_close_matches(name.replace("_", "-"), BUILT_IN, n=1, cutoff=0.5)
    raise RecipeError(
        f"The recipe {name!r} was asked for",
        f"no built-in recipe, file or module of that name (built in: {', '.join(BUILT_IN)})",
        f"did you mean {close[0]!r}?" if close else "name a built-in recipe, or a file that ends in .py",
    )
