"""`rollstream backup RUN|URL DEST`: copies a run as of one moment, with all that a resume needs
(docs/how-to/backup-and-recover.md). It is only read and may be running; the same command completes
an interrupted backup.
"""

import argparse
import json
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from rollstream.errors import ConfigurationError
from rollstream.keep.backup import LOG, STORE, Backup, back_up, open_backup
from rollstream.keep.removal import RunPlace, find_run_place
from rollstream.look.index.parentage import recorded_configuration
from rollstream.look.query.locate import RunLocation, locate_run
from rollstream.look.query.looking import open_run_store, open_stored_log
from rollstream.printable import shell_command
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.config.config import url_identity
from rollstream.run.signals import progress_line


def add_arguments(command: CommandParser) -> None:
    command.add_examples(
        "runs/quickstart-0 backups/quickstart-0",
        "quickstart-1 backups/quickstart-1 --json",
    )
    command.add_named_run("run", "RUN", "a run's folder, its name in runs/, or a store's URL")
    to = "a new folder or object store (URL), or that of an interrupted backup of this run"
    command.add_argument("destination", metavar="DEST", help=to)
    command.add_argument("--bus", metavar="URL", help="with a store's URL: the run's log")
    command.add_json()


def main(arguments: argparse.Namespace) -> int:
    """Prints size and recovery point, the step from which a restored run continues. Raises
    `ConfigurationError` if the log or the store cannot be found.
    """
    place = find_run_place(arguments.run, arguments.bus)
    with ExitStack() as opened:
        if place.bus is None or place.store is None:
            raise ConfigurationError(
                f"{arguments.run}: a backup needs log and store; name the run's folder, or its "
                "store's URL with --bus URL"
            )
        location = _location(place, place.bus, place.store)
        folder = _settings_folder(place, place.bus, place.store, opened)
        files = None if place.folder is None else location.files
        bus = opened.enter_context(closing(open_stored_log(location)))
        store = open_run_store(location)
        target = open_backup(arguments.destination)
        try:
            backup = back_up(bus, store, target, folder, show_part, files=files)
        finally:
            progress_line("")
    if arguments.json:
        print(json.dumps(_json(backup)))
    else:
        _print_backup(backup, arguments.destination)
    return 0


def _location(place: RunPlace, bus: str, store: str) -> RunLocation:
    if place.folder is not None:
        return locate_run(str(place.folder))
    # URLs of a run that is named by its store are the user's word.
    return RunLocation(store, store, bus, run=place.run, named=(store, bus))


def show_part(part: str) -> None:
    progress_line(part[:100])


def _settings_folder(place: RunPlace, bus: str, store: str, opened: ExitStack) -> Path:
    if place.folder is not None:
        return place.folder
    # A run named by its store's URL has no folder: the settings recorded there take its place.
    folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    values = recorded_configuration(store)
    for key, url in (("bus", bus), ("store", store)):
        # The store records URLs without hosts, so the given URL, which has them, replaces the
        # recorded one. A recorded path inside the run's folder differs from it and is kept.
        if url_identity(url) == url_identity(values[key]):
            values[key] = url
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def recovery_lines(backup: Backup) -> tuple[str, ...]:
    """A restored run loads the newest checkpoint and repeats the steps up to `backup.step` from the
    ledger, or starts again without one.
    """
    if not backup.checkpoint:
        return (f"  recovery point: step {backup.step}; without a checkpoint it starts again",)
    return (
        f"  recovery point: step {backup.step}; training resumes from checkpoint "
        f"{backup.checkpoint} and the ledger",
    )


def _print_backup(backup: Backup, destination: str) -> None:
    print(f"backup of {backup.run} ({backup.id})")
    counts = {
        "log": f"{sum(sum(topic.ends) - sum(topic.begins) for topic in backup.topics):,} records",
        "store": f"{sum(entry.key.startswith(STORE) for entry in backup.objects):,} objects",
    }
    for name, prefix in (("log", LOG), ("store", STORE)):
        size = sum(copied.bytes for copied in backup.objects if copied.key.startswith(prefix))
        print(f"  {name:<7} {counts[name]}, {size:,} bytes")
    print("\n".join(recovery_lines(backup)))
    print(f"restore it with: {shell_command('restore', destination, 'DIR')}")


def _json(backup: Backup) -> dict[str, object]:
    return {
        "run": backup.run,
        "id": backup.id,
        "step": backup.step,
        "checkpoint": backup.checkpoint,
        "objects": len(backup.objects),
        "bytes": sum(copied.bytes for copied in backup.objects),
        "ends": {copied.topic.name: copied.ends for copied in backup.topics},
    }
