"""`rollstream forward RUN --to wandb|tensorboard`: sends a run's metrics files to a tracker."""

import argparse
import json
import logging
from pathlib import Path

from rollstream.commands.signals import listen
from rollstream.config import Configuration, essentials, load
from rollstream.folder import RunFolder
from rollstream.metrics.forwarder import Forwarder
from rollstream.metrics.sinks import Sink, TensorBoardSink, WandbSink
from streams.errors import ConfigurationError

LOOK_S = 1.0
NOT_SAID = ("bus", "store")  # URLs may contain names of hosts and users


def main(arguments: argparse.Namespace) -> int:
    """Forward new lines, with `--follow` until Ctrl-C. The next start resumes at the stored
    position.
    """
    logging.basicConfig(level=logging.WARNING, format="rollstream: %(message)s")
    folder = RunFolder(Path(arguments.run).absolute())
    if not folder.configuration.exists():
        raise ConfigurationError(f"{folder.path} holds no run (no config.json there)")
    configuration = load(folder.configuration)
    folder.metrics.mkdir(exist_ok=True)
    stop = listen().stop
    forwarder = Forwarder(
        folder.metrics, arguments.to, lambda id: open_sink(arguments.to, id, configuration, folder)
    )
    try:
        lines = forwarder.once()
        while arguments.follow and not stop.wait(LOOK_S):
            lines += forwarder.once()
    finally:
        forwarder.close()
    _say(arguments, lines, forwarder.sink.where)
    return 0


def open_sink(to: str, id: str, configuration: Configuration, folder: RunFolder) -> Sink:
    """Opens the target; raises `ConfigurationError` naming the package to install."""
    if to == "tensorboard":
        return TensorBoardSink(folder.metrics / "tensorboard")
    kept = {k: v for k, v in essentials(configuration).items() if k not in NOT_SAID}
    return WandbSink(configuration.run, id, folder.metrics, kept)


def _say(arguments: argparse.Namespace, lines: int, where: str) -> None:
    if arguments.json:
        print(json.dumps({"to": arguments.to, "lines": lines, "where": where}))
    else:
        print(f"{lines} lines forwarded to {arguments.to}: {where}")
