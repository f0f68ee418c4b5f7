"""Trains a recipe: for each batch, the gradient by micro-batches; clip, step, schedule. The loop is Accelerate's."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from bigbatch.planner.plan import AUTOCAST
from bigbatch.recipes.extras import require
from bigbatch.terms import Recipe, table
from bigbatch.training.budget import budget_of
from bigbatch.training.charts import draw
from bigbatch.training.log import Record, Update, recorded
from bigbatch.training.memory import peak_bytes_of
from bigbatch.training.proof import Proof, prove
from bigbatch.training.settings import Settings
from bigbatch.training.setup import Parts, accelerator_for, first_and_last, pair, prepared
from bigbatch.training.trial import Trial
from bigbatch.training.ways import Job, job_of, samples_of

PACKAGES = ("accelerate", "matplotlib", "safetensors", "tensorboard")
MAX_NORM = 1.0


@dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
        recipe: its name.
        out: the folder it wrote.
        settings: what it was told.
        updates: updates that were tried.
        scheduler_position: updates that moved the learning rate; None without a scheduler.
        loss: the last batch's loss; None where there was none.
        metrics: the last held-out metrics.
        proof: the closing table; None where it was not asked for.
        stopped: whether it was interrupted.
        seconds: wall time of training alone.
        micro_batch_size: the last update's; None where there was none.
        tuner: what was learnt about micro-batch sizes; empty where the size was given.
        trial: the whole batch, tried for real before; None where it was not asked for.
    """

    recipe: str
    out: Path
    settings: Settings
    updates: int
    scheduler_position: int | None
    loss: float | None
    metrics: Mapping[str, float]
    proof: Proof | None
    stopped: bool
    seconds: float
    micro_batch_size: int | None = None
    tuner: Mapping[str, Any] = field(default_factory=dict)
    trial: Trial | None = None

    def to_dict(self) -> dict[str, Any]:
        """The same for machines, ready for JSON."""
        return {
            **vars(self),
            "out": str(self.out),
            "settings": asdict(self.settings),
            "metrics": dict(self.metrics),
            "proof": None if self.proof is None else self.proof.to_dict(),
            "tuner": dict(self.tuner),
            "trial": None if self.trial is None else self.trial.to_dict(),
        }

    def __str__(self) -> str:
        rows = {name.replace("_", " "): f"{value:.4g}" for name, value in self.metrics.items()}
        rows["updates"] = f"{self.updates} in {self.seconds:.1f} s"
        if self.settings.micro_batch_size == "auto" and self.micro_batch_size is not None:
            rows["micro-batch, last update"] = f"at most {self.micro_batch_size} samples, chosen by speed"
        for part in (self.proof, self.trial):
            rows |= part.rows() if part is not None else {}
        return table(rows)


@dataclass(frozen=True)
class Watcher:
    """Who is told what happens meanwhile.

    Attributes:
        update: called with each update and the number of updates planned.
        metrics: called with each epoch's number and its held-out metrics.
        note: called with a sentence when something else begins or ends.
    """

    update: Callable[[Update, int], None] = lambda update, updates: None
    metrics: Callable[[int, Mapping[str, float]], None] = lambda epoch, metrics: None
    note: Callable[[str], None] = lambda text: None


def train(
    recipe: Recipe, settings: Settings, out: Path, watcher: Watcher | None = None, trial: Trial | None = None
) -> Result:
    """Trains the recipe and writes metrics.csv, tensorboard/, model.safetensors, chart.png and run.json.

    Args:
        recipe: the job; its model is trained in place.
        settings: see `decide`.
        out: an empty folder, see `fresh`.
        watcher: is told what happens meanwhile.
        trial: what was tried before, to be kept with the rest.

    Returns:
        how the run ended. An interruption (Ctrl-C) ends it early; what was learnt so far is kept.

    Raises:
        MissingExtra: a package is missing.
        BigBatchError: the recipe cannot be run as asked.
    """
    require(*PACKAGES)
    from accelerate.utils import set_seed

    watcher = watcher or Watcher()
    accelerator, job = _checked(recipe, settings, out)
    set_seed(settings.seed)
    proof = _proof(recipe, settings, job, watcher) if settings.proof else None
    set_seed(settings.seed)  # with or without a proof, the run draws the same numbers
    parts = prepared(recipe, settings, job, accelerator)
    updates: list[Update] = []
    metrics: dict[str, float] = {}
    stopped, start = False, time.perf_counter()
    accelerator.init_trackers("tensorboard")
    try:
        with recorded(out, accelerator.log) as record:
            for update in _updates(parts, recipe, settings, record, metrics, watcher):
                updates.append(update)
    except KeyboardInterrupt:
        stopped = True
        watcher.note("interrupted; what was learnt so far is kept")
    finally:
        accelerator.end_training()
    seconds = time.perf_counter() - start
    position = parts.scheduler.scheduler.last_epoch if parts.scheduler is not None else None
    loss, size = (updates[-1].loss, updates[-1].micro_batch_size) if updates else (None, None)
    learnt = (size, parts.way.state(), trial)
    result = Result(recipe.name, out, settings, len(updates), position, loss, metrics, proof, stopped, seconds, *learnt)
    _keep(result, job, updates)
    return result


