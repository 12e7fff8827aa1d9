"""`rollstream weights list | show | verify | diff | export`. Only the object store is read, so it
works for a bucket without a run.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import track
from rich.table import Table

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, CorruptObject, ObjectMissing
from rollstream.look.monitor.format import byte_size, plain_table
from rollstream.look.query.locate import locate_run, may_hold_run
from rollstream.look.query.looking import open_run_store
from rollstream.run.cli.arguments import RUN_OR_STORE_HELP, CommandParser
from rollstream.run.console import TerminalConsole
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.read_only import FolderReader
from rollstream.storage.weights.manifest import Manifest, parse_version, read_manifest
from rollstream.storage.weights.named_streams import WeightStream, run_streams
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.retention import stored_versions
from rollstream.streams.foreign_text import whole_number
from rollstream.streams.values import Version

if TYPE_CHECKING:
    from rollstream.storage.weights.verify import TensorDifference

# Largest weight file of an export, unless one tensor is larger.
SHARD_BYTES = 4 << 30
# Names the believed version.
LATEST = "latest"
# One JSON object of the output.
VersionLine = dict[str, str | int | float | bool | None]


ACTIONS = {
    "list": "list the versions, oldest first: kind, parent, size",
    "show": "show one version: each tensor, its encoding, its changed elements",
    "verify": "verify the hash of every tensor; exit code 1 if any differs",
    "diff": "list the tensors that differ between two versions, and by how much",
    "export": "write a version as a folder that transformers, PEFT and vLLM load",
}
EXAMPLES = {
    "list": "runs/quickstart-0",
    "show": "runs/quickstart-0 latest",
    "verify": "runs/quickstart-0",
    "diff": "runs/quickstart-0 50 60 --json",
    "export": "runs/quickstart-0 latest --out exported",
}
VERSION_HELP = "a number, a full name like v00000012-t0001, or latest"
# The positional arguments after the run, by action.
ARGUMENTS = {
    "show": ("version",),
    "verify": ("version",),
    "diff": ("first", "second"),
    "export": ("version", "folder"),
}


def add_arguments(command: CommandParser) -> None:
    command.add_examples(EXAMPLES[command.action])
    command.add_run(RUN_OR_STORE_HELP, before=ARGUMENTS.get(command.action, ()))
    if command.action == "diff":
        command.add_argument("first", metavar="A", help=VERSION_HELP)
        command.add_argument("second", metavar="B", help=VERSION_HELP)
    elif command.action == "verify":
        help = f"{VERSION_HELP}; default: all"
        command.add_argument("version", metavar="VERSION", nargs="?", help=help)
    elif command.action != "list":
        command.add_argument("version", metavar="VERSION", help=VERSION_HELP)
    if command.action == "export":
        command.add_argument("folder", metavar="DIR", nargs="?", help="a new or empty folder")
        command.add_argument("--out", metavar="DIR", help="the same as DIR")
        command.add_argument(
            "--merged", action="store_true", help="an adapter: merge it into its base, as one model"
        )
    streams = {"list": "all", "verify": "all, with VERSION the policy's"}
    default = streams.get(command.action, "the policy's, which has no name")
    command.add_argument(
        "--stream", metavar="NAME", help=f"the weight stream of the versions; default: {default}"
    )
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Returns 1 if `verify` finds a wrong version, else 0. Raises `ObjectMissing` (exit code 1) if
    a version is missing, `ConfigurationError` (2) for a wrong argument.
    """
    store = find_store(arguments.run)
    if arguments.action in _OF_STREAMS:
        if arguments.stream is None:
            streams = run_streams(store)
        else:
            streams = (WeightStream(arguments.stream),)
        return _OF_STREAMS[arguments.action](store, streams, arguments)
    part = WeightStream(arguments.stream or "").part(store)
    return _OF_VERSIONS[arguments.action](part, arguments)


def _list(
    store: ObjectStore, streams: Sequence[WeightStream], arguments: argparse.Namespace
) -> int:
    lines = [line for stream in streams for line in _version_lines(store, stream)]
    if not lines:
        raise ObjectMissing("no version is kept there (yet)")
    if arguments.json:
        _print(lines)
    else:
        TerminalConsole().print(versions_table(lines))
    return 0


def _version_lines(store: ObjectStore, stream: WeightStream) -> Iterator[VersionLine]:
    part = stream.part(store)
    pointer = believed_pointer(part)
    latest = None if pointer is None else pointer.version
    for stored in stored_versions(part):
        line: VersionLine = {"version": str(stored.version), "kind": "unfinished"}
        try:
            line = version_line(read_manifest(part, stored.version), latest)
        except (ObjectMissing, CorruptObject) as error:
            if stored.whole:
                print(f"rollstream: {error}", file=sys.stderr)
        yield {**line, "stream": stream.name}


def _show(store: ObjectStore, arguments: argparse.Namespace) -> int:
    manifest = find_version(store, arguments.version)
    pointer = believed_pointer(store)
    line = version_line(manifest, None if pointer is None else pointer.version)
    tensors = tensor_lines(manifest)
    if arguments.json:
        print(json.dumps({**line, "tensor": tensors}))
        return 0
    console = TerminalConsole()
    console.print(versions_table([line]), tensors_table(tensors), sep="\n\n")
    files = [(f.name, f.bytes) for f in manifest.files]
    console.print("", *(f"{size:>15,} {name}" for name, size in files), sep="\n", highlight=False)
    parent, anchor = line["parent"] or "none", line["anchor"]
    console.print(
        f"\nparent {parent}, anchor {anchor}, manifest {line['manifest_hash']}", soft_wrap=True
    )
    return 0


def _verify(
    store: ObjectStore, streams: Sequence[WeightStream], arguments: argparse.Namespace
) -> int:
    from rollstream.storage.weights.verify import verify_version

    versions: list[tuple[WeightStream, Version]] = []
    if arguments.version is None:
        for stream in streams:
            stored = stored_versions(stream.part(store))
            versions += [(stream, each.version) for each in stored if each.whole]
    else:
        stream = streams[0]
        versions.append((stream, find_version(stream.part(store), arguments.version).version))
    if not versions:
        raise ObjectMissing("no version is kept there (yet)")
    bad = 0
    quiet = not sys.stderr.isatty()
    for stream, version in track(
        versions, "verifying", console=TerminalConsole(stderr=True), disable=quiet
    ):
        manifest, problem = verify_version(stream.part(store), version)
        tensors = len(manifest.weights.tensors) if manifest else 0
        bad += bool(problem)
        if arguments.json:
            line = {"version": str(version), "tensors": tensors, "ok": not problem}
            print(json.dumps({**line, "problem": problem or None, "stream": stream.name}))
        else:
            label = f"{stream.name} {version}".lstrip()
            print(f"{label}: {problem or f'{tensors} tensors, all hashes correct'}", flush=True)
    return 1 if bad else 0


def _diff(store: ObjectStore, arguments: argparse.Namespace) -> int:
    from rollstream.storage.weights.verify import compare_versions

    first, second = (find_version(store, name) for name in (arguments.first, arguments.second))
    lines = [difference_line(tensor) for tensor in compare_versions(store, first, second)]
    total = sum(int(line["changed"] or 0) for line in lines)
    count = len(second.weights.tensors)
    # The totals come first, so equal versions have a line too.
    if arguments.json:
        versions = {"first": str(first.version), "second": str(second.version)}
        _print([{**versions, "tensors": count, "differ": len(lines), "changed": total}, *lines])
        return 0
    if lines:
        TerminalConsole().print(differences_table(lines))
    print(
        f"{first.version} → {second.version}: "
        f"{len(lines)} of {count} tensors differ, in {total:,} elements"
    )
    return 0


