"""`rollstream checkpoints list | show`: the trainer's checkpoints in a run's store.

Reads only the store, so it works for a running run, a finished one, and a bucket without a run.
"""

import argparse
import json
import sys

import msgspec
from rich.console import Console

from rollstream.cli.arguments import RUN_OR_STORE_HELP, CommandParser
from rollstream.cli.look.listing import (
    checkpoint_detail_line,
    checkpoint_line,
    checkpoints_table,
    find_store,
    kept_checkpoint,
    positions_table,
)
from rollstream.cli.signals import quiet_on_closed_pipe
from rollstream.errors import ObjectMissing
from rollstream.runs.parentage import read_parentage
from rollstream.storage.checkpoints import stored_checkpoints
from rollstream.storage.stores.base import ObjectStore

ACTIONS = {
    "list": "list the checkpoints, oldest first; also unfinished and damaged ones",
    "show": "show one checkpoint: tensors, positions, open groups, counts",
}


def add_arguments(command: CommandParser) -> None:
    if command.action == "list":
        command.add_examples("runs/quickstart-0")
        command.add_run(RUN_OR_STORE_HELP)
    else:
        command.add_examples("runs/quickstart-0 latest", "runs/quickstart-0 60 --json")
        command.add_run(RUN_OR_STORE_HELP, before=("checkpoint",))
        help = "a step, a full name like s00000010-t0001, or latest"
        command.add_argument("checkpoint", metavar="CHECKPOINT", help=help)
    command.add_json()


@quiet_on_closed_pipe
def main(arguments: argparse.Namespace) -> int:
    """Exit code 1 if the requested checkpoint is missing or a listed one is damaged."""
    store = find_store(arguments.run)
    return _list(store, arguments) if arguments.action == "list" else _show(store, arguments)


def _list(store: ObjectStore, arguments: argparse.Namespace) -> int:
    lines = [checkpoint_line(store, stored) for stored in stored_checkpoints(store)]
    if not lines:
        raise ObjectMissing("no checkpoint is kept there (yet)")
    if arguments.json:
        for line in lines:
            print(json.dumps(line))
    else:
        Console().print(checkpoints_table(lines))
    problems = [line["problem"] for line in lines if "problem" in line]
    for problem in problems:
        print(f"rollstream: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _show(store: ObjectStore, arguments: argparse.Namespace) -> int:
    line = checkpoint_detail_line(store, kept_checkpoint(store, arguments.checkpoint))
    parentage = read_parentage(store)
    if parentage is not None:
        line["forked_from"] = msgspec.to_builtins(parentage)
    if arguments.json:
        print(json.dumps(line))
        return 0
    console = Console()
    console.print(checkpoints_table([line]), positions_table(line), sep="\n\n")
    files = [f"{size:>15,} {name}" for name, size in line["files"].items()]
    console.print("", *files, sep="\n", highlight=False)
    counts = ", ".join(f"{count:,} {name}" for name, count in line["counts"].items()) or "none"
    console.print(f"\ncounts: {counts}\nconfiguration {line['configuration_hash']}", soft_wrap=True)
    if parentage is not None:
        origin = f"the run is a fork of {parentage}, {parentage.checkpoint} ({parentage.folder})"
        console.print(origin, soft_wrap=True, highlight=False)
    return 0
