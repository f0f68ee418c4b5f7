"""The house keeps its own rules: what is public, who imports whom, how long things are, what is installed."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import bigbatch

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "bigbatch"
FILES = sorted(SOURCE.rglob("*.py"))
FILE_LINES, BODY_LINES, PUBLIC_METHODS = 250, 40, 8
SECRETS = {
    "a path of one machine": re.compile(r"(?<![\w.~-])/(?:work|root|home/\w+|Users/\w+|opt/(?:wheels|pypi)[\w-]*)/"),
    "a registry's address": re.compile(
        r"https?://[^\s\"'<>)]*(?:pypi|pythonhosted|npmjs|/simple\b)|--(?:extra-)?index-url"
    ),
}


def too_long(source: str) -> list[str]:
    """Names of what exceeds the ceilings; a docstring is no part of a body."""
    found = ["the file"] if len(source.splitlines()) > FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            if body and (body[-1].end_lineno or 0) - body[0].lineno + 1 > BODY_LINES:
                found.append(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [item.name for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)]
            if sum(not name.startswith("_") for name in methods) > PUBLIC_METHODS:
                found.append(node.name)
    return found


def surface_faults(namespace: Mapping[str, Any]) -> list[str]:
    """What is wrong with a package's `__all__`: its order, a name without a docstring, a public object left out."""
    listed = namespace["__all__"]
    public = {name for name, value in namespace.items() if callable(value) and not name.startswith("_")}
    found = [] if listed == sorted(set(listed)) else ["not sorted"]
    found += [
        f"{name} is missing or has no docstring" for name in listed if not getattr(namespace.get(name), "__doc__", "")
    ]
    return found + [f"{name} is not listed" for name in sorted(public - set(listed))]


def leaks(text: str) -> list[str]:
    """What a text gives away about the machine it was written on."""
    return [name for name, pattern in SECRETS.items() if pattern.search(text)]


def shared_files() -> Iterator[Path]:
    """Files that are tracked or would be; in a copy without git, every file outside the folders that make fills."""
    command = ["git", "ls-files", "-co", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = listed.stdout.splitlines() if listed.stdout else [str(p.relative_to(ROOT)) for p in ROOT.rglob("*")]
    for name in names:
        parts = Path(name).parts
        made = parts[0] in {".git", ".venv", "build", "dist", "runs"} or any(
            part == "__pycache__" or (part.startswith(".") and part.endswith(("_cache", "hypothesis")))
            for part in parts
        )
        if not made and (ROOT / name).is_file():
            yield ROOT / name


def check_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the project's contracts on the `bigbatch` that lies in `folder`."""
    shutil.copy(ROOT / "pyproject.toml", folder)
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def needed(name: str) -> set[str]:
    """A distribution and all that it requires on this machine, without extras."""
    names, waiting = set(), [name]
    while waiting:
        names.add(now := waiting.pop())
        for requirement in map(Requirement, distribution(now).requires or ()):
            wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if wanted and requirement.name not in names:
                waiting.append(requirement.name)
    return names


def torch_alone(folder: Path) -> None:
    """Fill a folder with links to torch, what torch requires, and bigbatch: the least that a user installs."""
    for name in needed("torch"):
        for top in {path.parts[0] for path in distribution(name).files or () if path.parts[0] != ".."}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))))
    (folder / "bigbatch").symlink_to(Path(bigbatch.__file__).parent)


