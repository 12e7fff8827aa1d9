"""An untrained model whose answers repeat themselves and end at random. It samples some tokens far
more often than others, and the end of an answer about as often after any prefix, so some answers
are many times as long as others.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.storage.starting_model.models import build_model
from testbed.run_process import SIZES

SCALE = 14.0  # of weights drawn with a deviation of 0.02


def decided_model(folder: Path, sizes: Mapping[str, int | bool], scale: float = SCALE) -> Path:
    """Writes model and tokenizer to `folder`, from which a run starts; `sizes` override `SIZES`."""
    tokenizer = load_task(TaskSettings()).tokenizer()
    special = dict(tokenizer.special)
    fields = {**SIZES, "vocab_size": tokenizer.size, **special, **sizes}
    model = build_model("Qwen3ForCausalLM", fields, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
        model.get_input_embeddings().weight[special["eos_token_id"]] = 0  # pyright: ignore[reportIndexIssue]
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder
