"""Finds kept weight versions and checkpoints, and lists them as JSON objects or as tables."""

import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rollstream.analysis.locate import locate_run
from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.storage.checkpoints import (
    CheckpointId,
    StoredCheckpoint,
    checkpoint_manifest,
    checkpoint_state,
    stored_checkpoints,
)
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.manifest import Manifest, parse_version, read_manifest
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import stored_versions
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from rollstream.storage.weights.verify import TensorDifference

VersionLine = dict[str, str | int | float | bool | None]


def version_line(manifest: Manifest, latest: Version | None) -> VersionLine:
    delta = manifest.delta
    return {
        "version": str(manifest.version),
        "kind": manifest.kind,
        "parent": str(manifest.parent) if manifest.parent else None,
        "anchor": str(manifest.anchor),
        "bytes": manifest.bytes,
        "full_bytes": manifest.full_bytes,
        "delta_bytes": None if delta is None else delta.bytes,
        "tensors": len(manifest.weights.tensors),
        "created_s": manifest.created_s,
        "believed": manifest.version == latest,
        "manifest_hash": manifest.hash,
    }


def tensor_lines(manifest: Manifest) -> list[VersionLine]:
    """Returns one object per tensor; tied tensors share one."""
    names: dict[str, list[str]] = {}
    for name, owner in manifest.weights.tied.items():
        names.setdefault(owner, []).append(name)
    lines: list[VersionLine] = []
    for name, entry in manifest.weights.tensors.items():
        delta = manifest.delta and manifest.delta.tensors[name]
        lines.append(
            {
                "tensor": name,
                "tied": ", ".join(names.get(name, ())),
                "dtype": entry.dtype,
                "shape": "×".join(map(str, entry.shape)) or "scalar",
                "bytes": entry.bytes,
                "hash": entry.hash,
                "base": delta.base if delta else None,
                "coding": delta.coding if delta else None,
                "values": delta.values if delta else None,
                "changed": delta.changed if delta else None,
                "delta_bytes": delta.bytes if delta else None,
            }
        )
    return lines


def difference_line(found: "TensorDifference") -> VersionLine:
    return {
        "tensor": found.name,
        "elements": found.elements,
        "changed": found.changed,
        "largest": found.largest,
    }


UNITS = ("B", "kB", "MB", "GB", "TB")


def versions_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("version", "kind", ">size", ">of full", ">delta", "created", "")
    for line in lines:
        if line["kind"] == "unfinished":
            table.add_row(str(line["version"]), "unfinished")
            continue
        table.add_row(
            str(line["version"]),
            str(line["kind"]),
            byte_size(line["bytes"]),
            _share(line["bytes"], line["full_bytes"]),
            byte_size(line["delta_bytes"]),
            time.strftime("%m-%d %H:%M:%S", time.localtime(float(line["created_s"] or 0))),
            "believed" if line["believed"] else "",
        )
    return table


def tensors_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("tensor", "type", "coding", ">changed", ">delta")
    for line in lines:
        tied = f" = {line['tied']}" if line["tied"] else ""
        table.add_row(
            f"{line['tensor']}{tied}",
            f"{line['dtype']} {line['shape']}",
            " ".join(filter(None, (str(line["coding"] or "–"), str(line["values"] or "")))),
            _count(line["changed"]),
            byte_size(line["delta_bytes"]),
        )
    return table


def differences_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("tensor", ">elements", ">changed", ">share", ">largest change")
    for line in lines:
        largest = line["largest"]
        table.add_row(
            str(line["tensor"]),
            _count(line["elements"]),
            _count(line["changed"]),
            _share(line["changed"], line["elements"]),
            "–" if largest is None else f"{float(largest):.3g}",
        )
    return table


def plain_table(*columns: str) -> Table:
    """Returns a table without frame; columns whose name starts with > are right-aligned."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column.startswith(">")
        justify, folds = "right" if right else "left", column == "tensor"
        table.add_column(
            column.removeprefix(">"), justify=justify, no_wrap=not folds, overflow="fold"
        )
    return table


def _count(number: str | int | float | None) -> str:
    return "–" if number is None else f"{int(number):,}"


def byte_size(count: str | int | float | None) -> str:
    """Formats a size in powers of 1000 bytes."""
    if count is None:
        return "–"
    size, unit = float(count), 0
    while size >= 1000 and unit < len(UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {UNITS[unit]}" if size < 999.5 else f"{size:.0f} {UNITS[unit]}"


def _share(part: str | int | float | None, whole: str | int | float | None) -> str:
    return f"{float(part or 0) / max(1.0, float(whole or 0)):.1%}"


LATEST = "latest"


def find_store(named: str) -> ObjectStore:
    """Opens the store of a run's folder or config.json, or a store by its folder or URL. Creates
    nothing.
    """
    path = Path(named.removeprefix("file:"))
    for folder in (path, path / "store"):
        if (folder / "weights").is_dir() and not (path / "config.json").is_file():
            return open_store(f"file:{folder.absolute()}")
    location = locate_run(named)
    if not location.has_store:
        raise ConfigurationError(f"{location.name} has no weights yet")
    return open_store(location.store)


def is_version(text: str) -> bool:
    """True if the text has the form of a version."""
    return text == LATEST or text.isdecimal() or parse_version(text) is not None


def find_version(store: ObjectStore, text: str) -> Manifest:
    """Finds a version by `latest`, a number (its highest kept term) or a full name.

    Raises `ObjectMissing`, listing the kept ones.
    """
    if not is_version(text):
        raise ConfigurationError(
            f"{text!r} is not a version: give a number, a name like {Version(12, 1)}, or {LATEST}"
        )
    pointer = believed_pointer(store)
    if text == LATEST and pointer is not None and pointer.version is not None:
        return read_manifest(store, pointer.version, pointer.manifest_hash)
    kept = [stored.version for stored in stored_versions(store) if stored.whole]
    named = parse_version(text)
    found = [v for v in kept if v == named or (text.isdecimal() and v.number == int(text))]
    if not found:
        names = ", ".join(map(str, kept)) or "none"
        raise ObjectMissing(f"version {text} is not kept; kept are: {names}")
    return read_manifest(store, max(found))


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
