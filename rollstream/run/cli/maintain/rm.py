"""`rollstream rm RUN|URL`: shows what a run has in log, store and folder, asks, and deletes it
(docs/how-to/delete-and-retain.md), nothing of a running or another run.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from typing import cast

from rollstream.errors import ConfigurationError
from rollstream.keep import removal
from rollstream.keep.run_place import check_permitted, run_files
from rollstream.look.monitor.format import byte_size
from rollstream.look.query.locate import run_path
from rollstream.look.query.permissions import folder_of_url
from rollstream.printable import shell_command
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.cli.main import EXIT_INTERRUPTED
from rollstream.run.supervisor.supervisor import RunLock
from rollstream.storage.stores.base import ListedObject
from rollstream.streams.connect import check_reachable

# For the lock of the run's folder, which a running run holds.
LOCK_WAIT_S = 0.5


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 --keep archive,final --yes",
        "runs/quickstart-0 --yes --json",
    )
    run = "a run's folder, its name in runs/, a store's URL, or a log's URL"
    command.add_argument("run", metavar="RUN", help=run)
    keep = "keep parts: archive, final (the last version and checkpoint), or both"
    command.add_argument("--keep", metavar="PARTS", default="", help=keep)
    command.add_argument("--bus", metavar="URL", help="with a store's URL: the run's log")
    command.add_argument("--yes", action="store_true", help="delete without asking")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Checks that no process of the run lives, shows the plan, asks, and deletes."""
    keep = _keeps(arguments.keep)
    place = removal.find_run_place(run_path(arguments.run), arguments.bus, or_emptied=True)
    if place.bus is not None:
        check_reachable(place.bus)
    check_permitted(place, arguments.yes)
    # Before the lock, which is a file in the folder.
    removal.check_is_run(place)
    with ExitStack() as stack:
        if place.folder is not None:
            # Held to the end, so that the run cannot start meanwhile.
            stack.enter_context(closing(RunLock(place.folder, LOCK_WAIT_S)))
        removal.check_not_living(place)
        plan = removal.plan_removal(place, keep)
        if arguments.yes:
            _check_links(plan)
        if not arguments.json:
            print("\n".join(_lines(plan)))
        if plan and not arguments.yes and not _confirmed(place.run):
            print("rollstream: nothing was deleted", file=sys.stderr)
            return EXIT_INTERRUPTED
        for part in removal.remove(plan, keep):
            if plan and not arguments.json:
                print(f"deleted: {part}", flush=True)
    if arguments.json:
        print(json.dumps(_json(plan)))
    return 0


def _check_links(plan: removal.RemovalPlan) -> None:
    files = run_files(plan.place)
    for link in plan.links:
        # With --yes the user sees no link before the objects behind it are gone.
        if link.followed and files is not None and not files.contains(link.target):
            raise ConfigurationError(
                f"{link.path} leads to {link.target}, outside of the run: remove the run without "
                f"--yes, and read what is shown; or name the folder once: "
                + shell_command("trust", plan.place.folder, "--folder", link.target)
            )


def _keeps(text: str) -> tuple[removal.Keep, ...]:
    parts = [part for part in text.split(",") if part]
    for part in parts:
        if part not in removal.KEEPS:
            raise ConfigurationError(f"--keep {part}: known are {', '.join(removal.KEEPS)}")
    return tuple(cast(removal.Keep, part) for part in parts)


def _confirmed(run: str) -> bool:
    print(f"delete this of {run} for good? [y/N] ", end="", flush=True)
    if sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]  closed before the start
        return False
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _lines(plan: removal.RemovalPlan) -> Iterator[str]:
    place, objects = plan.place, plan.objects
    yield f"run {place.run}{f' ({plan.proof.id})' if plan.proof.id else ''}"
    if plan.log is not None:
        log = plan.log
        counts = f"{len(log.topics)} topics, {len(log.groups)} consumer groups"
        yield f"  log     {_resolved(place.bus)}: {counts}, {byte_size(log.bytes)}"
    if place.store is not None:
        yield f"  store   {_resolved(place.store)}: {_objects(objects.delete)}"
        yield from _examples([entry.key for entry in objects.delete])
    if place.folder is not None:
        names = [str(path.relative_to(place.folder)) for path in plan.folder.delete]
        size = sum(path.lstat().st_size for path in plan.folder.delete)
        yield f"  folder  {place.folder.resolve()}: {len(names):,} files, {byte_size(size)}"
        yield from _examples(names)
    for link in plan.links:
        if link.followed:
            yield f"  link    {link.path} leads to {link.target}: the run's objects there go, too"
    if objects.kept:
        yield f"  kept    {_objects(objects.kept)}"
    if objects.foreign:
        yield f"  stay in the store, of other runs or programs: {_objects(objects.foreign)}"
        yield from _examples([entry.key for entry in objects.foreign])
    if plan.folder.foreign and place.folder is not None:
        yield f"  stay in the folder: {len(plan.folder.foreign):,} files that no run writes"
        yield from _examples([str(path.relative_to(place.folder)) for path in plan.folder.foreign])
    for link in (*plan.links, *plan.folder.links):
        if not link.followed:
            yield f"  link    {link.path} goes; what it leads to stays: {link.target}"
    if place.store is not None and place.bus is None:
        yield "  its log stays: name it with --bus URL, or delete it with `rollstream rm URL`"
    if not plan:
        yield "nothing of it is left to delete"


def _resolved(url: str | None) -> str:
    folder = None if url is None else folder_of_url(url)
    return str(url) if folder is None else f"{str(url).partition(':')[0]}:{folder.resolve()}"


def _examples(names: Sequence[str]) -> Iterator[str]:
    chosen = dict.fromkeys(names[at] for at in (0, len(names) // 2, -1) if names)
    if chosen:
        # Names are another user's text for this terminal.
        shown = ", ".join(name.encode("unicode_escape").decode("ascii") for name in chosen)
        yield f"          {shown}{', …' if len(names) > len(chosen) else ''}"


def _objects(entries: tuple[ListedObject, ...]) -> str:
    return f"{len(entries):,} objects, {byte_size(sum(entry.bytes for entry in entries))}"


def _json(plan: removal.RemovalPlan) -> dict[str, object]:
    log, links = plan.log, (*plan.links, *plan.folder.links)
    return {
        "run": plan.place.run,
        "folder": None if plan.place.folder is None else str(plan.place.folder),
        "topics": 0 if log is None else len(log.topics),
        "groups": 0 if log is None else len(log.groups),
        "log_bytes": 0 if log is None else log.bytes,
        "objects": len(plan.objects.delete),
        "bytes": sum(entry.bytes for entry in plan.objects.delete),
        "files": len(plan.folder.delete),
        "kept": len(plan.objects.kept),
        "foreign": len(plan.objects.foreign),
        "unknown": [str(path) for path in plan.folder.foreign],
        "stay_behind_links": [str(link.target) for link in links if not link.followed],
    }
