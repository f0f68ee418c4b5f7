"""The command line does what it is told, refuses what cannot be meant in three phrases, and says what is missing."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import bigbatch
import bigbatch.cli
from bigbatch.cli import application, main
from bigbatch.recipes import extras
from bigbatch.training.loop import Watcher
from bigbatch.training.trial import Trial

OWN = """
import torch
from bigbatch import Recipe

def recipe():
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
    return Recipe(
        model=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)), loss_fn=torch.nn.MSELoss(),
        train_data=data, eval_data=data, optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        metrics=lambda model, data: {}, name="own", defaults={"batch_size": 10, "micro_batch_size": 4},
    )
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test runs in an empty folder, with one recipe file of a user's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")
    monkeypatch.setattr("bigbatch.cli.train.tried", lambda note: Trial(why_not="this is a test"))
    return tmp_path


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(application(), list(arguments))


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(bigbatch.__file__).parents[1])}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says on stderr before it ends with code 2, without a traceback."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said


def test_help_and_version() -> None:
    assert "train" in invoke("--help").output
    assert "--micro-batch-size" in invoke(
        "train",
        "--help",
    ).output.replace("\n", "")
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.output.startswith("bigbatch ")


def test_train_a_built_in_recipe_and_end_with_the_table() -> None:
    result = invoke("train", "digits", "--max-steps", "2", "--batch-size", "70", "--micro-batch-size", "32")
    assert result.exit_code == 0, result.output
    for words in (
        "not tried: this is a test",
        "70 samples",
        "peak memory, one whole batch",
        "gradient off by, usual loop by hand",
        "chart.png",
    ):
        assert words in result.output
    settings = json.loads(Path("runs/digits/run.json").read_text())["settings"]
    assert (settings["batch_size"], settings["micro_batch_size"], settings["max_steps"]) == (70, 32, 2)


def test_train_a_users_own_file_into_fresh_folders() -> None:
    for folder in ("runs/own", "runs/own-2", "here"):
        out = ["--out", "here"] if folder == "here" else []
        result = invoke("train", "mine.py", "--epochs", "1", "--lr", "0.01", "--no-proof", *out)
        assert result.exit_code == 0, result.output
        assert len((Path(folder) / "metrics.csv").read_text().splitlines()) == 2
    assert "peak memory, one whole batch" not in result.output
    assert "tried for real" not in result.output