def run_with(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that sees the standard library and `folder`, and nothing else."""
    start = f"import sys; sys.path.append({str(folder)!r}); {code}"
    return subprocess.run([sys.executable, "-I", "-S", "-c", start], capture_output=True, text=True, check=False)


@pytest.mark.skipif("BIGBATCH_TREE" in os.environ, reason="BIGBATCH_TREE asks for the tree")
def test_the_wheel_is_tested_and_not_the_tree() -> None:
    assert "site-packages" in Path(bigbatch.__file__).parts
    installed = {p.relative_to(Path(bigbatch.__file__).parent) for p in Path(bigbatch.__file__).parent.rglob("*.py")}
    assert installed == {path.relative_to(SOURCE) for path in FILES}
    assert (Path(bigbatch.__file__).parent / "py.typed").exists()


def test_public_names_are_sorted_and_exist() -> None:
    assert surface_faults(vars(bigbatch)) == []


@pytest.mark.parametrize("names", [["b", "a"], ["a", "b", "b"], ["a"], ["a", "b", "c"]])
def test_a_wrong_surface_is_caught(names: list[str]) -> None:
    namespace = {"a": surface_faults, "b": too_long, "_c": leaks}
    assert surface_faults({**namespace, "__all__": ["a", "b"]}) == []
    assert surface_faults({**namespace, "__all__": names})


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_nothing_is_too_long(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert too_long(source) == []
    assert ast.get_docstring(ast.parse(source)), "a file opens with what it computes"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("a = 1\n" * (FILE_LINES + 1), "the file"),
        ("def f():\n    '''Doc.'''\n" + "    a = 1\n" * (BODY_LINES + 1), "f"),
        ("class C:\n" + "".join(f"    def m{i}(self): ...\n" for i in range(PUBLIC_METHODS + 1)), "C"),
    ],
)
def test_what_is_too_long_is_caught(source: str, name: str) -> None:
    assert too_long(source) == [name]


def test_imports_point_down(tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "bigbatch")
    result = check_imports(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("where", "planted", "contract"),
    [
        ("core/split.py", "import bigbatch.cli", "Imports point down only"),
        ("core/split.py", "from bigbatch import accumulator", "Imports point down only"),
        ("core/split.py", "import numpy", "The library needs torch alone"),
        ("recipes/digits.py", "from bigbatch.core import weigh", "A recipe describes a job and runs nothing"),
        ("attic.py", "", "Imports point down only"),  # a room that no layer knows
    ],
)
def test_a_planted_violation_is_caught(where: str, planted: str, contract: str, tmp_path: Path) -> None:
    shutil.copytree(SOURCE, tmp_path / "bigbatch")
    with (tmp_path / "bigbatch" / where).open("a", encoding="utf-8") as file:
        file.write(f"\n{planted}\n")
    result = check_imports(tmp_path)
    assert result.returncode == 1
    assert re.search(rf"{contract}\s+BROKEN", result.stdout), result.stdout + result.stderr


def test_the_library_needs_torch_alone(tmp_path: Path) -> None:
    torch_alone(tmp_path)
    names = list(bigbatch.__all__)
    code = f"import bigbatch; print([getattr(bigbatch, name).__name__ for name in {names!r}])"
    result = run_with(tmp_path, code)
    assert result.returncode == 0, result.stderr
    for name in ("numpy", "rich", "hypothesis"):  # what is not linked cannot be imported: the check can fail
        assert "ModuleNotFoundError" in run_with(tmp_path, f"import {name}").stderr


def test_no_file_names_a_machine_or_a_registry() -> None:
    texts = {path: path.read_bytes().decode("utf-8", "ignore") for path in shared_files()}
    assert ROOT / "pyproject.toml" in texts
    assert {str(path.relative_to(ROOT)): found for path, text in texts.items() if (found := leaks(text))} == {}


@pytest.mark.parametrize(
    "text",
    ["see /" + "work/notes", "/" + "home/someone/data", "https://py" + "pi.org/simple", "pip --index" + "-url x"],
)
def test_a_leak_is_caught(text: str) -> None:
    assert leaks(text) and not leaks("a framework/work/flow, docs/home/page and https://keepachangelog.com")


def test_every_requirement_is_pinned() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    pins = [Requirement(line) for line in lines]
    assert all(re.fullmatch(r"==[^,*+]+", str(pin.specifier)) for pin in pins)
    names = {pin.name.lower().replace("_", "-") for pin in pins}
    wanted = {Requirement(text).name for text in distribution("bigbatch").requires or ()}
    assert wanted - names == set()


def test_the_command_is_there() -> None:
    (entry,) = [point for point in distribution("bigbatch").entry_points if point.group == "console_scripts"]
    assert (entry.name, entry.value) == ("bigbatch", "bigbatch.cli:main")
    assert callable(importlib.import_module("bigbatch.cli").main)


def test_contributing_is_short() -> None:
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) < 60
    assert textwrap.dedent((ROOT / "CHANGELOG.md").read_text()).count("## [Unreleased]") == 1
