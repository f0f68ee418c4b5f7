"""`bigbatch plan`: options reach the planner, the answer is a table, JSON or a picture, and the code says whether."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import bigbatch
from bigbatch.cli import application, main
from bigbatch.cli import plan as command
from bigbatch.core.live import Live
from bigbatch.planner import Plan
from bigbatch.planner.cards import card
from bigbatch.recipes import load
from bigbatch.training.settings import decide
from bigbatch.training.setup import first_and_last

OWN = """
import torch
from bigbatch import Recipe

def recipe():
    data = torch.utils.data.TensorDataset(torch.randn(10, 3), torch.randn(10, 1))
    return Recipe(
        model=torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)), loss_fn=torch.nn.MSELoss(),
        train_data=data, eval_data=data, optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
        metrics=lambda model, data: {}, name="own", defaults={"batch_size": 10, "micro_batch_size": 4},
    )
"""
MIB = 2**20


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test runs in an empty folder, with one recipe file of a user's own, on a machine without a card."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "mine.py").write_text(OWN, encoding="utf-8")


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(application(), ["plan", *arguments])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command asks of the planner, whose answer stays the real one."""
    kept: dict[str, Any] = {}
    real = command.plan

    def kept_plan(*arguments: Any, **options: Any) -> Plan:
        kept.update(options, arguments=arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(command, "plan", kept_plan)
    return kept


def test_help_names_the_command() -> None:
    assert "plan " in CliRunner().invoke(application(), ["--help"]).output
    assert "--gpu" in invoke("--help").output


# A budget in which the whole batch does not fit and micro-batches do, one with room for all, one too small for weights.
BUDGETS = {
    "digits": ("10MB", "1GB", "100KB"),
    "stdlib-lm": ("10MB", "1GB", "2MB"),
    "digit-pairs": ("30MB", "1GB", "1MB"),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_every_built_in_recipe_has_its_plan(name: str) -> None:
    tight, roomy, hopeless = BUDGETS[name]
    some = invoke(name, "--memory", tight)
    assert some.exit_code == 0, some.output
    assert "> micro-batches" in some.output and "whole batch at once  no size fits" in some.output
    assert "> whole batch at once" in invoke(name, "--memory", roomy).output
    none = invoke(name, "--memory", hopeless)
    assert none.exit_code == 2
    assert "Nothing fits: weights, gradients and AdamW need" in none.output and ">" not in none.output


def test_the_recommended_size_takes_what_was_predicted() -> None:
    """The oracle is the run itself, its storages counted one by one; a larger size does not fit."""
    told = json.loads(invoke("stdlib-lm", "--memory", "10MB", "--json").output)
    chosen, job = told["rungs"][told["chosen"]], load("stdlib-lm", None)
    (inputs, targets), _ = first_and_last(job, decide(job.defaults, {}))
    always = sum(told["fixed"].values())

    def counted(size: int) -> int:
        door = bigbatch.Accumulator(job.model, job.loss_fn, micro_batch_size=size)
        door.backward(inputs, targets)  # gradients are there from now on, as the fixed part says
        with Live() as live:
            door.backward(inputs, targets)
        return live.peak_bytes + always + inputs.nbytes + targets.nbytes

    assert chosen["peak_bytes"] == pytest.approx(counted(chosen["micro_batch_size"]), rel=0.1)
    assert counted(2 * chosen["micro_batch_size"]) > told["memory_bytes"]


def test_json_is_json_and_nothing_else() -> None:
    for memory, code in (("1GiB", 0), ("100", 2)):
        result = invoke("mine.py", "--memory", memory, "--json")
        assert result.exit_code == code
        told = json.loads(result.output)
        assert told["fits"] is (code == 0) and told["batch_size"] == 10
        assert {rung["optimizer"] for rung in told["rungs"][:2]} == {"AdamW"}


def test_what_is_asked_reaches_the_planner(asked: dict[str, Any]) -> None:
    assert invoke("mine.py", "--memory", "1GiB").exit_code == 0
    assert (asked["batch_size"], asked["memory"], asked["precision"]) == (10, "1GiB", "fp32")
    assert (asked["device"], asked["card"], asked["reduction"]) == ("cpu", "the CPU", "auto")
    result = invoke("mine.py", "--gpu", "4060", "--batch-size", "99", "--precision", "bf16")
    assert (asked["batch_size"], asked["memory"]) == (99, card("4060").memory_bytes)
    assert (asked["device"], asked["card"], asked["precision"]) == ("cuda", "RTX 4060 8GB", "bf16")
    assert "on RTX 4060 8GB" in result.output and "autocast=torch.bfloat16" in result.output


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        ("0.5", card("T4").memory_bytes // 2),
        ("6GiB", "6GiB"),
        ("1.5", "1.5"),
        ("1.0", card("T4").memory_bytes),
        ("1", "1"),
    ],
)
def test_a_fraction_is_one_of_the_card(memory: str | None, found: Any) -> None:
    assert command.memory_of(memory, card("T4")) == found
    assert memory is None or command.memory_of(memory, None) == memory


def test_a_card_that_is_there_is_planned_for(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    assert invoke("mine.py", "--memory", "8GiB").exit_code == 0
    assert (asked["device"], asked["card"]) == ("cuda", None)


def test_a_picture_is_drawn_also_of_a_refusal() -> None:
    for memory, code in (("1GiB", 0), ("100", 2)):
        assert invoke("mine.py", "--memory", memory, "--out", f"{code}.png").exit_code == code
        assert Path(f"{code}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digit", "--memory", "1GB"], "did you mean 'digits'"),
        (["mine.py"], "neither memory nor gpu"),
        (["mine.py", "--memory", "much"], "memory='much' was asked for"),
        (["mine.py", "--gpu", "RTX 4061"], "RTX 4060 8GB"),
        (["mine.py", "--gpu", "A100"], "A100 40GB, A100 80GB"),
        (["mine.py", "--memory", "1GB", "--batch-size", "0"], "batch_size=0 was asked for"),
        (["mine.py", "--memory", "1GB", "--precision", "xyz"], "precision='xyz' was asked for"),
        (["mine.py", "--memory", "1GB", "--out", "plan.gif"], "end it with .png"),
        (["mine.py", "--memory", "1GB", "--out", f"none{os.sep}plan.png"], "no folder 'none'"),
        (["mine.py", "--memory", "1GB", "--out", "folder.png"], "it is a folder"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("folder.png").mkdir()
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    words = capsys.readouterr().err
    assert ended.value.code == 2 and said in words
    assert [line.split(":")[0] for line in words.splitlines()] == ["asked", "found", "do"]


def test_the_plan_is_public_and_applies() -> None:
    """The same through the library: the door that a plan builds takes one step."""
    job = load("mine.py", None)
    inputs, targets = torch.randn(10, 3), torch.randn(10, 1)
    found = bigbatch.plan(job.model, job.loss_fn, inputs, targets, batch_size=10, memory="1MiB")
    assert isinstance(found, bigbatch.Plan)
    found.apply().backward(inputs, targets)
    ours = job.model[0].weight.grad.clone()
    job.model.zero_grad()
    job.loss_fn(job.model(inputs), targets).backward()
    torch.testing.assert_close(ours, job.model[0].weight.grad)
    with pytest.raises(bigbatch.BigBatchError):
        bigbatch.plan(job.model, job.loss_fn, inputs, targets, batch_size=10, memory=100).apply()
