"""Supervised warm-up: a model from scratch learns a task's documents and becomes an ordinary
Hugging Face folder.

The folder appears at once and complete (temporary name, then rename): an interrupted warm-up leaves
nothing under the final name and starts again.

The warm-up as a phase of `rollstream run`: its own process, watched by a progress bar.
"""

# pyright: reportUnknownMemberType=false
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from rollstream.cli.signals import StopSignals
from rollstream.config.run_folder import RunFolder
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.producers.tasks.base import Document, Task, Teacher
from rollstream.storage.models import build_model
from rollstream.storage.settings import ModelSettings
from rollstream.supervisor.lock import RunLock
from rollstream.supervisor.process import ChildProcess, ProcessSpec, describe_exit, last_lines
from rollstream.warmup.sft import SftProgress, SftSchedule, train_sft

__all__ = ["SftSchedule", "is_warmed_up", "untrained_model", "warm_up"]

QUICKSTART_SIZES: dict[str, int | float | bool | str] = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
    "max_position_embeddings": 512,
}
"""What `model.config` does not name."""

DEFAULT_SCHEDULE = SftSchedule()
_SUMMARY_FILE = "warmup.json"


def is_warmed_up(folder: Path) -> bool:
    """Whether a complete warm-up lies there."""
    return (folder / _SUMMARY_FILE).is_file()


def warm_up(
    task: Task,
    model: ModelSettings,
    seed: int,
    folder: Path,
    threads: int,
    progress: SftProgress = lambda done, steps, loss: None,
    course: SftSchedule = DEFAULT_SCHEDULE,
) -> None:
    """Write `folder` (float32 weights, configuration, tokenizer, `warmup.json`); one there is kept.

    1. Beside `folder`, what may fail before minutes of training. 2. Train. 3. The rest, and rename.
    """
    if is_warmed_up(folder):
        return
    if not isinstance(task, Teacher):
        raise ConfigurationError(
            f"task {task.name!r} has no documents(): set model.path to a checkpoint to start from"
        )
    started = time.monotonic()
    partial = folder.with_name(f".{folder.name}.partial")  # 1.
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    task.tokenizer().save(partial)
    policy = untrained_model(model, task, seed)
    documents = task.documents(seed, course.documents)
    losses = train_sft(policy, documents, course, seed, threads, progress)  # 2.
    policy.save_pretrained(str(partial))  # 3.
    account = _summary(documents, course, seed, time.monotonic() - started, losses)
    (partial / _SUMMARY_FILE).write_text(json.dumps(account, indent=2) + "\n")
    os.rename(partial, folder)


def untrained_model(settings: ModelSettings, task: Task, seed: int) -> PreTrainedModel:
    """The model before the warm-up: `settings` over the quickstart's sizes, the task's
    vocabulary.
    """
    tokenizer = task.tokenizer()
    fields = QUICKSTART_SIZES | settings.config | dict(tokenizer.special)
    return build_model(settings.architecture, fields | {"vocab_size": tokenizer.size}, seed)


def _summary(
    documents: Sequence[Document],
    course: SftSchedule,
    seed: int,
    seconds: float,
    losses: list[float],
) -> dict[str, object]:
    """What was taught, for the report."""
    counts = Counter(one.style for one in documents)
    return {
        "seed": seed,
        "documents": len(documents),
        "prompts": len({one.prompt for one in documents}),
        "shares": {name: count / len(documents) for name, count in sorted(counts.items())},
        "steps": course.steps,
        "seconds": round(seconds, 1),
        "loss": float(np.mean(losses[-50:])),
    }


POLL_S = 0.25


class WarmupFailed(RollstreamError):
    """The warm-up ended with an error; there is no model to start from."""


class WarmupProcess:
    """Makes `RUN/model` unless a model is given or there."""

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
        self._is_paced = configuration.trainer.learner == "paced"
        self._needed = configuration.model.path is None and not folder.model.exists()

    def run(self, signals: StopSignals) -> bool:
        """True when there is a model; False when it was stopped, `WarmupFailed` when it failed."""
        if not self._needed:
            return True
        log = self._folder.logs / f"{self._seat.name}.log"
        log.unlink(missing_ok=True)
        child = ChildProcess(self._seat, log, {}, self._lock.descriptor)
        try:
            code = self._watch(child, log, signals)
        finally:
            child.kill()  # nothing is lost: an unfinished warm-up starts again
        if code is None:
            return False
        if code != 0 or not self._folder.model.exists():
            quoted = "\n".join(f"  | {line}" for line in last_lines(log))
            raise WarmupFailed(
                f"warm-up failed ({describe_exit(code)}); the end of {log}:\n{quoted}"
            )
        return True

    def _watch(self, child: ChildProcess, log: Path, signals: StopSignals) -> int | None:
        """The exit code; None when it was stopped."""
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
            taught = "teaching the model the task's documents"
            self._console.print(f"warm-up: {'nothing to teach' if self._is_paced else taught}")
        started = time.monotonic()
        with bar:
            task = bar.add_task("warm-up", total=self._steps, loss="–")
            while (code := child.reap()) is None:
                if signals.stop.wait(POLL_S):
                    return None
                if told := newest_progress(log):
                    bar.update(task, completed=told["done"], loss=told["loss"])
        self._console.print(f"warm-up took {time.monotonic() - started:.0f} s", highlight=False)
        return code


def newest_progress(log: Path) -> dict[str, Any] | None:
    """The last progress line in the log."""
    for line in reversed(last_lines(log, 3)):
        if line.startswith('{"done"') and line.endswith("}"):
            return json.loads(line)
    return None
