"""`rollstream warmup CONFIG`: makes the starting model in `RUN/model` by supervised training on the
task's documents, and puts it into the run's store. The folder appears completely or not at all; an
existing one is kept, and with `model.path` none is made.
"""

import argparse
import json
from pathlib import Path

from rollstream.run.cli.arguments import EXAMPLE_RUN, CommandParser
from rollstream.run.cli.configuration import load_and_settle
from rollstream.run.config.run_folder import RunFolder, store_for_writing
from rollstream.run.config.run_model import run_model, store_starting_model
from rollstream.run.config.settings import Configuration
from rollstream.run.supervisor.process import end_with_parent
from rollstream.storage.identity import read_or_create_identity


def add_arguments(command: CommandParser) -> None:
    command.add_examples(EXAMPLE_RUN)
    command.add_configuration()


def main(arguments: argparse.Namespace) -> int:
    end_with_parent()
    configuration, folder = load_and_settle(arguments)
    model = RunFolder(folder.path).model
    if configuration.model.path is not None:
        print(json.dumps({"given": configuration.model.path}), flush=True)
    elif model.exists() or run_model(configuration, folder.path) is not None:
        print(json.dumps({"kept": str(model)}), flush=True)
    else:
        _make(configuration, model)
    store = store_for_writing(configuration, folder.path)
    read_or_create_identity(store, configuration.run)
    store_starting_model(store, configuration, folder.path)
    return 0


def _make(configuration: Configuration, model: Path) -> None:
    from rollstream.producers.tasks.registry import load_task
    from rollstream.run.roles.context import prompt_tokens_max

    task = load_task(configuration.task, prompt_tokens_max(configuration))
    # `paced` trains no weights: the folder has the vocabulary's size and the tokenizer.
    if not configuration.has_model:
        from rollstream.run.roles.train import make_paced_folder

        make_paced_folder(task, model)
        return
    # Imports torch, which takes seconds: after validation.
    from rollstream.run.warmup.warmup import SftSchedule, warm_up

    settings = configuration.warmup
    warm_up(
        task,
        configuration.model,
        configuration.seed,
        model,
        settings.threads,
        print_progress,
        SftSchedule(documents=settings.documents, steps=settings.steps),
    )


def print_progress(done: int, steps: int, loss: float) -> None:
    """A JSON line after about every hundredth of all `steps`, and after the last; `loss` is that of
    the newest step.
    """
    if done % max(1, steps // 100) == 0 or done == steps:
        print(json.dumps({"done": done, "steps": steps, "loss": round(loss, 4)}), flush=True)
