"""`rollstream forward RUN --to wandb|tensorboard`: sends the lines of a run's metrics files. A file
beside them holds each target's position; a crash can send lines again, and loses none.
"""

import argparse
import json
import logging
from pathlib import Path

from rollstream.errors import OutsideRun
from rollstream.look.query.locate import RunLocation, locate_run
from rollstream.look.query.looking import metrics_folder
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.config.config import essential_settings, load
from rollstream.run.config.run_folder import run_folder
from rollstream.run.config.settings import Configuration
from rollstream.run.metrics.forwarder import Forwarder, Sink, TensorBoardSink, WandbSink
from rollstream.run.signals import listen_for_signals

# Between two looks for new lines with --follow.
POLL_S = 1.0
# URLs may contain names of hosts and users.
PRIVATE_SETTINGS = ("bus", "store")


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 --to tensorboard", "runs/quickstart-0 --to wandb --follow"
    )
    command.add_run()
    command.add_argument("--to", required=True, choices=("tensorboard", "wandb"), help="target")
    command.add_argument("--follow", action="store_true", help="keep forwarding until Ctrl-C")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Sends the lines that were not sent yet, and with `--follow` new ones until Ctrl-C."""
    logging.basicConfig(level=logging.WARNING, format="rollstream: %(message)s")
    folder = run_folder(arguments.run)
    metrics = _own_metrics(locate_run(str(folder.path)), arguments.to)
    configuration = load(folder.configuration)
    metrics.mkdir(exist_ok=True)
    stop = listen_for_signals().stop
    forwarder = Forwarder(
        metrics, arguments.to, lambda id: open_sink(arguments.to, id, configuration, metrics)
    )
    try:
        lines = forwarder.once()
        while arguments.follow and not stop.wait(POLL_S):
            lines += forwarder.once()
    finally:
        forwarder.close()
    _print_result(arguments, lines, forwarder.sink.where)
    return 0


def _own_metrics(location: RunLocation, to: str) -> Path:
    """Raises `OutsideRun` if the folder, which may be missing, a file in it, or a write there
    leaves the run's folder.
    """
    metrics = metrics_folder(location)
    if location.folder is not None:
        expected, root = location.files.root / "metrics", location.files.root
        if metrics != expected and metrics.is_relative_to(root):  # e.g. `metrics -> .`
            raise OutsideRun(
                f"{location.folder}/metrics leads to {metrics}, which is no folder of metrics: "
                "nothing was written; remove the link"
            )
    for name in (f"forward-{to}.json", f"forward-{to}.lock", to):
        path = location.files.path(metrics, name)
        if path.exists() and not path.is_dir():
            location.files.file(path)
    return metrics


def open_sink(to: str, id: str, configuration: Configuration, metrics: Path) -> Sink:
    """`id` names the run at Weights & Biases, so a later start continues it. Raises
    `ConfigurationError` if the target's package is not installed.
    """
    if to == "tensorboard":
        return TensorBoardSink(metrics / "tensorboard")
    settings = {
        k: v for k, v in essential_settings(configuration).items() if k not in PRIVATE_SETTINGS
    }
    return WandbSink(configuration.run, id, metrics, settings)


def _print_result(arguments: argparse.Namespace, lines: int, where: str) -> None:
    if arguments.json:
        print(json.dumps({"to": arguments.to, "lines": lines, "where": where}))
    else:
        print(f"{lines} lines forwarded to {arguments.to}: {where}")
