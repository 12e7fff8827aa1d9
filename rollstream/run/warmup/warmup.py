"""Trains a new model on a task's documents, each a prompt and a correct response
(docs/explanation/quickstart-task.md); the loss covers responses. Equal arguments give equal
weights, with one thread or two: each part of a batch is computed on one torch thread, and the
parts' gradients are summed in a fixed order.
"""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollstream.consumers.trainer.data.sample import Sample
from rollstream.consumers.trainer.learn.forward import PolicyScorer, policy_scorer
from rollstream.consumers.trainer.learn.row_layout import token_rows
from rollstream.consumers.trainer.learn.workers import OrderedWorkers, keep_freed_memory
from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.base import Document, Task, Teacher, plain_documents
from rollstream.storage.settings import ModelSettings
from rollstream.storage.starting_model.models import build_model
from rollstream.streams.records import GENERATED, PROMPT

# Called after each step with the numbers of done and of all steps, and the step's mean loss per
# response token.
SftProgress = Callable[[int, int, float], None]

# Computed in parallel by two threads. The number does not depend on the threads, so that sums round
# alike.
BATCH_PARTS = 2


@dataclass(frozen=True, slots=True)
class SftSchedule:
    """The defaults are the quickstart's."""

    documents: int = 20_000
    """Drawn from the task; training repeats them as often as `steps` needs."""
    steps: int = 800
    """Each step is one update by one batch."""
    batch_tokens: int = 1_536
    loss_divisor: float = 0.8 * 1_536
    """A batch's summed loss is divided by this constant: about four fifths of `batch_tokens` are
    tokens of responses. With the mean of each batch instead, the weight of a token would depend on
    the others in its batch.
    """
    muon_lr: float = 0.02
    """Peak of Muon, for the matrices."""
    adam_lr: float = 3e-3
    """Peak of AdamW, for embeddings and norms."""
    ramp_steps: int = 30
    """Until the learning rates reach their peaks."""
    lr_final: float = 0.05
    """Of the last step, as a share of the peak."""
    gradient_norm_max: float = 1.0
    """Larger gradients are scaled down to it."""


def train_sft(
    model: PreTrainedModel,
    documents: Sequence[Document],
    schedule: SftSchedule,
    seed: int,
    threads: int,
    progress: SftProgress,
) -> list[float]:
    """Trains in place. Returns the mean loss per response token of each step."""
    keep_freed_memory()
    # Two workers of one torch thread each, not one of two: on matrices this small OpenMP's waiting
    # costs more than it gains (a step took up to ten times longer beside another busy process).
    torch_threads = max(1, threads // BATCH_PARTS)
    torch.set_num_threads(torch_threads)
    gradient_sum = _GradientSum(model.train(), policy_scorer(model), schedule.loss_divisor)
    optimisers = _optimisers(model, schedule)
    workers = OrderedWorkers(
        min(threads, BATCH_PARTS), torch_threads, gradient_sum.compute, gradient_sum.add
    )
    endless = batches(documents, schedule.batch_tokens, np.random.default_rng((seed, 1)))
    losses: list[float] = []
    try:
        for step in range(schedule.steps):
            batch = next(endless)
            for part in range(BATCH_PARTS):
                workers.submit(batch[part::BATCH_PARTS])
            workers.wait()
            torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.gradient_norm_max)
            for optimiser in optimisers:
                for group in optimiser.param_groups:
                    group["lr"] = group["peak"] * learning_rate_share(step, schedule)
                optimiser.step()
                optimiser.zero_grad()
            losses.append(gradient_sum.take_loss())
            progress(step + 1, schedule.steps, losses[-1])
    finally:
        workers.close()
    return losses


def learning_rate_share(step: int, schedule: SftSchedule) -> float:
    """Returns the learning rate share for `step` from 0, as a share of the peak: a linear rise over
    `ramp_steps`, times a linear fall to `lr_final` at the last step.
    """
    ramp = min(1.0, (step + 1) / max(1, schedule.ramp_steps))
    remaining = 1.0 - step / max(1, schedule.steps - 1)
    return ramp * (schedule.lr_final + (1.0 - schedule.lr_final) * remaining)


def batches(
    documents: Sequence[Document], tokens_max: int, random: np.random.Generator
) -> Iterator[list[Sample]]:
    """Returns the batches without end: each epoch has all documents in a new random order, and a
    batch at most `tokens_max` tokens, longest documents first, so that every `BATCH_PARTS`-th one
    gives parts of about equal work.
    """
    # All lengths are mixed, so that each gradient covers all styles of answers: with batches of
    # equal lengths, answers with the whole calculation had an accuracy of .86 instead of .97. The
    # forward pass packs without padding, so mixing costs nothing.
    samples = [_sample(document) for document in documents]
    batch: list[Sample] = []
    size = 0
    while True:
        for index in random.permutation(len(samples)).tolist():
            if batch and size + len(samples[index]) > tokens_max:  # pyright: ignore[reportUnknownArgumentType]
                yield sorted(batch, key=len, reverse=True)
                batch, size = [], 0
            batch.append(samples[index])  # pyright: ignore[reportUnknownArgumentType]
            size += len(samples[index])  # pyright: ignore[reportUnknownArgumentType]


