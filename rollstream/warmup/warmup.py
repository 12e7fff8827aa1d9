"""Supervised warm-up: trains a new model on a task's documents and writes it as an ordinary Hugging
Face folder.

The folder appears atomically and complete (temporary name, then rename): an interrupted warm-up
leaves nothing under the final name and restarts.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Document, Task, Teacher
from rollstream.storage.models import build_model
from rollstream.storage.settings import ModelSettings
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
"""Sizes that `model.config` does not set."""

DEFAULT_SCHEDULE = SftSchedule()
_SUMMARY_FILE = "warmup.json"


def is_warmed_up(folder: Path) -> bool:
    """Whether the folder holds a complete warm-up."""
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
    """Write `folder` (float32 weights, configuration, tokenizer, `warmup.json`); an existing one is
    kept.

    1. Beside `folder`, all that may fail before minutes of training. 2. Train. 3. Write the
       weights, and rename.
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
    policy.save_pretrained(str(partial))  # pyright: ignore[reportUnknownMemberType]  # 3.
    account = _summary(documents, course, seed, time.monotonic() - started, losses)
    (partial / _SUMMARY_FILE).write_text(json.dumps(account, indent=2) + "\n")
    os.rename(partial, folder)


def untrained_model(settings: ModelSettings, task: Task, seed: int) -> PreTrainedModel:
    """The model before the warm-up: `settings` over the quickstart's sizes, with the task's
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
    """A summary of the training, for the report."""
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
