"""Supervised warm-up: teaches a model from scratch a task's documents and writes an ordinary
Hugging Face folder.

The folder appears at once and complete (temporary name, then rename): an interrupted warm-up leaves
nothing under the final name and starts again. `python -m rollstream.warmup SPEC` runs it in its own
process and prints one JSON object per line of progress.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import json
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers

from producers.settings import TaskSettings
from producers.tasks.base import Document, Task, Teacher
from producers.tasks.registry import load_task
from storage.model import build_model
from storage.settings import ModelSettings
from streams.errors import ConfigurationError

Progress = Callable[[int, int, float], None]
"""Called with steps done, steps in all, and the loss per response token of the newest step."""

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

_IGNORED = -100  # label that torch's cross entropy leaves out
_MANIFEST = "warmup.json"


@dataclass(frozen=True, slots=True)
class Course:
    """How much is taught and how fast; the defaults are those of the quickstart."""

    documents: int = 20_000
    steps: int = 1_100
    batch_tokens: int = 1_536
    """Most padded tokens of one batch."""
    loss_divisor: float = 0.8 * 1_536
    """The summed loss is divided by this constant: a mean per batch of equal lengths would weigh a
    token of a short document more than one of a long document, and so shift the shares of the
    styles.
    """
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    ramp_steps: int = 30
    lr_final: float = 0.05
    gradient_norm_max: float = 1.0


@dataclass(frozen=True, slots=True)
class Batch:
    """`tokens` (documents, length) are padded on the right; `labels` are the next tokens inside
    responses, else ignored.
    """

    tokens: torch.Tensor
    labels: torch.Tensor


def is_warm(folder: Path) -> bool:
    """Whether a complete warm-up lies there."""
    return (folder / _MANIFEST).is_file()


def warm_up(
    task: Task,
    model: ModelSettings,
    seed: int,
    folder: Path,
    threads: int,
    progress: Progress = lambda done, steps, loss: None,
    course: Course = Course(),
) -> None:
    """Write `folder` (weights in float32, configuration, tokenizer, `warmup.json`); one that is
    there is kept.
    """
    if is_warm(folder):
        return
    if not isinstance(task, Teacher):
        raise ConfigurationError(
            f"task {task.name!r} has no documents(): set model.path to a checkpoint to start from"
        )
    torch.set_num_threads(threads)
    started = time.monotonic()
    # 1. Beside `folder`: what may fail is written before the minutes of training. 2. Train. 3.
    # Rename.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    task.tokenizer().save(partial)
    policy = untaught(model, task, seed)
    documents = task.documents(seed, course.documents)
    losses = teach(policy, documents, course, seed, progress)
    policy.save_pretrained(str(partial))
    account = _account(documents, course, seed, time.monotonic() - started, losses)
    (partial / _MANIFEST).write_text(json.dumps(account, indent=2) + "\n")
    os.rename(partial, folder)


def untaught(settings: ModelSettings, task: Task, seed: int) -> transformers.PreTrainedModel:
    """The model before the warm-up: `settings` over the quickstart's sizes, with the task's
    vocabulary.
    """
    tokenizer = task.tokenizer()
    fields = QUICKSTART_SIZES | settings.config | dict(tokenizer.special)
    return build_model(settings.architecture, fields | {"vocab_size": tokenizer.size}, seed)


def teach(
    model: torch.nn.Module,
    documents: Sequence[Document],
    course: Course,
    seed: int,
    progress: Progress,
) -> list[float]:
    """Train in place; returns the loss per response token of each step."""
    model.train()
    optimisers = _optimisers(model, course)
    endless = batches(documents, course.batch_tokens, np.random.default_rng((seed, 1)))
    losses: list[float] = []
    for step in range(course.steps):
        batch = next(endless)
        loss = _loss_sum(model, batch)
        (loss / course.loss_divisor).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), course.gradient_norm_max)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = group["peak"] * rate(step, course)
            optimiser.step()
            optimiser.zero_grad()
        losses.append(loss.item() / int((batch.labels != _IGNORED).sum()))
        progress(step + 1, course.steps, losses[-1])
    return losses


def rate(step: int, course: Course) -> float:
    """Share of the peak learning rate: a linear ramp, then linear to `lr_final` at the
    last step.
    """
    ramp = min(1.0, (step + 1) / max(1, course.ramp_steps))
    left = 1.0 - step / max(1, course.steps - 1)
    return ramp * (course.lr_final + (1.0 - course.lr_final) * left)


def _optimisers(model: torch.nn.Module, course: Course) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms: with AdamW alone the working is not
    learnt in this time.
    """
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        hidden = parameter.ndim == 2 and id(parameter) not in embeddings
        (matrices if hidden else others).append(parameter)
    muon = {"params": matrices, "peak": course.muon_lr}
    adam = {"params": others, "peak": course.adam_lr}
    return [
        torch.optim.Muon([muon], lr=course.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW([adam], lr=course.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def batches(
    documents: Sequence[Document], tokens_max: int, random: np.random.Generator
) -> Iterator[Batch]:
    """Endless epochs of batches in random order, each of documents of nearly one length, so padding
    is rare.
    """
    lengths = np.array([len(one.prompt) + len(one.response) for one in documents])
    while True:
        order = np.lexsort((random.random(len(documents)), lengths))
        groups: list[list[int]] = [[]]
        for index in order.tolist():
            if groups[-1] and (len(groups[-1]) + 1) * lengths[index] > tokens_max:
                groups.append([])
            groups[-1].append(index)
        for place in random.permutation(len(groups)).tolist():
            yield _batch([documents[index] for index in groups[place]])


def _batch(documents: Sequence[Document]) -> Batch:
    longest = max(len(one.prompt) + len(one.response) for one in documents)
    tokens = np.zeros((len(documents), longest), np.int64)
    labels = np.full((len(documents), longest), _IGNORED, np.int64)
    for row, one in enumerate(documents):
        start, end = len(one.prompt), len(one.prompt) + len(one.response)
        tokens[row, :end] = one.prompt + one.response
        labels[row, start - 1 : end - 1] = one.response
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels))


def _loss_sum(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Summed over response tokens. No attention mask: attention is causal and padding is on the
    right.
    """
    logits = model(input_ids=batch.tokens, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=_IGNORED, reduction="sum"
    )


def _account(
    documents: Sequence[Document], course: Course, seed: int, seconds: float, losses: list[float]
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


def main(spec: str) -> None:
    """SPEC is one JSON object: `task`, `model` (tables of the configuration), `seed`, `folder`,
    `threads`.
    """
    wanted = json.loads(spec)
    settings = TaskSettings.model_validate(wanted["task"])

    def tell(done: int, steps: int, loss: float) -> None:
        if done % 20 == 0 or done == steps:
            print(json.dumps({"done": done, "steps": steps, "loss": round(loss, 4)}), flush=True)

    warm_up(
        load_task(settings.name, settings.options),
        ModelSettings.model_validate(wanted["model"]),
        wanted["seed"],
        Path(wanted["folder"]),
        wanted["threads"],
        tell,
    )


if __name__ == "__main__":
    main(sys.argv[1])
