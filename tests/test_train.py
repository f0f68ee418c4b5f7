"""A run writes what it says, moves its schedule once an update, repeats itself, and measures what it claims."""

from __future__ import annotations

import csv
import json
import math
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigbatch.cli import application
from bigbatch.errors import BigBatchError, OptionError, RecipeError
from bigbatch.recipes import load
from bigbatch.terms import Recipe
from bigbatch.training import Settings, check, decide, train
from bigbatch.training.folder import fresh
from bigbatch.training.log import Update
from bigbatch.training.loop import Result, Watcher
from bigbatch.training.memory import peak_bytes_of
from bigbatch.training.ours import Ours, Used, by_bigbatch
from bigbatch.training.proof import prove
from bigbatch.training.setup import first_and_last
from bigbatch.training.trial import Trial, tried
from bigbatch.training.ways import (
    Job,
    by_hand,
    copied,
    cuts,
    job_of,
    named_parameters,
    rows,
    samples_of,
    whole_batch,
)

CPU = torch.device("cpu")


def small(samples: int = 20, **changes: Any) -> Recipe:
    """Twenty samples with three classes, of which the loss weighs one more than the others."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    recipe = Recipe(
        model=nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
        loss_fn=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2])),
        train_data=data,
        eval_data=data,
        optimizer=lambda parameters, lr: torch.optim.SGD(parameters, lr=lr),
        scheduler=lambda optimizer, updates: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        metrics=lambda model, held_out: {"training": float(model.training)},
        defaults={"batch_size": 8, "micro_batch_size": 3, "epochs": 2, "lr": 0.1, "precision": "fp32", "seed": 0},
        name="small",
    )
    return replace(recipe, **changes)


def pairs(samples: int = 20) -> Recipe:
    """Door 2: each sample is compared with all others of its batch."""
    return small(
        samples, loss_fn=lambda outputs, targets: (outputs @ outputs.T).logsumexp(1).mean(), activations="keep"
    )


def run(recipe: Recipe, out: Path, **asked: Any) -> Result:
    out.mkdir(exist_ok=True, parents=True)
    return train(recipe, decide(recipe.defaults, asked), out)


def written(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_a_tiny_run_writes_all_its_files(tmp_path: Path) -> None:
    recipe = load("digits")
    result = run(recipe, tmp_path, max_steps=2)
    lines = written(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"metrics.csv", "model.safetensors", "chart.png", "run.json"}
    assert list((tmp_path / "tensorboard").glob("events*"))
    assert len(lines) == result.updates == result.scheduler_position == 2
    assert [int(line["step"]) for line in lines] == [1, 2]
    assert int(lines[0]["peak_bytes"]) > 0
    assert lines[1]["peak_bytes"] == ""  # on the CPU it is counted once
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    saved, report = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "run.json").read_text())
    assert all(torch.equal(saved[name], value) for name, value in recipe.model.state_dict().items())
    assert report["settings"]["batch_size"] == 500
    assert report["metrics"] == result.metrics
    assert report["proof"]["difference"] < 1e-12 < 1e-3 < report["proof"]["hand_difference"]
    assert report["proof"]["last_batch"] == 437
    assert 3 * report["proof"]["run_peak_bytes"] < report["proof"]["whole_peak_bytes"]
    assert "gradient off by, this run" in str(result)


@pytest.mark.parametrize("recipe", [small, pairs])
def test_updates_are_those_of_plain_pytorch(recipe: Any, tmp_path: Path) -> None:
    """20 samples in batches of 8: the third batch of each epoch holds 4, and is used."""
    job, plain = recipe(), recipe()
    orders: list[list[Any]] = []
    collate = torch.utils.data.default_collate

    def remembering(samples: Any) -> Any:
        orders.append(samples)
        return collate(samples)

    job.model.double(), plain.model.double()
    for one in (job, plain):
        if isinstance(one.loss_fn, nn.Module):
            one.loss_fn.double()
        one.train_data.tensors = tuple(t.double() if t.is_floating_point() else t for t in one.train_data.tensors)
    result = run(replace(job, collate=remembering), tmp_path, proof=False)
    optimizer = plain.optimizer(plain.model.parameters(), 0.1)
    scheduler, losses = plain.scheduler(optimizer, 6), []
    for samples in orders:
        inputs, targets = collate(samples)
        optimizer.zero_grad()
        loss = plain.loss_fn(plain.model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert [len(samples) for samples in orders] == [8, 8, 4] * 2
    assert result.updates == result.scheduler_position == 6
    assert [float(line["loss"]) for line in written(tmp_path)] == pytest.approx(losses, rel=1e-12)
    for ours, theirs in zip(job.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_the_same_seed_is_the_same_run_and_another_is_not(tmp_path: Path) -> None:
    losses = {}
    for name, seed in {"first": 3, "again": 3, "other": 4}.items():
        recipe = load("digit-pairs", seed)
        run(recipe, tmp_path / name, seed=seed, max_steps=2, batch_size=40, proof=name == "again")
        losses[name] = [line["loss"] for line in written(tmp_path / name)]
    assert losses["first"] == losses["again"], "the proof must not move the random numbers of the run"
    assert losses["first"] != losses["other"]


def test_the_proof_sees_the_batches_of_the_run(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    def collate(samples: Any) -> tuple[Tensor, Tensor]:
        seen.append(torch.stack([sample for sample, _ in samples]))
        return seen[-1], torch.stack([target for _, target in samples])

    recipe = small(collate=collate)
    run(recipe, tmp_path, epochs=1)
    first, last, *batches = seen
    assert first.equal(batches[0])
    assert last.equal(batches[-1])


def test_a_skipped_step_moves_no_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import Accelerator

    monkeypatch.setattr(Accelerator, "optimizer_step_was_skipped", property(lambda self: True))
    result = run(small(), tmp_path, proof=False)
    assert (result.updates, result.scheduler_position) == (6, 0)


def test_an_interruption_keeps_what_was_learnt(tmp_path: Path) -> None:
    def update(now: Update, planned: int) -> None:
        if now.step == 2:
            raise KeyboardInterrupt

    notes: list[str] = []
    recipe = small()
    result = train(recipe, decide(recipe.defaults, {}), tmp_path, Watcher(update=update, note=notes.append))
    assert result.stopped
    assert len(written(tmp_path)) == 2
    assert json.loads((tmp_path / "run.json").read_text())["stopped"] is True
    assert (tmp_path / "model.safetensors").exists()
    assert any("interrupted" in note for note in notes)


def test_metrics_are_measured_in_eval_mode_without_gradients(tmp_path: Path) -> None:
    assert run(small(), tmp_path, epochs=1).metrics == {"training": 0.0}


def test_half_precision_trains_and_keeps_the_weights_dtype(tmp_path: Path) -> None:
    recipe = load("digits")
    result = run(recipe, tmp_path / "bf16", precision="bf16", max_steps=2, batch_size=50)
    assert math.isfinite(result.loss or math.nan)
    assert all(parameter.dtype == torch.float32 for parameter in recipe.model.parameters())
    fp32 = run(load("digits"), tmp_path / "fp32", max_steps=2, batch_size=50, proof=False)
    assert result.loss != fp32.loss  # bf16 was really used
    assert result.loss == pytest.approx(fp32.loss, rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can compute in fp16")
def test_fp16_without_a_gpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"precision='fp16' was asked for.*pass precision fp32 or bf16"):
        run(small(), tmp_path, precision="fp16")


@pytest.mark.gpu
def test_fp16_trains_on_a_gpu(tmp_path: Path) -> None:
    for name in ("digits", "digit-pairs"):
        result = run(load(name), tmp_path / name, precision="fp16", max_steps=4, batch_size=60)
        assert result.loss is not None and math.isfinite(result.loss)
        assert all(int(line["peak_bytes"]) > 0 for line in written(tmp_path / name))


def test_a_batch_that_is_no_pair_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"\(inputs, targets\)"):
        run(small(collate=lambda samples: torch.stack([sample for sample, _ in samples])), tmp_path)


def test_a_loss_with_weights_of_its_own_learns_too(tmp_path: Path) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sharpness = nn.Parameter(torch.ones(()))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return nn.functional.cross_entropy(outputs * self.sharpness, targets)

    loss_fn = Scaled()
    result = run(small(loss_fn=loss_fn, reduction="mean"), tmp_path)
    assert loss_fn.sharpness.item() != 1.0
    assert result.proof is not None and result.proof.difference is not None
    assert result.proof.difference < 1e-12


@pytest.mark.parametrize("recipe", [small, pairs])
def test_the_closing_table_is_right(recipe: Any) -> None:
    """Its three gradients, worked out again with nothing but PyTorch."""
    job = job_of(recipe(), CPU)
    settings = Settings(batch_size=8, micro_batch_size=3)
    first, last = first_and_last(recipe(), settings)
    proof = prove(job, first, last, 3, None)
    wide = copied(job, torch.float64)

    def gradient(pieces: list[tuple[int, int]], divisor: int, batch: Any) -> list[Tensor]:
        parameters = list(wide.model.parameters())
        losses = [wide.loss_fn(wide.model(batch[0][a:b].double()), batch[1][a:b]) / divisor for a, b in pieces]
        return list(torch.autograd.grad(sum(losses), parameters))

    def off(left: list[Tensor], right: list[Tensor]) -> float:
        least = 1e-3 * torch.cat([g.flatten() for g in right]).norm()
        return max(float((a - b).norm() / torch.maximum(b.norm(), least)) for a, b in zip(left, right, strict=True))

    by_three = gradient([(0, 3), (3, 6), (6, 8)], 3, first)
    assert proof.difference is not None and proof.difference < 1e-12
    assert proof.hand_difference == pytest.approx(off(by_three, gradient([(0, 8)], 1, first)), rel=1e-6)
    right, by_hand_last = gradient([(0, 4)], 1, last), gradient([(0, 3), (3, 4)], 3, last)
    assert proof.last_hand_difference == pytest.approx(off(by_hand_last, right), rel=1e-6)
    assert (proof.batch, proof.micro_batch, proof.micro_batches, proof.last_batch) == (8, 3, 3, 4)


def test_the_table_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    import bigbatch.training.proof as proof

    job = job_of(small(), CPU)
    first, last = first_and_last(small(), Settings(batch_size=8))

    def wrong(job: Job, size: int, around: Any = None, memory: Any = None) -> Ours:
        return Ours(by_hand(job, size, 3, around), lambda: Used(3, 3, 0), dict)

    monkeypatch.setattr(proof, "by_bigbatch", wrong)
    found = prove(job, first, last, 3, None)
    assert found.difference is not None and found.difference > 1e-3


def test_dropout_draws_the_same_numbers_for_each_way() -> None:
    recipe = small(model=nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)), loss_fn=nn.MSELoss())
    data = (torch.randn(9, 4), torch.randn(9, 3))
    proof = prove(job_of(recipe, CPU), data, data, 3, None)
    assert proof.difference is not None and proof.difference < 1e-12
    assert proof.hand_difference is not None and proof.hand_difference < 1e-12  # equal pieces: the usual loop is right
    assert proof.unfollowed == ()


def test_the_proof_leaves_weights_gradients_and_luck_alone() -> None:
    recipe = small()
    job = job_of(recipe, CPU)
    before = {name: value.clone() for name, value in recipe.model.state_dict().items()}
    luck = torch.get_rng_state()
    prove(job, *first_and_last(recipe, Settings(batch_size=8)), 3, None)
    assert all(torch.equal(value, before[name]) for name, value in recipe.model.state_dict().items())
    assert all(parameter.grad is None for parameter in recipe.model.parameters())
    assert torch.equal(luck, torch.get_rng_state())


def test_a_batch_too_large_for_the_machine_is_not_run_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    import bigbatch.training.proof as proof

    monkeypatch.setattr(proof, "free_bytes", lambda device: 1000)
    monkeypatch.setattr(proof, "whole_batch", lambda job: pytest.fail("the whole batch was run"))
    found = prove(job_of(small(), CPU), *first_and_last(small(), Settings(batch_size=8)), 3, None)
    assert (found.whole_peak_bytes, found.difference) == (None, None)
    assert "not run" in str(found)


def test_a_model_with_its_own_loss_and_a_loss_with_a_count_are_proven_too() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, rows: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.layer(rows), labels)}

    def summed(outputs: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction="sum") / count

    data = torch.randn(8, 4), torch.randint(0, 3, (8,))
    own = Job(Own(), None, "mean", None, CPU)
    counted = Job(nn.Linear(4, 3), summed, lambda inputs, targets: targets.numel(), None, CPU)
    for job, batch in [(own, ({"rows": data[0], "labels": data[1]}, None)), (counted, data)]:
        proof = prove(job, batch, batch, 3, None)
        assert proof.difference is not None and proof.difference < 1e-12
        assert proof.hand_difference is not None and proof.hand_difference > 1e-3


def test_a_model_that_cannot_be_proven_is_trained_all_the_same(tmp_path: Path) -> None:
    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.layer(rows.float())  # refuses weights in float64

    notes: list[str] = []
    recipe = small(model=Single())
    result = train(recipe, decide(recipe.defaults, {"max_steps": 1}), tmp_path, Watcher(note=notes.append))
    assert (result.updates, result.proof) == (1, None)
    assert any("no closing table: RuntimeError" in note for note in notes)


def test_peak_memory_is_counted_from_within() -> None:
    def work() -> int:
        held = torch.zeros(1000)
        return len(held + held)

    assert peak_bytes_of(work, CPU) == (1000, 8000)


@given(st.integers(1, 60), st.integers(1, 70))
def test_cuts_hold_every_sample_once(samples: int, size: int) -> None:
    pieces = list(cuts(samples, size))
    assert [i for first, last in pieces for i in range(first, last)] == list(range(samples))
    assert all(last - first == size for first, last in pieces[:-1])


@given(st.integers(1, 40), st.integers(1, 45))
def test_three_ways_agree_where_pieces_are_equal(samples: int, size: int) -> None:
    job = copied(job_of(small(samples, loss_fn=nn.MSELoss()), CPU), torch.float64)
    batch = torch.randn(samples, 4).double(), torch.randn(samples, 3).double()
    found = []
    for way in (whole_batch(job), by_bigbatch(job, size), by_hand(job, size, math.ceil(samples / size))):
        job.model.zero_grad()
        way(*batch)
        found.append(torch.cat([p.grad.flatten() for p in named_parameters(job).values() if p.grad is not None]))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-13)
    if samples % size == 0 or samples < size:
        torch.testing.assert_close(found[2], found[0], rtol=1e-12, atol=1e-13)


def test_rows_leave_alone_what_has_none() -> None:
    batch = {"ids": torch.arange(6), "scale": torch.tensor(2.0), "word": "all", "classes": torch.ones(3)}
    assert samples_of(batch) == 6
    cut = rows(batch, 2, 4)
    assert cut["ids"].tolist() == [2, 3]
    assert (cut["scale"], cut["word"], len(cut["classes"])) == (2.0, "all", 3)


@pytest.mark.parametrize(
    "asked",
    [
        {"batch_size": 0},
        {"micro_batch_size": -1},
        {"micro_batch_size": "some"},
        {"memory": "much"},
        {"memory": "1.5"},
        {"memory": 0},
        {"epochs": 0},
        {"max_steps": 0},
        {"lr": -0.1},
        {"lr": math.nan},
        {"lr": math.inf},
        {"precision": "xyz"},
        {"seed": -1},
        {"seed": 2**32},
        {"batch_size": True},
        {"batch_size": 2.5},
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(asked: dict[str, Any]) -> None:
    (name,) = asked
    with pytest.raises(BigBatchError, match=f"{name}=.* was asked for"):
        decide({}, asked)


def test_what_is_asked_overrides_what_the_recipe_says() -> None:
    settings = decide({"batch_size": 10, "lr": 0.5}, {"batch_size": 20, "lr": None, "micro_batch_size": 100})
    assert (settings.batch_size, settings.lr, settings.micro_batch_size) == (20, 0.5, 100)


@given(st.integers(1, 50), st.integers(1, 60), st.integers(1, 5), st.none() | st.integers(1, 100))
def test_updates_are_whole_epochs_or_what_was_asked(samples: int, batch: int, epochs: int, most: int | None) -> None:
    settings = Settings(batch_size=batch, epochs=epochs, max_steps=most)
    counted = sum(1 for _ in range(epochs) for _ in range(0, samples, batch))
    assert settings.updates(samples) == (counted if most is None else min(counted, most))


def test_folders_are_fresh_and_numbered(tmp_path: Path) -> None:
    names = []
    for _ in range(3):
        folder = fresh(tmp_path / "runs" / "digits")
        (folder / "run.json").write_text("{}")
        names.append(folder.name)
    assert names == ["digits", "digits-2", "digits-3"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match="a file of that name"):
        fresh(tmp_path / "file")
    with pytest.raises(OptionError, match="Not a directory"):
        fresh(tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["small", "joined"])
def test_an_automatic_run_under_a_budget_writes_what_it_used(name: str, tmp_path: Path) -> None:
    recipe = small(64) if name == "small" else replace(pairs(64), activations="recompute")
    result = run(recipe, tmp_path, memory="4KiB", batch_size=64, epochs=6)
    lines, report = written(tmp_path), json.loads((tmp_path / "run.json").read_text())
    sizes = [int(line["micro_batch_size"]) for line in lines]
    pieces = [int(line["micro_batches"]) for line in lines]
    assert sizes[0] < 64  # the whole batch needs more than 4 KiB
    assert [math.ceil(64 / size) for size in sizes] == pieces
    assert {line["retries"] for line in lines} == {"0"}
    assert report["settings"]["micro_batch_size"] == "auto"
    assert report["settings"]["memory"] == "4KiB"
    assert report["micro_batch_size"] == sizes[-1]
    assert report["tuner"]["windows"] == 6
    assert report["tuner"]["seen"][-1]["size"] == sizes[-1]
    assert report["proof"]["automatic"] and report["proof"]["budget"]["bytes"] == 4096
    assert report["proof"]["difference"] < 1e-12
    assert "samples, chosen for 4.00 KiB" in str(result)
    assert "micro-batch, last update" in str(result)


def test_an_automatic_run_has_the_losses_of_any_other(tmp_path: Path) -> None:
    for name, asked in {"auto": {"memory": "4KiB"}, "free": {"micro_batch_size": "auto"}, "number": {}}.items():
        run(small(), tmp_path / name, proof=False, **asked)
    losses = {name: [float(line["loss"]) for line in written(tmp_path / name)] for name in ("auto", "free", "number")}
    assert losses["auto"] == pytest.approx(losses["number"], rel=1e-5)
    assert losses["free"] == pytest.approx(losses["number"], rel=1e-5)
    assert losses["number"] != pytest.approx([0.0] * 6, rel=1e-5)
    assert [int(line["micro_batch_size"]) for line in written(tmp_path / "number")] == [3, 3, 2] * 2
    assert int(written(tmp_path / "free")[0]["micro_batch_size"]) == 8  # no limit is known: the whole batch comes first


def test_a_budget_that_weights_and_optimizer_fill_is_refused(tmp_path: Path) -> None:
    """67 numbers of 4 bytes, their gradients and two moments each: 1072 bytes before the first sample."""
    assert sum(p.numel() for p in small().model.parameters()) == 67
    with pytest.raises(OptionError, match="memory=1072 was asked for.*weights take 268 B"):
        run(small(loss_fn=nn.CrossEntropyLoss()), tmp_path, memory=1072)
    assert run(small(loss_fn=nn.CrossEntropyLoss()), tmp_path, memory=1073, proof=False, max_steps=1).updates == 1


def test_the_table_says_whether_the_counted_peak_kept_to_the_budget() -> None:
    job = job_of(small(64), CPU)
    batch = first_and_last(small(64), Settings(batch_size=64))
    for memory, exceeded in {"1200": True, "1MiB": False}.items():
        proof = prove(job, *batch, "auto", None, memory)
        assert proof.budget is not None
        total = proof.run_peak_bytes + proof.budget.weights + proof.budget.optimizer
        assert (total > proof.budget.bytes) == exceeded
        assert ("EXCEEDED" in str(proof)) == exceeded
    assert "memory budget" not in str(prove(job, *batch, 3, None))
    assert "chosen by what fits" in str(prove(job, *batch, "auto", None))


def test_an_automatic_size_needs_activations_that_are_recomputed(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="activations='keep' was asked for with an automatic size"):
        run(pairs(), tmp_path, micro_batch_size="auto")


def test_a_budget_and_a_number_put_each_other_aside() -> None:
    defaults = {"micro_batch_size": 64, "memory": "1GiB"}
    assert decide({"micro_batch_size": 64}, {}).micro_batch_size == 64
    assert decide({"micro_batch_size": 64}, {"memory": "2GiB", "micro_batch_size": "auto"}).memory == "2GiB"
    assert decide(defaults, {}).micro_batch_size == "auto"
    asked = decide(defaults, {"micro_batch_size": 5})
    assert (asked.micro_batch_size, asked.memory) == (5, None)
    with pytest.raises(OptionError, match="memory='2GiB' was asked for together with micro_batch_size=5"):
        decide({}, {"memory": "2GiB", "micro_batch_size": 5})


@pytest.mark.skipif(platform.system() != "Linux", reason="a memory limit needs Linux")
def test_the_whole_batch_is_really_refused_and_micro_batches_really_fit() -> None:
    said: list[str] = []
    trial = tried(said.append)
    assert trial.why_not is None, trial.why_not
    assert "can't allocate memory" in (trial.refusal or "")
    assert trial.retries is not None and trial.retries >= 1
    assert trial.micro_batch_size is not None and trial.micro_batch_size < trial.samples / 2
    assert list(trial.rows()) == ["tried for real, one whole batch", "tried for real, automatic size"]
    assert all("\n" not in line for line in said) and len(said) == 3


@pytest.mark.parametrize(
    ("found", "why_not"),
    [
        ({"micro_batch_size": 8000, "retries": 0}, "the limit was large enough for the whole batch"),
        ({"refusal": "no"}, "the limit was too small for the smallest micro-batch"),
    ],
)
def test_a_limit_that_shows_nothing_is_said_to(
    found: dict[str, Any], why_not: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bigbatch.training.trial as module

    monkeypatch.setattr(module.platform, "system", lambda: "Linux")
    monkeypatch.setattr(module, "_in_a_child", lambda trial: found)
    trial = tried(lambda text: None)
    assert trial.rows() == {"tried for real": f"not tried: {why_not}"}


@pytest.mark.parametrize("fault", ["system", "interpreter", "silence"])
def test_a_trial_that_cannot_be_made_stops_nobody(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import bigbatch.training.trial as module

    if fault == "system":
        monkeypatch.setattr(module.platform, "system", lambda: "Darwin")
    else:
        monkeypatch.setattr(module.platform, "system", lambda: "Linux")
        program = "/no/such/python" if fault == "interpreter" else "true"
        monkeypatch.setattr(module.sys, "executable", program)
    said: list[str] = []
    trial = tried(said.append)
    assert trial.why_not is not None and trial.refusal is None
    assert "not tried" in said[-1]


def test_a_trial_is_kept_with_the_rest(tmp_path: Path) -> None:
    recipe = small()
    trial = Trial(refusal="no", micro_batch_size=500, retries=2)
    result = train(recipe, decide(recipe.defaults, {"max_steps": 1, "proof": False}), tmp_path, trial=trial)
    assert "tried for real, automatic size" in str(result)
    assert json.loads((tmp_path / "run.json").read_text())["trial"]["retries"] == 2


def test_a_budget_that_is_too_small_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    job = small(loss_fn=nn.CrossEntropyLoss())
    before = {name: tensor.clone() for name, tensor in job.model.state_dict().items()}
    with pytest.raises(OptionError, match="memory=1072 was asked for.*weights take 268 B"):
        check(job, decide(job.defaults, {"memory": 1072, "cpu": True}))
    assert not list(tmp_path.iterdir()) and all(torch.equal(job.model.state_dict()[n], t) for n, t in before.items())
    check(job, decide(job.defaults, {"memory": 1073, "cpu": True}))


def test_the_command_makes_no_folder_for_a_budget_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match="memory='4KiB' was asked for"):
        application()(["train", "digits", "--memory", "4KiB", "--cpu"], standalone_mode=False)
    assert not list(tmp_path.iterdir())
