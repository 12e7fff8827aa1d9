"""`rollstream top RUN`: monitors a run, which is only read. A terminal shows a frame of its size
until q or Ctrl-C; a pipe receives one line, or JSON object, per refresh until the run is over.
"""

import argparse
import shutil
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import msgspec
from rich.live import Live

from rollstream.errors import BusError, ConfigurationError
from rollstream.look.monitor.observer import RunObserver, opener_of_run
from rollstream.look.monitor.snapshot import RunSnapshot, run_settings_of
from rollstream.look.monitor.table import plain_line
from rollstream.look.monitor.view import TerminalKeys, TerminalSize, render_frame
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import is_deleted, run_folder
from rollstream.run.console import TerminalConsole

EVERY_MIN_S = 0.1
# Longest read before the single frame of --once.
ONCE_S = 20.0
EXIT_SIGNAL_BASE = 128


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0",
        "runs/quickstart-0 --once",
        "runs/quickstart-0/config.json --json --every 5",
    )
    command.add_run()
    command.add_argument("--once", action="store_true", help="print one frame and exit")
    command.add_argument(
        "--every", metavar="SECONDS", type=float, default=1.0, help="refresh interval (default 1)"
    )
    command.add_json()
    command.add_figures(
        "run.elapsed_s", "run.recent_trained_per_s", "run.generated_per_s", "step.lag_finish_mean",
        "step.lag_consumed_mean", "step.length_median", "run.groups_open", "run.groups_ready",
        "rollout.tokens_per_s", "rollout.recent_idle_share", "run.restarts",
    )  # fmt: skip


def main(arguments: argparse.Namespace) -> int:
    """Returns 0; 1 if `--once` could not read the log."""
    if not arguments.every >= EVERY_MIN_S:
        raise ConfigurationError(f"--every {arguments.every}: give at least {EVERY_MIN_S} seconds")
    folder = run_folder(arguments.run)
    configuration = load_for_viewing(folder.configuration)
    if is_deleted(configuration, folder.path):
        raise ConfigurationError(
            f"the run in {folder.path} was deleted; what `rollstream rm --keep` left of it is read "
            "by report and query"
        )
    observer = RunObserver(
        run_settings_of(configuration),
        folder.metrics,
        opener_of_run(folder.path, arguments.is_trusted),
        time.time,
    )
    console = TerminalConsole()
    if arguments.once:
        return _once(observer, console, arguments.json)
    if console.redraws and not arguments.json:
        return _watch(observer, console, arguments.every)
    return _print_lines(observer, arguments.every, _line if arguments.json else plain_line)


def _once(observer: RunObserver, console: TerminalConsole, as_json: bool) -> int:
    shown = observer.observe(catch_up_s=ONCE_S)
    if not observer.has_read:
        raise BusError(shown.trouble)
    if as_json:
        print(_line(shown))
    else:
        # Also in a pipe: a frame needs some width.
        columns = shutil.get_terminal_size().columns
        console.print(render_frame(shown, TerminalSize(columns)), width=columns)
    return 0


def _watch(observer: RunObserver, console: TerminalConsole, every_s: float) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _exit_on_signal)
    try:
        with TerminalKeys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                shown = observer.observe()
                live.update(
                    render_frame(shown, TerminalSize(console.width, console.height)), refresh=True
                )
                if keys.asked_to_quit(0.0 if observer.is_behind else every_s):
                    return 0
    except KeyboardInterrupt:
        return 0


def _print_lines(observer: RunObserver, every_s: float, line: Callable[[RunSnapshot], str]) -> int:
    try:
        while True:
            shown = observer.observe()
            if not observer.is_behind:
                print(line(shown), flush=True)
                if shown.is_over:
                    return 0
                time.sleep(every_s)
    except KeyboardInterrupt:
        return 0


def _line(shown: RunSnapshot) -> str:
    return msgspec.json.encode(shown).decode()


def _exit_on_signal(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_SIGNAL_BASE + number)
