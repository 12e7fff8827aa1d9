"""`rollstream fork RUN --at STEP --out DIR`: creates a run from another run's checkpoint
(docs/reference/fork.md). The parent is only read, and may be running.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.cli.arguments import CommandParser
from rollstream.errors import ConfigurationError
from rollstream.runs.parentage import Parentage, PromptsLeft, read_parentage
from rollstream.storage.checkpoints import CheckpointId

if TYPE_CHECKING:
    from rollstream.runs.fork import ForkPlan


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 --at 30 --out runs/forked",
        "runs/quickstart-0 --at latest --out runs/longer --set trainer.steps=120 --json",
    )
    command.add_run("the parent run, which is only read; default: newest run")
    at = "use the newest checkpoint up to this step, or latest"
    command.add_argument("--at", metavar="STEP", required=True, help=at)
    command.add_argument("--out", metavar="DIR", required=True, help="a new or empty folder")
    command.add_overrides("override a setting of the parent, e.g. run=NAME or trainer.lr=1e-4")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Create the fork and print its starting point; `rollstream run DIR` starts it."""
    from rollstream.consumers.trainer.checkpoint import TrainerState
    from rollstream.report.reading import run_folder
    from rollstream.runs.fork import (  # imports torch, which takes seconds
        check_folders,
        find_checkpoint,
        make_fork,
        plan_fork,
        prompts_left_at,
    )
    from rollstream.runs.replay_output import open_replay_source

    parent = run_folder(arguments.run)
    check_folders(parent, Path(arguments.out))
    with open_replay_source(str(parent.path)) as source:
        store = source.store
        if store is None:
            raise ConfigurationError(
                f"{source.location.name} has no store, so it has no checkpoint to fork from"
            )
        checkpoint = find_checkpoint(store, arguments.at)
        wanted = plan_fork(parent, Path(arguments.out), arguments.overrides, checkpoint.id.step)
        before = read_parentage(store)
        had = PromptsLeft() if before is None else before.prompts
        left = prompts_left_at(source.log, TrainerState.decode(checkpoint.state), had)
    _warn_other_step(arguments.at, checkpoint.id)
    parentage = make_fork(wanted, checkpoint, left)
    _print_fork(wanted, parentage, arguments.json)
    return 0


def _warn_other_step(asked: str, taken: CheckpointId) -> None:
    if asked.isdecimal() and int(asked) != taken.step:
        note = f"no checkpoint of step {int(asked)} is kept; the fork begins at step {taken.step}"
        print(f"rollstream: {note}", file=sys.stderr)


def _print_fork(wanted: "ForkPlan", parentage: Parentage, as_json: bool) -> None:
    folder, left = wanted.folder.path, parentage.prompts
    if as_json:
        line = {
            "run": wanted.now.run, "folder": str(folder), "forked_from": parentage.run,
            "checkpoint": parentage.checkpoint, "step": parentage.step,
            "state_hash": parentage.state_hash, "prompts_again": left.again,
            "prompts_from": left.on, "changes": parentage.changes,
        }  # fmt: skip
        print(json.dumps(line))
        return
    again = f"{len(left.again)} prompts of open groups again, then " if left.again else ""
    print(f"{wanted.now.run} begins at step {parentage.step} of {parentage.run}")
    print(f"  from checkpoint {parentage.checkpoint}, state {parentage.state_hash}")
    print(f"  prompts: {again}from prompt {left.on} on")
    for change in wanted.changes():
        print(f"  {change.key}: {json.dumps(change.before)} → {json.dumps(change.now)}")
    print(f"start it with: rollstream run {folder}")
