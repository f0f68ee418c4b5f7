"""Every example that a reader can see runs: docstrings of the installed package, README and docs."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

import bigbatch

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path(bigbatch.__file__).parent
PAGES = [page for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.exists()]
FLAGS = doctest.ELLIPSIS


def module_names(package: Path) -> list[str]:
    """Dotted names of all modules, read from the files so that collecting tests imports none of them."""
    paths = (path.relative_to(package.parent).with_suffix("") for path in package.rglob("*.py"))
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths if path.name != "__main__")


def run_page(page: Path) -> int:
    """Run the Python blocks of a page from top to bottom, in one namespace, and count them."""
    examples = list(Sybil([PythonCodeBlockParser(doctest_optionflags=FLAGS), SkipParser()]).parse(page).examples())
    for example in examples:
        example.evaluate()
    return len(examples)


@pytest.mark.parametrize("name", module_names(PACKAGE))
def test_docstrings_run(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), optionflags=FLAGS).failed == 0


def test_there_are_docstrings_to_run() -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [
        test for name in ("bigbatch.errors", "bigbatch.terms") for test in finder.find(importlib.import_module(name))
    ]
    assert any(test.examples for test in found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a block may write files
    run_page(page)


def test_blocks_share_names_and_are_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n\n```python\nassert a == 1\n```\n\n```python\n>>> a + 1\n2\n\n```\n")
    assert run_page(page) == 3


@pytest.mark.parametrize("block", ["assert 1 == 2", ">>> 1 + 1\n3\n", "import bigbatch.no_such_room"])
def test_a_wrong_block_is_caught(block: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\n{block}\n```\n")
    with pytest.raises(Exception):  # noqa: B017 - what a block raises is its own affair
        run_page(page)
