"""`rollstream ls [DIR]`: lists the runs of a folder, the one with the newest record first."""

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from rollstream.errors import ConfigurationError, RollstreamError
from rollstream.look.monitor.format import age, byte_size, plain_table
from rollstream.look.monitor.observer import run_standing
from rollstream.look.query.locate import RUNS_FOLDER, may_hold_run
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import RunFolder, is_deleted
from rollstream.run.console import TerminalConsole
from rollstream.run.signals import warn


def add_arguments(command: CommandParser) -> None:
    command.add_examples("", "runs --json")
    help = f"a folder of runs (default {RUNS_FOLDER})"
    command.add_argument("folder", metavar="DIR", nargs="?", default=str(RUNS_FOLDER), help=help)
    command.add_json()
    command.add_figures("run.steps", "run.bytes")


def main(arguments: argparse.Namespace) -> int:
    """Exit code 0, also if some runs cannot be read; their problems are printed."""
    now_s = time.time()
    place = Path(arguments.folder)
    if not place.is_dir() and place != RUNS_FOLDER:
        raise ConfigurationError(f"{place}: no such folder")
    if may_hold_run(place):
        folders = [place]
    else:
        folders = [path.parent for path in place.glob("*/config.json")]
    lines = [run_line(RunFolder(at.absolute()), now_s) for at in folders if may_hold_run(at)]
    lines.sort(key=lambda line: line["newest_s"] or 0.0, reverse=True)
    if not lines:
        warn(f"{arguments.folder} holds no run")
    elif arguments.json:
        for line in lines:
            print(json.dumps(line))
    else:
        _print_table(lines, now_s)
    return 0


def run_line(folder: RunFolder, now_s: float) -> dict[str, Any]:
    """`bytes` of its folder, and `state`, which is `deleted` if `rollstream rm` kept parts of it,
    and `unreadable`, with a `problem`, if configuration or log cannot be read.
    """
    line: dict[str, Any] = {"run": folder.path.name, "bytes": _folder_bytes(folder.path)}
    try:
        configuration = load_for_viewing(folder.configuration)
        if is_deleted(configuration, folder.path):
            return {**line, "state": "deleted", "step": None, "steps": None, "newest_s": None}
        standing = run_standing(configuration, folder, now_s)
    except RollstreamError as error:
        unknown = {"state": "unreadable", "step": None, "steps": None, "newest_s": None}
        return {**line, **unknown, "problem": str(error)}
    return {
        **line,
        "state": standing.state,
        "step": standing.step,
        "steps": standing.steps,
        "newest_s": standing.newest_s,
    }


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            # The file vanished meanwhile.
            except OSError:
                continue
    return total


def _print_table(lines: list[dict[str, Any]], now_s: float) -> None:
    table = plain_table("run", "state", ">step", ">size", ">newest record")
    for line in lines:
        step = "–" if line["step"] is None else f"{line['step']} of {line['steps']}"
        newest_s = line["newest_s"]
        news = "–" if newest_s is None else f"{age(now_s - newest_s)} ago"
        table.add_row(line["run"], line["state"], step, byte_size(line["bytes"]), news)
    TerminalConsole().print(table)
    for line in lines:
        if "problem" in line:
            warn(f"{line['run']}: {line['problem']}")
