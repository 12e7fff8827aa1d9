"""What a run starts from: the model of its folder, or under `trainer.learner = "paced"` weights of
the configured size; and the folder that stands for the latter.
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

if TYPE_CHECKING:  # seconds, and a paced run has no model
    from transformers import PreTrainedModel

PACED_LEARNER = "paced"


def starting_model(configuration: Configuration, folder: Path) -> "PreTrainedModel | PacedModel":
    """Version 0."""
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
    """Write the folder of a model that is none: its vocabulary and its tokenizer, which every
    version carries. It appears at once; one that is there is kept.
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
