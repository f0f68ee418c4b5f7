"""Recipes are found, loaded and refused; all three of them learn, and what learns nothing fails the same thresholds."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from bigbatch.errors import MissingExtra, RecipeError
from bigbatch.recipes import BUILT_IN, find, load
from bigbatch.recipes.digit_pairs import collate as pair_up
from bigbatch.recipes.digit_pairs import distorted, info_nce, probe
from bigbatch.recipes.digits import pictures
from bigbatch.recipes.extras import require
from bigbatch.recipes.stdlib_lm import END, IGNORED, LONGEST, Writer, collate, functions, library
from bigbatch.terms import Recipe
from bigbatch.training import decide, train

OWN = """
import torch
from bigbatch import Recipe

def recipe():
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
    return Recipe(
        model=torch.nn.Linear(3, 1), loss_fn=torch.nn.MSELoss(), train_data=data, eval_data=data,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        metrics=lambda model, data: {}, name="own", defaults={DEFAULTS},
    )
"""


@pytest.fixture(autouse=True)
def imports_put_back() -> Iterator[None]:
    """A recipe's file is imported as a script would be; no test sees another's."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if "bigbatch" not in name and getattr(sys.modules[name], "recipe", None) is not None:
            del sys.modules[name]


def own(folder: Path, text: str = OWN, name: str = "mine.py", defaults: str = "{}") -> str:
    path = folder / name
    path.write_text(text.replace("{DEFAULTS}", defaults), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_recipe_is_loaded_by_name(name: str) -> None:
    recipe = load(name)
    assert recipe.name == name
    assert decide(recipe.defaults, {}).batch_size > decide(recipe.defaults, {}).micro_batch_size
    assert len(recipe.train_data) > len(recipe.eval_data) > 0


def test_a_file_is_loaded_from_anywhere_with_its_own_imports(tmp_path: Path) -> None:
    (tmp_path / "my_helper_of_mine.py").write_text("WORD = 'own'\n", encoding="utf-8")
    assert load(own(tmp_path, "import my_helper_of_mine\n" + OWN)).name == "own"


def test_a_module_is_loaded_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jobs_of_mine").mkdir()
    own(tmp_path / "jobs_of_mine", name="first.py")
    monkeypatch.chdir(tmp_path)
    assert load("jobs_of_mine.first").name == "own"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit", "did you mean 'digits'"),
        ("digit_pairs", "did you mean 'digit-pairs'"),
        ("stdlib", "built in: digits, stdlib-lm, digit-pairs"),
        ("no_such.py", "no file"),
        ("json", "has no function `recipe`"),
        ("no.such.module", "no built-in recipe, file or module"),
    ],
)
def test_an_unknown_name_is_refused(name: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        find(name)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "has no function `recipe`"),
        ("def recipe(): return 3\n", "returned int"),
        (OWN.replace("{DEFAULTS}", "{'batchsize': 3}"), "defaults names 'batchsize'"),
        (OWN.replace('name="own"', 'activations="forget"'), "activations='forget'"),
        (OWN.replace("train_data=data", "train_data=iter(data)"), "train_data is a"),
        (OWN.replace("eval_data=data", "eval_data=[]"), "eval_data has 0 samples"),
    ],
)
def test_a_recipe_that_is_none_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load(own(tmp_path, text))
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["import no_such_thing_at_all\n", "1 / 0\n", "def recipe(): return 1 / 0\n"])
def test_a_fault_in_the_users_file_is_the_users_to_see(tmp_path: Path, text: str) -> None:
    with pytest.raises((ModuleNotFoundError, ZeroDivisionError)) as caught:
        load(own(tmp_path, text))
    assert caught.traceback[-1].path.name == "mine.py"


def test_weights_are_drawn_from_the_seed(tmp_path: Path) -> None:
    path = own(tmp_path, defaults="{'seed': 7}")
    first, again, other = load(path), load(path, 7), load(path, 0)
    assert torch.equal(first.model.weight, again.model.weight)
    assert not torch.equal(first.model.weight, other.model.weight)


def test_a_missing_package_is_named_with_its_cure() -> None:
    with pytest.raises(MissingExtra, match=r'no_such_package.*pip install "bigbatch\[train\]"'):
        require("torch", "no_such_package")


def test_held_out_pictures_are_not_learnt_from() -> None:
    train_images, held_out = (part.tensors[0].flatten(1) for part in pictures())
    assert len(train_images) + len(held_out) == 1797
    assert (torch.cdist(held_out, train_images).min(1).values > 0).all()


