"""Loads the configuration and the run folder that a command's arguments name.

Commands with long output exit quietly when the reader closes the pipe (`… | head`).

Converts Ctrl-C, SIGTERM and SIGHUP to events: the first requests a stop, the second a
quick one.
"""

import argparse
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path

from rollstream.analysis.locate import REPLAY_FILE
from rollstream.config.config import load
from rollstream.config.run_folder import RunFolder, folder_of_run, reach, write_configuration
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError


def load_and_settle(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and validate the configuration and settle it in the run's folder. Raises if a started
    run has another configuration, and for a replay's folder.
    """
    configuration, folder = load_configuration(arguments)
    if (folder.path / REPLAY_FILE).exists():
        raise ConfigurationError(f"{folder.path} holds a replay, which no role can resume")
    if _file(arguments).absolute() != folder.configuration or arguments.overrides:
        accepted = getattr(arguments, "accept_config", False)
        write_configuration(
            folder, configuration, accepted, lambda: reach(configuration, folder.path)
        )
    return configuration, folder


def load_configuration(arguments: argparse.Namespace) -> tuple[Configuration, RunFolder]:
    """Load and validate the configuration without writing to the run's folder."""
    overrides: list[str] = list(arguments.overrides)
    if arguments.seed is not None:
        overrides.append(f"seed={arguments.seed}")
    if arguments.run is not None:
        overrides.append(f"folder={arguments.run}")
    configuration = load(_file(arguments), overrides)
    return configuration, folder_of_run(configuration)


def _file(arguments: argparse.Namespace) -> Path:
    """Returns the named file, or the `config.json` of a named run folder."""
    path = Path(arguments.configuration)
    return path / "config.json" if path.is_dir() else path


EXIT_CLOSED_PIPE = 141  # 128 + SIGPIPE, the shell convention


def quiet_on_closed_pipe(
    main: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Wraps `main` so that a closed pipe ends it without an error message."""

    @wraps(main)
    def guarded(arguments: argparse.Namespace) -> int:
        try:
            code = main(arguments)
            sys.stdout.flush()
        except BrokenPipeError:
            # The interpreter flushes stdout again at exit, which would print an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_CLOSED_PIPE
        return code

    return guarded


@dataclass(frozen=True, slots=True)
class StopSignals:
    """`stop` is set by the first signal, `hurry` by the next."""

    stop: threading.Event = field(default_factory=threading.Event)
    hurry: threading.Event = field(default_factory=threading.Event)


def listen_for_signals() -> StopSignals:
    """Install handlers for SIGINT, SIGTERM and SIGHUP; call it from the main thread."""
    signals = StopSignals()

    def handle(*_: object) -> None:
        (signals.hurry if signals.stop.is_set() else signals.stop).set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP: keep that
            signal.signal(number, handle)
    return signals
