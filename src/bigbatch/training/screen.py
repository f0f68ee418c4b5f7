"""What a person sees of a run: a live bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bigbatch.core.units import format_bytes
from bigbatch.training.log import Update
from bigbatch.training.loop import Watcher


def metrics_line(epoch: int, metrics: Mapping[str, float]) -> str:
    """One epoch's held-out metrics.

    >>> metrics_line(3, {"accuracy": 0.98765, "held_out_loss": 0.05})
    'epoch 3: accuracy 0.9877, held out loss 0.05'
    """
    return f"epoch {epoch}: " + ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


def update_line(update: Update, peak_bytes: int | None) -> str:
    """One update, with the last peak that was counted.

    >>> update_line(Update(1, 1, 500, 2.3, 0.1, 8, 63, 0, None, 1234.5), 2**20)
    'loss 2.3000, 1234 samples/s, 8 micro-batches of 63, peak 1.00 MiB'
    """
    size = f"{update.micro_batches} micro-batches of {update.micro_batch_size}"
    retries = f" after {update.retries} that did not fit" if update.retries else ""
    peak = "" if peak_bytes is None else f", peak {format_bytes(peak_bytes)}"
    return f"loss {update.loss:.4f}, {update.samples_per_s:.0f} samples/s, {size}{retries}{peak}"


@contextmanager
def watched(console: Any) -> Iterator[Watcher]:
    """A watcher that shows on a `rich.console.Console`."""
    with _bar(console) if console.is_terminal else _lines(console) as watcher:
        yield watcher


@contextmanager
def _lines(console: Any) -> Iterator[Watcher]:
    say = _plain(console)
    last: list[Update] = []
    peak = _Peak()

    def update(now: Update, planned: int) -> None:
        peak.see(now)
        last[:] = [now]
        if now.step == 1:
            say(f"update 1 of {planned}: {update_line(now, peak.bytes)}")

    def metrics(epoch: int, values: Mapping[str, float]) -> None:
        say(f"{metrics_line(epoch, values)}; update {last[0].step}: {update_line(last[0], peak.bytes)}")

    yield Watcher(update, metrics, say)


@contextmanager
def _bar(console: Any) -> Iterator[Watcher]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
        TimeRemainingColumn(),
    )
    peak = _Peak()
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=None)

        def update(now: Update, planned: int) -> None:
            peak.see(now)
            progress.update(task, completed=now.step, total=planned, description=update_line(now, peak.bytes))

        say = _plain(progress.console)
        yield Watcher(update, lambda epoch, values: say(metrics_line(epoch, values)), say)


class _Peak:
    """The last peak that was counted: the CPU's is counted once."""

    bytes: int | None = None

    def see(self, update: Update) -> None:
        self.bytes = update.peak_bytes if update.peak_bytes is not None else self.bytes


def _plain(console: Any) -> Callable[[str], None]:
    return lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)