def _sample(document: Document) -> Sample:
    count = len(document.response)
    sources = np.repeat(np.array([PROMPT, GENERATED], np.uint8), [len(document.prompt), count])
    return Sample(
        # Fields that only reinforcement learning needs are 0 or empty.
        trajectory="",
        group=0,
        tokens=np.array(document.prompt + document.response, np.uint32),
        sources=sources,
        logprobs=np.zeros(count, np.float32),
        spans=(),
        reward=0.0,
        advantage=0.0,
        temperature=1.0,
        mask=np.ones(count, np.bool_),
    )


@dataclass(slots=True)
class _PartGradients:
    gradients: Sequence[Tensor | None]
    loss: float
    tokens: int


class _GradientSum:
    """The gradient sum of a batch's parts, in the model's `grad`. Any thread may `compute`; `add`
    must be called in the order of the parts, so that the sum rounds alike.
    """

    def __init__(self, model: PreTrainedModel, policy: PolicyScorer, divisor: float) -> None:
        self._policy = policy
        self._parameters = list(model.parameters())
        self._divisor = divisor
        self._loss, self._tokens = 0.0, 0

    def compute(self, part: Sequence[Sample]) -> _PartGradients | None:
        if not part:
            return None
        logprobs = self._policy(token_rows(part)).logprobs
        loss = -logprobs.sum()
        gradients = torch.autograd.grad(loss / self._divisor, self._parameters, allow_unused=True)
        return _PartGradients(gradients, loss.item(), len(logprobs))

    def add(self, part: _PartGradients | None) -> None:
        if part is None:
            return
        self._loss += part.loss
        self._tokens += part.tokens
        for parameter, gradient in zip(self._parameters, part.gradients, strict=True):
            if gradient is not None:
                total = gradient if parameter.grad is None else parameter.grad + gradient
                parameter.grad = total

    def take_loss(self) -> float:
        mean = self._loss / max(1, self._tokens)
        self._loss, self._tokens = 0.0, 0
        return mean


def _optimisers(model: torch.nn.Module, schedule: SftSchedule) -> list[torch.optim.Optimizer]:
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in model.parameters():
        hidden = parameter.ndim == 2 and id(parameter) not in embeddings
        (matrices if hidden else others).append(parameter)
    muon = {"params": matrices, "peak": schedule.muon_lr}
    adam = {"params": others, "peak": schedule.adam_lr}
    return [
        # With AdamW alone the model does not learn to show a whole calculation in this schedule.
        torch.optim.Muon([muon], lr=schedule.muon_lr, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW([adam], lr=schedule.adam_lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]


# For fields that the setting `model.config` does not set.
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

DEFAULT_SCHEDULE = SftSchedule()
_SUMMARY_FILE = "warmup.json"


def is_warmed_up(folder: Path) -> bool:
    return (folder / _SUMMARY_FILE).is_file()


def warm_up(
    task: Task,
    model: ModelSettings,
    seed: int,
    folder: Path,
    threads: int,
    progress: SftProgress = lambda done, steps, loss: None,
    schedule: SftSchedule = DEFAULT_SCHEDULE,
) -> None:
    """Train a model and write it to `folder`, which appears complete or not at all: float32
    weights, configuration, tokenizer, and the summary `warmup.json`. A complete folder is kept.
    Raises `ConfigurationError` for a task that makes no documents.

    1. Write the tokenizer to a partial folder: an error of the file system shows before minutes of
       training.
    2. Train.
    3. Write weights and summary, then rename the folder.
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
    documents = plain_documents(task, seed, schedule.documents)
    losses = train_sft(policy, documents, schedule, seed, threads, progress)  # 2.
    policy.save_pretrained(str(partial))  # pyright: ignore[reportUnknownMemberType]  # 3.
    summary = _summary(documents, schedule, seed, time.monotonic() - started, losses)
    (partial / _SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    os.rename(partial, folder)


def untrained_model(settings: ModelSettings, task: Task, seed: int) -> PreTrainedModel:
    """Returns random weights from `seed`, the task's vocabulary, and the quickstart's sizes unless
    `settings.config` has others.
    """
    tokenizer = task.tokenizer()
    fields = settings.config | dict(tokenizer.special) | {"vocab_size": tokenizer.size}
    return build_model(settings.architecture, fields, seed, QUICKSTART_SIZES)


def _summary(
    documents: Sequence[Document],
    schedule: SftSchedule,
    seed: int,
    seconds: float,
    losses: list[float],
) -> dict[str, object]:
    counts = Counter(document.style for document in documents)
    return {
        "seed": seed,
        "documents": len(documents),
        "prompts": len({document.prompt for document in documents}),
        "shares": {name: count / len(documents) for name, count in sorted(counts.items())},
        "steps": schedule.steps,
        "seconds": round(seconds, 1),
        # The mean of the last steps.
        "loss": float(np.mean(losses[-50:])),
    }