def test_functions_are_cut_where_their_bodies_start() -> None:
    source = (
        "def one(): return 1\n"
        "class A:\n"
        "    @property\n"
        "    def two(\n        self,\n    ) -> int:\n"
        "        # Comment.\n"
        "        def inner():\n            pass\n"
        "        return 'ü'\n"
    )
    prompts, bodies = zip(*sorted(functions(source)), strict=True)
    assert prompts == (b"def one(): ", b"def two(\n    self,\n) -> int:\n    # Comment.\n    ")
    assert bodies == (b"return 1", "def inner():\n        pass\n    return 'ü'".encode())


def test_functions_are_of_very_different_lengths_and_hold_no_end_mark() -> None:
    lengths = torch.tensor([len(prompt + body) for part in library() for prompt, body in part])
    assert lengths.max() < LONGEST
    assert lengths.max() > 5 * lengths.min()
    assert not any(END in prompt + body for part in library() for prompt, body in part)


def test_padding_and_prompts_are_ignored_and_nothing_else() -> None:
    samples = library()[1][:9]
    inputs, targets = collate(samples)
    for row, (prompt, body) in enumerate(samples):
        said = targets[row][targets[row] != IGNORED]
        assert bytes(said.tolist()) == body + bytes([END])
        assert bytes(inputs[row, : len(prompt + body)].tolist()) == prompt + body


def test_a_byte_sees_no_later_byte() -> None:
    model, (inputs, _) = Writer().eval(), collate(library()[1][:2])
    before = model(inputs)
    inputs[:, 20] = 65
    changed = (model(inputs) - before).abs().amax((0, 1)) > 1e-6
    assert not changed[:20].any()
    assert changed[20]


def test_a_leak_from_later_bytes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = functional.scaled_dot_product_attention
    monkeypatch.setattr(functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: real(q, k, v))
    with pytest.raises(AssertionError):
        test_a_byte_sees_no_later_byte()


def test_two_views_differ_and_keep_their_picture() -> None:
    images, digits = pictures()[0][:50]
    views, named = pair_up(list(zip(images, digits, strict=True)))
    assert views.shape == (50, 2, 1, 8, 8)
    assert named.equal(digits)
    first, second = views.flatten(2).unbind(1)
    nearest = torch.cdist(first, second).argmin(1)
    assert (first - second).abs().amax(1).min() > 0.01
    assert (nearest == torch.arange(50)).float().mean() > 0.08  # by their pixels; by chance it would be 0.02
    assert not torch.equal(distorted(views[:, 0]), distorted(views[:, 0]))


def test_the_contrastive_loss_is_log_batch_for_views_that_say_nothing() -> None:
    assert info_nce(torch.ones(7, 2, 3)).item() == pytest.approx(math.log(7))
    sure = torch.eye(7).unsqueeze(1).expand(7, 2, 7) * 10
    assert info_nce(sure).item() < 1e-6


def test_the_probe_reads_what_is_there_and_only_that() -> None:
    digits = torch.arange(10).repeat(20)
    told = functional.one_hot(digits, 10).double()
    assert probe(told, digits, told, digits) == 1.0
    assert probe(torch.randn(200, 10), digits, torch.randn(200, 10), digits) < 0.25


def learnt(name: str, folder: Path, **asked: Any) -> dict[str, float]:
    recipe = load(name)
    folder.mkdir(exist_ok=True)
    return dict(train(recipe, decide(recipe.defaults, {"proof": False, **asked}), folder).metrics)


def check_digits(metrics: dict[str, float]) -> None:
    assert metrics["accuracy"] >= 0.97


def check_stdlib_lm(metrics: dict[str, float]) -> None:
    assert metrics["held_out_loss"] < metrics["unigram_entropy"] - 0.4


def check_digit_pairs(metrics: dict[str, float]) -> None:
    assert metrics["probe_accuracy"] > 0.9
    assert metrics["probe_accuracy_few_labels"] > metrics["pixel_accuracy_few_labels"] + 0.1


CHECKS = {"digits": check_digits, "stdlib-lm": check_stdlib_lm, "digit-pairs": check_digit_pairs}
FEWER = {"digits": {}, "stdlib-lm": {"max_steps": 40, "batch_size": 24}, "digit-pairs": {"epochs": 12}}


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_recipe_learns(name: str, tmp_path: Path) -> None:
    CHECKS[name](learnt(name, tmp_path, **FEWER[name]))


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_run_that_learns_nothing_is_caught(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        CHECKS[name](learnt(name, tmp_path, **{**FEWER[name], "lr": 0.0, "max_steps": 1, "batch_size": 16}))


def test_recipes_are_frozen() -> None:
    recipe = load("digits")
    assert isinstance(recipe, Recipe)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.name = "other"  # type: ignore[misc]
