"""Runs the warm-up as the first phase of `rollstream run`. The folder appears complete: an
interrupted warm-up leaves no model and is begun again.
"""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rollstream.errors import RollstreamError
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.run_model import run_model
from rollstream.run.config.settings import Configuration
from rollstream.run.signals import StopSignals
from rollstream.run.supervisor.process import ChildProcess, ProcessSpec, describe_exit, last_lines
from rollstream.run.supervisor.supervisor import RunLock

POLL_S = 0.25


class WarmupFailed(RollstreamError):
    """The warm-up ended without having made a model."""


class WarmupProcess:
    """Needed only if neither `model.path`, the folder nor the run's store has a model. It inherits
    the run's `lock`.
    """

    def __init__(
        self,
        configuration: Configuration,
        folder: RunFolder,
        seat: ProcessSpec,
        console: Console,
        lock: RunLock,
    ) -> None:
        self._folder, self._seat, self._console, self._lock = folder, seat, console, lock
        self._steps = configuration.warmup.steps
        self._has_model = configuration.has_model
        self._needed = (
            configuration.model.path is None
            and not folder.model.exists()
            and run_model(configuration, folder.path) is None
        )

    def run(self, signals: StopSignals) -> bool:
        """Runs the warm-up if it is needed. Returns True when there is a model to start from, False
        if the user stopped it. Raises `WarmupFailed`, with the end of the log, if it left no model.
        The process has ended then.
        """
        if not self._needed:
            return True
        log = self._folder.logs / f"{self._seat.name}.log"
        log.unlink(missing_ok=True)
        child = ChildProcess(self._seat, log, {}, self._lock.descriptor)
        try:
            code = self._watch(child, log, signals)
        finally:
            # Does nothing after its end; an unfinished warm-up has kept nothing.
            child.kill()
        if code is None:
            return False
        if code != 0 or not self._folder.model.exists():
            quoted = "\n".join(f"  | {line}" for line in last_lines(log))
            raise WarmupFailed(
                f"warm-up failed ({describe_exit(code)}); the end of {log}:\n{quoted}"
            )
        return True

    def _watch(self, child: ChildProcess, log: Path, signals: StopSignals) -> int | None:
        bar = Progress(
            TextColumn("warm-up"),
            BarColumn(bar_width=40),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        if not self._console.is_terminal:
            work = "training the model on the task's documents"
            self._console.print(f"warm-up: {work if self._has_model else 'no model to train'}")
        started = time.monotonic()
        with bar:
            task = bar.add_task("warm-up", total=self._steps, loss="–")
            while (code := child.reap()) is None:
                if signals.stop.wait(POLL_S):
                    return None
                if line := newest_progress(log):
                    bar.update(task, completed=line["done"], loss=line["loss"])
        seconds = f"{time.monotonic() - started:.0f} s"
        self._console.print(
            f"warm-up done after {seconds}, with imports, tokenizer and saving", highlight=False
        )
        return code


def newest_progress(log: Path) -> dict[str, Any] | None:
    """`{"done": …, "loss": …, …}`, in the log's last three lines."""
    for line in reversed(last_lines(log, 3)):
        if line.startswith('{"done"') and line.endswith("}"):
            return json.loads(line)
    return None
