"""`rollstream fork RUN --at STEP --out DIR`: a run that begins at a checkpoint of another one, its
parent (docs/reference/fork.md), which is only read and may be running. From the URL of a store
alone, its log lost, it also prints the recovery point: the first step and the losses.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rollstream.errors import ConfigurationError
from rollstream.printable import shell_command
from rollstream.run.cli.arguments import CommandParser
from rollstream.storage.weights.checkpoints import CheckpointId
from rollstream.streams.foreign_text import whole_number

if TYPE_CHECKING:
    from rollstream.keep.fork import ForkPlan
    from rollstream.look.index.parentage import ForkParent, Parentage, RecoveryPoint


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 --at 50 --out runs/forked --set trainer.steps=80",
        "runs/quickstart-0 --at latest --out runs/longer --set trainer.steps=120 --json",
    )
    command.add_run("the parent run, which is only read, or its store's URL; default: newest run")
    at = "use the newest checkpoint up to this step, or latest"
    command.add_argument("--at", metavar="STEP", required=True, help=at)
    command.add_argument("--out", metavar="DIR", required=True, help="a new or empty folder")
    command.add_overrides("override a setting of the parent, e.g. run=NAME or trainer.lr=1e-4")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    from rollstream.look.index.parentage import parent_of_folder, parent_of_store
    from rollstream.run.config.run_folder import run_folder

    run: str = arguments.run
    if ":" not in run or os.path.exists(run):
        _fork(arguments, parent_of_folder(run_folder(run)))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        _fork(arguments, parent_of_store(run, Path(scratch) / "config.json"))
    return 0


def _fork(arguments: argparse.Namespace, parent: "ForkParent") -> None:
    from rollstream.consumers.trainer.checkpoint import TrainerState

    # It imports torch, which takes seconds.
    from rollstream.keep.fork import (
        check_folders,
        find_checkpoint,
        make_fork,
        plan_fork,
        prompts_left_at,
    )
    from rollstream.keep.source import open_run_source
    from rollstream.look.index.parentage import PromptsLeft, read_parentage, recovery_point
    from rollstream.look.query.looking import require_code

    out = Path(arguments.out)
    check_folders(parent.folder, out)
    with open_run_source(parent.where, parent.run, arguments.is_trusted) as source:
        require_code(source.location)
        store = source.store
        if store is None:
            raise ConfigurationError(
                f"{source.location.name} has no store, so it has no checkpoint to fork from"
            )
        checkpoint = find_checkpoint(store, arguments.at)
        step = checkpoint.id.step
        plan = plan_fork(parent, out, arguments.overrides, step)
        before = read_parentage(store)
        inherited = PromptsLeft() if before is None else before.prompts
        prompts = prompts_left_at(source.log, TrainerState.decode(checkpoint.state), inherited)
        lost = recovery_point(store, source.log, step, prompts) if parent.bus is None else None
        _warn_other_step(arguments.at, checkpoint.id)
        parentage = make_fork(plan, checkpoint, prompts, source)
    _print_fork(plan, parentage, lost, arguments.json)


def _warn_other_step(step_text: str, taken: CheckpointId) -> None:
    step = whole_number(step_text)
    if step not in (None, taken.step):
        note = f"no checkpoint of step {step} is kept; the fork begins at step {taken.step}"
        print(f"rollstream: {note}", file=sys.stderr)


def _print_fork(
    plan: "ForkPlan", parentage: "Parentage", lost: "RecoveryPoint | None", as_json: bool
) -> None:
    folder, prompts = plan.folder.path, parentage.prompts
    if as_json:
        line = {
            "run": plan.now.run, "folder": str(folder), "forked_from": parentage.run,
            "checkpoint": parentage.checkpoint, "step": parentage.step,
            "state_hash": parentage.state_hash, "prompts_again": prompts.again,
            "prompts_from": prompts.on, "changes": parentage.changes,
            "recovery": None if lost is None else asdict(lost),
        }  # fmt: skip
        print(json.dumps(line))
        return
    repeated = f"{len(prompts.again)} prompts of open groups again, then " if prompts.again else ""
    print(f"{plan.now.run} begins at step {parentage.step} of {parentage.run}")
    print(f"  from checkpoint {parentage.checkpoint}, state {parentage.state_hash}")
    print(f"  prompts: {repeated}from prompt {prompts.on} on")
    if lost is not None:
        print("\n".join(_recovery_lines(lost)))
    for change in plan.changes():
        print(f"  {change.key}: {json.dumps(change.before)} → {json.dumps(change.now)}")
    print(f"start it with: {shell_command('run', folder)}")


def _recovery_lines(lost: "RecoveryPoint") -> Iterator[str]:
    yield (
        f"  recovery point: step {lost.step} of {lost.reached} trained ones; "
        f"{lost.reached - lost.step} steps are trained again, on new trajectories"
    )
    yield f"  {lost.admitted_since} admitted groups are asked again"
    yield (
        f"  archive: {lost.archived_records} records, up to step {lost.archived_step} of the "
        "ledger; the log's last archive.roll_s seconds (default 300) are lost"
    )
    yield "  settings that do not affect what is learnt are defaults: the store does not hold them"
