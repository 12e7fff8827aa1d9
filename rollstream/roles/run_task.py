"""The task of a run, as every role builds it: from the settings and the run's tokenizer."""

from pathlib import Path

from rollstream.producers.prompt_source import PromptOrder
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.base import Task
from rollstream.producers.tasks.registry import load_task
from rollstream.config.settings import Configuration
from rollstream.config.run_folder import model_folder
from rollstream.roles.vocabulary import check_vocabulary
from rollstream.streams.values import Sampling


def task_settings(configuration: Configuration, folder: Path) -> TaskSettings:
    """With the folder that a task of text reads its tokenizer from, the model's unless another is
    named.
    """
    task = configuration.task
    if task.tokenizer is not None:
        return task
    return task.model_copy(update={"tokenizer": str(model_folder(configuration, folder))})


def prompt_tokens_max(configuration: Configuration) -> int:
    """A longer prompt would leave less than a whole answer's room in the context."""
    return configuration.rollouts.context_max - configuration.sampling.tokens_max


def load_run_task(configuration: Configuration, folder: Path) -> Task:
    """The task of a run that has its model."""
    return load_task(task_settings(configuration, folder), prompt_tokens_max(configuration))


def prompt_order(configuration: Configuration, folder: Path) -> PromptOrder:
    """What is asked at each position of the run, and how it is to be sampled; refused when the
    model does not know the task's tokens.
    """
    c = configuration
    task = load_run_task(c, folder)
    check_vocabulary(c, task)
    sampling = Sampling(
        c.sampling.temperature,
        c.sampling.top_k,
        c.sampling.top_p,
        c.sampling.tokens_max,
        tuple(task.stop),
    )
    samples, limit = c.trainer.samples_per_group, prompt_tokens_max(c)
    return PromptOrder(c.task.name, task.prompt, sampling, samples, c.seed, limit)