@pytest.mark.parametrize("arguments", [["--memory", "1MiB"], ["--micro-batch-size", "auto"], ["--memory", "0.5"]])
def test_train_with_a_size_that_is_chosen(arguments: list[str]) -> None:
    result = invoke("train", "mine.py", *arguments)
    assert result.exit_code == 0, result.output
    assert ("chosen for" in result.output) == (arguments[0] == "--memory")
    assert ("chosen by what fits" in result.output) == (arguments[0] != "--memory")
    report = json.loads(Path("runs/own/run.json").read_text())
    assert report["settings"]["micro_batch_size"] == "auto"
    assert report["settings"]["memory"] == (arguments[1] if arguments[0] == "--memory" else None)
    assert report["tuner"]["windows"] == 1
    assert "micro_batch_size,retries" in Path("runs/own/metrics.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "digit"], "did you mean 'digits'"),
        (["train", "none.py"], "no file"),
        (["verify", "digit"], "did you mean 'digits'"),
        (["train", "digits", "--batch-size", "0"], "batch_size=0 was asked for"),
        (["train", "digits", "--micro-batch-size", "-3"], "micro_batch_size=-3 was asked for"),
        (["verify", "digits", "--micro-batch-size", "0"], "micro_batch_size=0 was asked for"),
        (["train", "digits", "--micro-batch-size", "many"], "micro_batch_size='many' was asked for"),
        (["train", "digits", "--memory", "much"], "memory='much' was asked for"),
        (["train", "digits", "--memory", "1GiB", "--micro-batch-size", "8"], "together with micro_batch_size=8"),
        (["train", "mine.py", "--memory", "200"], "weights take 84 B, gradients 84 B and 168 B are kept"),
        (["train", "digits", "--precision", "xyz"], "precision='xyz' was asked for"),
        (["train", "digits", "--max-steps", "0"], "max_steps=0 was asked for"),
        (["train", "digits", "--lr", "nan"], "lr=nan was asked for"),
        (["train", "mine.py", "--out", "mine.py"], "out='mine.py' was asked for"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = refused(capsys, *arguments)
    assert said in words
    assert [line.split(":")[0] for line in words.splitlines()] == ["asked", "found", "do"]


def test_an_unknown_option_ends_with_code_2() -> None:
    assert invoke("train", "digits", "--no-such-option").exit_code == 2


def test_a_micro_batch_larger_than_the_batch_is_fine() -> None:
    assert invoke("train", "mine.py", "--micro-batch-size", "64", "--max-steps", "1").exit_code == 0


def test_a_fault_in_the_users_file_is_shown_as_python_shows_it() -> None:
    Path("broken.py").write_text("def recipe():\n    return 1 / 0\n", encoding="utf-8")
    code = "from bigbatch.cli import main; main(['train', 'broken.py'])"
    done = in_a_process(code)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ZeroDivisionError")
    assert "return 1 / 0" in done.stderr


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_a_missing_package_is_explained(
    package: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = extras.find_spec
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == package else real(name))
    words = refused(capsys, "train", "digits")
    assert package in words
    assert 'pip install "bigbatch[train]"' in words


def test_the_command_is_imported_without_extras() -> None:
    code = (
        "import sys; [sys.modules.__setitem__(name, None) for name in ('typer', 'rich', 'accelerate', 'numpy')]; "
        "import bigbatch.cli"
    )
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_ends_with_its_own_code_and_keeps_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    import bigbatch.training.screen as screen

    class Impatient:
        is_terminal = False

        def print(self, text: str, **style: Any) -> None:
            if text.startswith("update 1"):
                raise KeyboardInterrupt

    real = screen.watched
    monkeypatch.setattr("bigbatch.cli.train.watched", lambda console: real(Impatient()))
    result = invoke("train", "mine.py", "--epochs", "3", "--no-proof")
    assert result.exit_code == 130
    assert len(Path("runs/own/metrics.csv").read_text().splitlines()) == 2
    assert Path("runs/own/model.safetensors").exists()


def test_a_terminal_gets_a_bar_and_a_pipe_gets_lines() -> None:
    from rich.console import Console

    from bigbatch.training.log import Update
    from bigbatch.training.screen import watched

    shown = {}
    for terminal in (True, False):
        console = Console(record=True, force_terminal=terminal, width=120, file=io.StringIO())
        with watched(console) as watcher:
            assert isinstance(watcher, Watcher)
            watcher.update(Update(1, 1, 10, 0.5, 0.1, 3, 4, 0, 2**20, 99.0), 4)
            watcher.update(Update(2, 1, 10, 0.25, 0.1, 3, 4, 2, None, 99.0), 4)
            watcher.metrics(1, {"accuracy": 0.5})
        shown[terminal] = console.export_text()
    for text in shown.values():
        assert all(
            word in text
            for word in ("loss 0.2500", "99 samples/s", "3 micro-batches of 4", "2 that did not fit", "accuracy 0.5")
        )
    assert "2/4" in shown[True]


def test_verify_says_equal_for_every_built_in_recipe() -> None:
    for name, size in {"digits": "30", "stdlib-lm": "2", "digit-pairs": "5"}.items():
        result = invoke("verify", name, "--micro-batch-size", size)
        assert result.exit_code == 0, result.output
        assert "equal" in result.output and "NOT equal" not in result.output


def test_verify_says_not_equal_where_it_is_not() -> None:
    """A loss that ties its samples together, declared to be a mean over samples."""
    text = OWN.replace("torch.nn.MSELoss()", "lambda outputs, targets: outputs.std()")
    Path("wrong.py").write_text(text.replace('name="own"', 'name="own", reduction="mean"'), encoding="utf-8")
    result = invoke("verify", "wrong.py", "--json")
    assert result.exit_code == 1, result.output
    assert json.loads(result.output)["equal"] is False


def test_the_version_is_known_even_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise bigbatch.cli.PackageNotFoundError(name)

    monkeypatch.setattr(bigbatch.cli, "version", missing)
    assert invoke("--version").output.strip() == "bigbatch (not installed)"


@pytest.mark.parametrize("activations", ["None", "'recompute'"])
def test_verify_judges_an_automatic_size_with_one_that_splits(activations: str) -> None:
    text = OWN.replace('name="own"', f'name="own", activations={activations}')
    Path("auto.py").write_text(text.replace('"micro_batch_size": 4', '"micro_batch_size": "auto"'), encoding="utf-8")
    for arguments in ([], ["--micro-batch-size", "auto"]):
        result = invoke("verify", "auto.py", *arguments)
        assert result.exit_code == 0, result.output
        assert "micro_batch_size=4 was chosen" in result.output
