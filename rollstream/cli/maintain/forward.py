"""`rollstream forward RUN --to wandb|tensorboard`: sends the lines of a run's metrics files
(`metrics/*.jsonl`) to TensorBoard or Weights & Biases, the target. `Forwarder` does the work.

Beside these files the command stores, for each target, up to which line they were sent, so the next
start resumes there. A crash can send lines again, and loses none.
"""

import argparse
import json
import logging

from rollstream.cli.arguments import CommandParser
from rollstream.cli.signals import listen_for_signals
from rollstream.config.config import essential_settings, load
from rollstream.config.run_folder import RunFolder, run_folder
from rollstream.config.settings import Configuration
from rollstream.metrics.forwarder import Forwarder, Sink, TensorBoardSink, WandbSink

POLL_S = 1.0  # between two looks for new lines with --follow
PRIVATE_SETTINGS = ("bus", "store")  # URLs may contain names of hosts and users


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 --to tensorboard", "runs/quickstart-0 --to wandb --follow"
    )
    command.add_run()
    command.add_argument("--to", required=True, choices=("tensorboard", "wandb"), help="target")
    command.add_argument("--follow", action="store_true", help="keep forwarding until Ctrl-C")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Forward the lines of the metrics files that were not sent yet, and with `--follow` new ones
    until Ctrl-C; returns the exit code.
    """
    logging.basicConfig(level=logging.WARNING, format="rollstream: %(message)s")
    folder = run_folder(arguments.run)
    configuration = load(folder.configuration)
    folder.metrics.mkdir(exist_ok=True)
    stop = listen_for_signals().stop
    forwarder = Forwarder(
        folder.metrics, arguments.to, lambda id: open_sink(arguments.to, id, configuration, folder)
    )
    try:
        lines = forwarder.once()
        while arguments.follow and not stop.wait(POLL_S):
            lines += forwarder.once()
    finally:
        forwarder.close()
    _print_result(arguments, lines, forwarder.sink.where)
    return 0


def open_sink(to: str, id: str, configuration: Configuration, folder: RunFolder) -> Sink:
    """Returns the sink that writes to the target `to`. `id` names the run at Weights & Biases, so a
    later start continues it there. Raises `ConfigurationError` if the target's package is not
    installed.
    """
    if to == "tensorboard":
        return TensorBoardSink(folder.metrics / "tensorboard")
    kept = {k: v for k, v in essential_settings(configuration).items() if k not in PRIVATE_SETTINGS}
    return WandbSink(configuration.run, id, folder.metrics, kept)


def _print_result(arguments: argparse.Namespace, lines: int, where: str) -> None:
    if arguments.json:
        print(json.dumps({"to": arguments.to, "lines": lines, "where": where}))
    else:
        print(f"{lines} lines forwarded to {arguments.to}: {where}")
