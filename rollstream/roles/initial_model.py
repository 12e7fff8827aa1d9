"""The starting model of a run: the model in its folder, or under `trainer.learner = "paced"`
weights of the configured size; and the model folder of a paced run.
"""

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.config.run_folder import model_folder
from rollstream.config.settings import Configuration
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.producers.tasks.base import Task
from rollstream.storage.models import load_model

if TYPE_CHECKING:  # the import takes seconds, and a paced run has no model
    from transformers import PreTrainedModel

PACED_LEARNER = "paced"


def starting_model(configuration: Configuration, folder: Path) -> "PreTrainedModel | PacedModel":
    """The weights of version 0."""
    c = configuration
    if c.trainer.learner != PACED_LEARNER:
        return load_model(str(model_folder(c, folder)))
    return PacedModel(
        seed=c.seed,
        weights_bytes=c.paced.weights_bytes,
        changed_share=c.paced.changed_share,
        step_s=c.paced.train_step_s / c.paced.time_scale,
        token_s=c.paced.train_token_s / c.paced.time_scale,
    )


def make_paced_folder(task: Task, folder: Path) -> None:
    """Write the model folder of a paced run: its vocabulary and its tokenizer, which every version
    carries. The write is atomic; an existing folder is kept.
    """
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tokenizer = task.tokenizer()
    tokenizer.save(partial)
    fields = {"model_type": PACED_LEARNER, "vocab_size": tokenizer.size}
    (partial / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.rename(partial, folder)
