"""`rollstream put-model PATH CONFIG` uploads a model as a run's starting model; no role then needs
it on its own host. Another one is refused later, since a run's model never changes.
"""

import argparse
import json
import sys
import time

from rollstream.errors import ConfigurationError
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.cli.configuration import load_configuration
from rollstream.run.config.run_folder import store_for_writing
from rollstream.run.config.run_model import source_in
from rollstream.run.config.settings import Configuration
from rollstream.run.signals import progress_line, warn
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.model_folder.hf_folder import find_hf_folder
from rollstream.storage.model_folder.hf_weights import check_trainable, unread_files, unused_line
from rollstream.storage.starting_model.put import put_model

MB = 1e6
LARGE = 1e9  # bytes


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0/model runs/quickstart-0/config.json",
        "runs/quickstart-0/model examples/quickstart.toml --run runs/other-hosts",
    )
    help = "folder with a Hugging Face checkpoint, or a Hub name in this machine's cache"
    command.add_argument("path", metavar="PATH", help=help)
    command.add_configuration()
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    c, folder = load_configuration(arguments)
    model = find_hf_folder(arguments.path)
    _check(c, str(model))
    source = source_in(c, model, c.task.tokenizer)
    if unread := unread_files(model, source.has_weights):
        warn(unused_line(model, unread, "files"))
    store = store_for_writing(c, folder.path)
    read_or_create_identity(store, c.run)

    manifest = put_model(store, c.run, source, time.time(), show_upload)
    progress_line("")
    if arguments.json:
        facts = {"run": c.run, "model": manifest.digest, "files": len(manifest.files)}
        print(json.dumps({**facts, "bytes": manifest.bytes, "task_files": manifest.task_files}))
    else:
        print(
            f"run {c.run} starts from the model {manifest.digest} in its store: "
            f"{len(manifest.files)} files, {manifest.bytes / MB:.1f} MB"
        )
    return 0


def show_upload(name: str, size: int) -> None:
    """Shows the upload without a terminal only one that takes long."""
    line = f"uploading {name}, {size / MB:,.1f} MB"
    if size >= LARGE and not sys.stderr.isatty():
        warn(line)
    progress_line(line)


def _check(c: Configuration, path: str) -> None:
    from rollstream.run.checks.model import read_model_facts
    from rollstream.run.checks.model_process import ModelProcess

    check_trainable(find_hf_folder(path))
    settings = c.model.model_copy(update={"path": path})
    facts = read_model_facts(c.model_copy(update={"model": settings}))
    if facts is None or not facts.bytes:
        return
    for finding in ModelProcess(c, facts.folder).findings(c.rollouts.context_max):
        if finding.verdict == "refused":
            raise ConfigurationError(finding.text)
        warn(finding.text)
