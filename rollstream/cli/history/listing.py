"""The trainer's checkpoints as JSON objects and as tables, in short and in detail."""

import re
from typing import Any

from rich.table import Table

from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.cli.history.finding import LATEST
from rollstream.cli.history.tables import byte_size, plain_table
from rollstream.storage.checkpoints import CheckpointId, StoredCheckpoint, checkpoint_manifest, checkpoint_state, stored_checkpoints
from rollstream.storage.stores.base import ObjectStore
from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing

_NAME = re.compile(r"s\d{8,}-t\d{4,}")
CheckpointLine = dict[str, Any]


def kept_checkpoint(store: ObjectStore, text: str) -> CheckpointId:
    """Finds a checkpoint by `latest`, a step (its highest term) or a full name. Raises
    `ObjectMissing`, listing the kept ones.
    """
    if text != LATEST and not text.isdecimal() and not _NAME.fullmatch(text):
        raise ConfigurationError(
            f"{text!r} is not a checkpoint: give a step, a name like {CheckpointId(1, 10)}, "
            f"or {LATEST}"
        )
    whole = [stored.id for stored in stored_checkpoints(store) if stored.whole]
    found = [
        one
        for one in whole
        if text in (LATEST, str(one)) or (text.isdecimal() and one.step == int(text))
    ]
    if not found:
        names = ", ".join(map(str, whole)) or "none"
        raise ObjectMissing(f"checkpoint {text} is not kept; kept are: {names}")
    return max(found)


def checkpoint_line(store: ObjectStore, stored: StoredCheckpoint) -> CheckpointLine:
    """Returns a checkpoint in short; `state` is whole, unfinished or damaged (with a `problem`)."""
    line: CheckpointLine = {"checkpoint": str(stored.id), "step": stored.id.step, "term": stored.id.term}
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


def checkpoint_detail_line(store: ObjectStore, wanted: CheckpointId) -> CheckpointLine:
    """Returns a checkpoint with positions, open groups, counts and files."""
    manifest = checkpoint_manifest(store, wanted)
    state = TrainerState.decode(checkpoint_state(store, wanted))
    positions = {"ledger": {"0": state.ledger}, **state.positions}
    return checkpoint_line(store, StoredCheckpoint(wanted, True)) | {
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
    table = plain_table("checkpoint", "state", ">step", ">term", ">size", ">updates", ">open groups")
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