def _export(store: ObjectStore, arguments: argparse.Namespace) -> int:
    from rollstream.storage.weights.fetch import export_version

    if (arguments.folder is None) == (arguments.out is None):
        raise ConfigurationError("give the new folder once: --out DIR, or DIR behind the version")
    version = find_version(store, arguments.version).version
    folder = Path(arguments.folder or arguments.out)
    done = export_version(store, version, folder, SHARD_BYTES, merged=arguments.merged)
    if arguments.json:
        line = {"version": str(done.version), "folder": str(done.folder), "bytes": done.bytes}
        print(json.dumps({**line, "files": done.files}))
    else:
        print(f"{done.version}: {len(done.files)} files, {done.bytes:,} bytes in {done.folder}")
    return 0


def _print(lines: Sequence[VersionLine]) -> None:
    for line in lines:
        print(json.dumps(line))


def version_line(manifest: Manifest, latest: Version | None) -> VersionLine:
    """It is `believed` if it is `latest`."""
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
    """One JSON object per stored tensor. `tied` lists its other names in the model; fields of the
    delta are None in a version without one.
    """
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


def difference_line(difference: "TensorDifference") -> VersionLine:
    return {
        "tensor": difference.name,
        "elements": difference.elements,
        "changed": difference.changed,
        "largest": difference.largest,
    }


def versions_table(lines: Iterable[VersionLine]) -> Table:
    table = plain_table("version", "kind", ">size", ">of full", ">delta", "created", "")
    for line in lines:
        version = f"{line.get('stream', '')} {line['version']}".lstrip()
        if line["kind"] == "unfinished":
            table.add_row(version, "unfinished")
            continue
        table.add_row(
            version,
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


def _count(number: str | int | float | None) -> str:
    return "–" if number is None else f"{int(number):,}"


def _share(part: str | int | float | None, total: str | int | float | None) -> str:
    return f"{float(part or 0) / max(1.0, float(total or 0)):.1%}"


def find_store(run: str, is_trusted: bool = False) -> ObjectStore:
    """Finds the store of a run, or named by its folder or URL; read-only. Raises
    `ConfigurationError` if the run has none yet.
    """
    path = Path(run.removeprefix("file:"))
    for folder in (path, path / "store"):
        if (folder / "weights").is_dir() and not may_hold_run(path):
            return FolderReader(ContainedFolder(folder))
    location = locate_run(run, is_trusted)
    if not location.has_store:
        raise ConfigurationError(f"{location.name} has no weights yet")
    return open_run_store(location)


def find_version(store: ObjectStore, text: str) -> Manifest:
    """`latest`, a full name, or a number (of the highest term). Raises `ObjectMissing`, with the
    stored ones, or `ConfigurationError` for no name of a version.
    """
    version, number = parse_version(text), whole_number(text)
    if version is None and text != LATEST and number is None:
        raise ConfigurationError(
            f"{text!r} is not a version: give a number, a name like {Version(12, 1)}, or {LATEST}"
        )
    pointer = believed_pointer(store)
    if text == LATEST and pointer is not None and pointer.version is not None:
        return read_manifest(store, pointer.version, pointer.manifest_hash)
    versions = [stored.version for stored in stored_versions(store) if stored.whole]
    matches = [v for v in versions if v == version or v.number == number]
    if not matches:
        names = ", ".join(map(str, versions)) or "none"
        raise ObjectMissing(f"version {text} is not kept; kept are: {names}")
    return read_manifest(store, max(matches))


_OF_STREAMS: Mapping[
    str, Callable[[ObjectStore, Sequence[WeightStream], argparse.Namespace], int]
] = {"list": _list, "verify": _verify}
_OF_VERSIONS: Mapping[str, Callable[[ObjectStore, argparse.Namespace], int]] = {
    "show": _show,
    "diff": _diff,
    "export": _export,
}