def check(recipe: Recipe, settings: Settings) -> None:
    """Refuses what cannot be run as asked, before anything is written.

    Raises:
        MissingExtra: a package is missing.
        BigBatchError: as in `train`; a budget too small for weights, gradients and optimizer state, for instance.
    """
    require(*PACKAGES)
    _checked(recipe, settings, Path())


def _checked(recipe: Recipe, settings: Settings, out: Path) -> tuple[Any, Job]:
    accelerator = accelerator_for(settings, out)
    job = job_of(recipe, accelerator.device)
    if (budget := budget_of(job, settings.memory)) is not None:
        budget.refuse_too_small(settings.memory)
    return accelerator, job


def _proof(recipe: Recipe, settings: Settings, job: Job, watcher: Watcher) -> Proof | None:
    """The closing table; None, and a note, where a model cannot be copied or run in float64: it is trained anyway."""
    watcher.note("measuring one whole batch, this run's way and the usual loop by hand")
    job.model.train()
    first, last = first_and_last(recipe, settings)
    try:
        size, autocast = settings.micro_batch_size, AUTOCAST[settings.precision]
        return prove(job, first, last, size, autocast, settings.memory)
    except (RuntimeError, TypeError) as error:
        watcher.note(f"no closing table: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
        return None


def _updates(
    parts: Parts, recipe: Recipe, settings: Settings, record: Record, metrics: dict[str, float], watcher: Watcher
) -> Iterator[Update]:
    """Yields each update when it is done; puts held-out metrics into `metrics` after every epoch."""
    planned = settings.updates(len(recipe.train_data))
    step = 0
    for epoch in range(1, settings.epochs + 1):
        parts.job.model.train()
        for batch in parts.loader:
            step += 1
            update = _update(parts, settings, step, epoch, *pair(batch))
            record(update)
            watcher.update(update, planned)
            yield update
            if step == planned:
                break
        parts.job.model.eval()
        with torch.no_grad():
            metrics.update(recipe.metrics(parts.job.model, recipe.eval_data))
        parts.accelerator.log(metrics, step)
        watcher.metrics(epoch, metrics)
        if step == planned:
            return


def _update(parts: Parts, settings: Settings, step: int, epoch: int, inputs: Any, targets: Any) -> Update:
    """One update: the whole batch's gradient, clipped once, then one step; a skipped step moves no schedule."""
    start = time.perf_counter()
    lr = parts.optimizer.param_groups[0]["lr"]
    peak: int | None = None
    if step == 1 or parts.job.device.type == "cuda":
        loss, peak = peak_bytes_of(lambda: parts.way(inputs, targets), parts.job.device)
    else:
        loss = parts.way(inputs, targets)
    parts.accelerator.clip_grad_norm_(parts.parameters, MAX_NORM)
    parts.optimizer.step()
    if parts.scheduler is not None and not parts.accelerator.optimizer_step_was_skipped:
        parts.scheduler.step()
    parts.optimizer.zero_grad()
    samples, number = samples_of((inputs, targets)), loss.item()
    per_second = samples / max(time.perf_counter() - start, 1e-9)
    used = parts.way.used()
    return Update(step, epoch, samples, number, lr, **vars(used), peak_bytes=peak, samples_per_s=per_second)


def _keep(result: Result, job: Job, updates: list[Update]) -> None:
    """Writes what is written at the end."""
    from safetensors.torch import save_model

    save_model(job.model, str(result.out / "model.safetensors"))
    if updates:
        draw(updates, result.proof.whole_peak_bytes if result.proof is not None else None, result.out / "chart.png")
    text = json.dumps({**result.to_dict(), "torch": torch.__version__}, indent=2)
    (result.out / "run.json").write_text(text + "\n", encoding="utf-8")
