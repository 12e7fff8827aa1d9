"""The folder that a replay makes: laid out as a run, with `replay.json`, which says what was asked
for. Asked for the same again, a replay that was stopped goes on in it.
"""

import fcntl
import json
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollstream.analysis.locate import REPLAY_FILE
from rollstream.config.settings import Configuration
from rollstream.errors import ConfigurationError, LeaseHeld

REPLAY_LOCK = "replay.lock"
IGNORED_FILES = {REPLAY_LOCK}
"""What may lie in a folder before anything was asked for there."""


def check_outside_run(path: Path, run: Path) -> None:
    """The folder must be none of the run's."""
    if path.absolute().is_relative_to(run):
        raise ConfigurationError(f"--out {path.absolute()} lies in the run's own folder")


def read_replay_request(path: Path) -> dict[str, Any] | None:
    """What a replay noted there, None for a new or empty folder; any other is refused."""
    if not path.exists() or (path.is_dir() and not {p.name for p in path.iterdir()} - IGNORED_FILES):
        return None
    try:
        return json.loads((path / REPLAY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ConfigurationError(
            f"{path} is not empty and holds no replay; give a new folder with --out"
        ) from None


def refuse_other_request(path: Path, before: Mapping[str, Any], wish: Mapping[str, Any]) -> None:
    """`ConfigurationError` with each difference between what was asked for there and now."""
    found = [
        f"  {key}: {json.dumps(before.get(key))} there, {json.dumps(value)} asked for"
        for key, value in wish.items()
        if before.get(key) != value
    ]
    if found:
        lines = "\n".join(found)
        raise ConfigurationError(
            f"{path} holds another replay:\n{lines}\nask for the same to go on with it, or give a "
            "new folder with --out"
        )


@contextmanager
def lock_replay_folder(path: Path) -> Generator[None]:
    """Make the folder and keep others out of it; `LeaseHeld` if another replay works there."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path / REPLAY_LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ConfigurationError(
            f"the folder {path} cannot be made ({error.strerror}); give another with --out"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise LeaseHeld(f"another replay works in {path}; wait for it, or give --out DIR") from None
    try:
        yield
    finally:
        os.close(descriptor)


def write_replay_request(path: Path, *parts: Mapping[str, Any]) -> None:
    """Say in the folder what it is; it is there whole or not at all."""
    line: dict[str, Any] = {}
    for part in parts:
        line |= part
    partial = path / f"{REPLAY_FILE}.partial"
    partial.write_text(json.dumps(line, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path / REPLAY_FILE)


def replay_configuration(c: Configuration, path: Path, model: Path) -> Configuration:
    """The settings that the folder is written with: everything inside it."""
    changed: dict[str, Any] = {
        "folder": str(path), "bus": "sqlite:bus", "store": "file:store", "truncate": False,
        "model": c.model.model_copy(update={"path": str(model)}),
        "archive": c.archive.model_copy(update={"enabled": False}),
    }  # fmt: skip
    return c.model_copy(update=changed)
