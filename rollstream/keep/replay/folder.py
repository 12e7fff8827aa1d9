"""The folder of a replay, laid out as a run's, with the request in `replay.json`: only the same
request resumes it.
"""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from rollstream.contained_folder import ContainedFolder
from rollstream.errors import ConfigurationError, LeaseHeld
from rollstream.foreign_json import parse_json
from rollstream.keep.replay.recorded_steps import RecordedSteps, read_recorded
from rollstream.look.query.locate import REPLAY_FILE
from rollstream.os_failures import explain_os_error
from rollstream.run.config.run_folder import RunFolder, open_run_log_for_writing
from rollstream.run.config.settings import Configuration
from rollstream.streams.topics import catalogue
from rollstream.whole_file import whole_file

REPLAY_LOCK = "replay.lock"
IGNORED_FILES = {REPLAY_LOCK}
"""Files in a folder before its first request is recorded."""


def read_replay_request(path: Path) -> dict[str, Any] | None:
    """Returns the recorded request; None for a new or empty folder. Raises `ConfigurationError` for
    any other folder.
    """
    if not path.exists() or (
        path.is_dir() and not {p.name for p in path.iterdir()} - IGNORED_FILES
    ):
        return None
    try:
        return parse_json(ContainedFolder(path).read(REPLAY_FILE), dict[str, Any])
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{path} is not empty and holds no replay; give a new folder with --out"
        ) from None


def refuse_other_request(path: Path, before: Mapping[str, Any], request: Mapping[str, Any]) -> None:
    """Raise `ConfigurationError`, which names the differences, if the recorded request `before` is
    another one.
    """
    differences = [
        f"  {key}: {json.dumps(before.get(key))} there, {json.dumps(value)} asked for"
        for key, value in request.items()
        if before.get(key) != value
    ]
    if differences:
        lines = "\n".join(differences)
        raise ConfigurationError(
            f"{path} holds another replay:\n{lines}\nrepeat its request to resume it, or give a "
            "new folder with --out"
        )


@contextmanager
def lock_replay_folder(path: Path) -> Generator[None]:
    """Create the folder and hold its lock during the block. Raises `LeaseHeld` if another replay
    runs there, `ConfigurationError` if the folder cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / REPLAY_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {path} cannot be made: {explain_os_error(error)} (--out names another)"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LeaseHeld(f"another replay runs in {path}; wait for it, or give --out DIR") from None
    try:
        yield
    finally:
        os.close(descriptor)


def write_replay_request(path: Path, *parts: Mapping[str, Any]) -> None:
    """Record the request in `replay.json`, atomically."""
    line: dict[str, Any] = {}
    for part in parts:
        line |= part
    with whole_file(path / REPLAY_FILE) as partial:
        partial.write_text(json.dumps(line, indent=2) + "\n", encoding="utf-8")


def replay_configuration(c: Configuration, path: Path, model: Path) -> Configuration:
    """Returns the settings `c` for a replay in the folder `path`: log and store inside it, `model`
    as starting model, nothing truncated or archived.
    """
    changed: dict[str, Any] = {
        "folder": str(path), "bus": "sqlite:bus", "store": "file:store", "truncate": False,
        "model": c.model.model_copy(update={"path": str(model)}),
        "archive": c.archive.model_copy(update={"enabled": False}),
    }  # fmt: skip
    return c.model_copy(update=changed)


def read_own_ledger(folder: RunFolder, c: Configuration) -> RecordedSteps:
    """Returns the steps in the ledger of the replay's own folder."""
    with closing(open_run_log_for_writing(c, folder.path)) as bus:
        bus.create(catalogue())
        return read_recorded(bus)
