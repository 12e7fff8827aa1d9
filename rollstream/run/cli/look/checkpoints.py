"""`rollstream checkpoints list | show`: the checkpoints in a run's store, read alone. `unfinished`:
without its manifest, which is written last; `damaged`: manifest or state cannot be read; else
`whole`. Tensors are not read.
"""

import argparse
import json
import re
import sys
from typing import Any

import msgspec
from rich.table import Table

from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.look.index.parentage import read_parentage
from rollstream.look.monitor.format import byte_size, plain_table
from rollstream.run.cli.arguments import RUN_OR_STORE_HELP, CommandParser
from rollstream.run.cli.look.weights import LATEST, find_store
from rollstream.run.console import TerminalConsole
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.weights.checkpoints import (
    CheckpointId,
    StoredCheckpoint,
    checkpoint_manifest,
    checkpoint_state,
    stored_checkpoints,
)
from rollstream.streams.foreign_text import whole_number

# Step and term.
_NAME = re.compile(r"s\d{8,}-t\d{4,}")
# A checkpoint as a JSON object: `checkpoint_line`, or with more keys `checkpoint_detail_line`.
CheckpointLine = dict[str, Any]
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


def main(arguments: argparse.Namespace) -> int:
    """Returns 1 if a listed or requested checkpoint is damaged, or none is found."""
    store = find_store(arguments.run, arguments.is_trusted)
    return _list(store, arguments) if arguments.action == "list" else _show(store, arguments)


def _list(store: ObjectStore, arguments: argparse.Namespace) -> int:
    lines = [checkpoint_line(store, stored) for stored in stored_checkpoints(store)]
    if not lines:
        raise ObjectMissing("no checkpoint is kept there (yet)")
    if arguments.json:
        for line in lines:
            print(json.dumps(line))
    else:
        TerminalConsole().print(checkpoints_table(lines))
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
    console = TerminalConsole()
    console.print(checkpoints_table([line]), positions_table(line), sep="\n\n")
    files = [f"{size:>15,} {name}" for name, size in line["files"].items()]
    console.print("", *files, sep="\n", highlight=False)
    counts = ", ".join(f"{count:,} {name}" for name, count in line["counts"].items()) or "none"
    console.print(f"\ncounts: {counts}\nconfiguration {line['configuration_hash']}", soft_wrap=True)
    if parentage is not None:
        origin = f"the run is a fork of {parentage}, {parentage.checkpoint} ({parentage.folder})"
        console.print(origin, soft_wrap=True, highlight=False)
    return 0


def kept_checkpoint(store: ObjectStore, text: str) -> CheckpointId:
    """`latest` (the highest term, then step), a step (of the highest term) or a full name. Raises
    `ObjectMissing` if none with a manifest has it, `ConfigurationError` if `text` has another form.
    """
    step = whole_number(text)
    if text != LATEST and step is None and not _NAME.fullmatch(text):
        raise ConfigurationError(
            f"{text!r} is not a checkpoint: give a step, a name like {CheckpointId(1, 10)}, "
            f"or {LATEST}"
        )
    complete_ids = [stored.id for stored in stored_checkpoints(store) if stored.whole]
    matches = [id for id in complete_ids if text in (LATEST, str(id)) or id.step == step]
    if not matches:
        names = ", ".join(map(str, complete_ids)) or "none"
        raise ObjectMissing(f"checkpoint {text} is not kept; kept are: {names}")
    return max(matches)


def checkpoint_line(store: ObjectStore, stored: StoredCheckpoint) -> CheckpointLine:
    """`state` is `whole`, `unfinished` or `damaged`, with a `problem`; only a whole one has sizes,
    counts and positions.
    """
    line: CheckpointLine = {
        "checkpoint": str(stored.id),
        "step": stored.id.step,
        "term": stored.id.term,
    }
    if not stored.whole:
        return line | {"state": "unfinished"}
    try:
        manifest = checkpoint_manifest(store, stored.id)
        state = TrainerState.decode(checkpoint_state(store, stored.id))
    except (ObjectMissing, CorruptObject) as error:
        return line | {"state": "damaged", "problem": str(error)}
    return line | {
        "state": "whole",
        "bytes": sum(f.bytes for f in manifest.tensors.files) + manifest.state.bytes,
        "tensors": len(manifest.tensors.names),
        "updates": state.updates,
        "open_groups": len(state.groups),
        "ledger_offset": state.ledger.offset,
        "configuration_hash": state.configuration_hash,
    }


def checkpoint_detail_line(store: ObjectStore, checkpoint: CheckpointId) -> CheckpointLine:
    """`checkpoint_line` with files (name → bytes), open groups, counts, and positions: the `offset`
    of the next record to read, and its fence, the `term` in force and the `next` sequence number.
    """
    manifest = checkpoint_manifest(store, checkpoint)
    state = TrainerState.decode(checkpoint_state(store, checkpoint))
    positions = {"ledger": {"0": state.ledger}, **state.positions}
    return checkpoint_line(store, StoredCheckpoint(checkpoint, True)) | {
        "files": {f.name: f.bytes for f in (*manifest.tensors.files, manifest.state)},
        "positions": {
            topic: {
                partition: {"offset": at.offset, "term": at.fence.term, "next": at.fence.sequence}
                for partition, at in by.items()
            }
            for topic, by in positions.items()
        },
        "groups": [
            {
                "admitted": group.admitted.offset,
                "arrived": len(group.arrived),
                "annotations": len(group.noted),
            }
            for group in state.groups
        ],
        "counts": dict(state.counts),
    }


def checkpoints_table(lines: list[CheckpointLine]) -> Table:
    table = plain_table(
        "checkpoint", "state", ">step", ">term", ">size", ">updates", ">open groups"
    )
    for line in lines:
        counts = [f"{line[key]:,}" if key in line else "–" for key in ("updates", "open_groups")]
        table.add_row(
            line["checkpoint"],
            line["state"],
            str(line["step"]),
            str(line["term"]),
            byte_size(line.get("bytes")),
            *counts,
        )
    return table


def positions_table(line: CheckpointLine) -> Table:
    table = plain_table("topic", ">partition", ">next offset", ">term", ">next sequence")
    for topic, by in line["positions"].items():
        for partition, at in by.items():
            table.add_row(topic, partition, *(f"{at[key]:,}" for key in ("offset", "term", "next")))
    return table
