"""Links inside a run's store or folder. A user may keep large objects behind a link, but a run of
another user may link to anything: a removal goes through a link only where keys are so specific
that no other files have them (`RunKeys.linked`), and never into another run.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollstream.contained_folder import ContainedFolder
from rollstream.foreign_json import parse_json
from rollstream.keep.own import declarations
from rollstream.run.config.run_files import FOLDERS
from rollstream.storage.identity import IDENTITY_KEY
from rollstream.storage.stores.base import ListedObject, ObjectStore, is_key
from rollstream.storage.stores.file import FileStore


@dataclass(frozen=True, slots=True)
class FolderLink:
    """`prefix` is the common start of the keys behind it. If `followed`, a removal deletes the
    run's objects there; otherwise the link alone.
    """

    path: Path
    target: Path
    prefix: str
    followed: bool


def store_links(store: ObjectStore | None, run_id: str) -> tuple[FolderLink, ...]:
    """Returns the links in the place of a folder of the run's objects; none for a store without a
    folder.
    """
    if not isinstance(store, FileStore):
        return ()
    root = store.path(IDENTITY_KEY).parent
    passed = {_real(root)}
    return tuple(
        link
        for name in sorted(_roots())
        if (root / name).is_dir()
        for link in _links(root / name, f"{name}/", run_id, passed)
    )


def _links(folder: Path, prefix: str, run_id: str, passed: set[Path]) -> Iterator[FolderLink]:
    if folder.is_symlink():
        target = _real(folder)
        # A target is passed once, so loops end.
        is_open = _is_passable(prefix) and target not in passed
        link = FolderLink(folder, target, prefix, is_open and not _is_of_another(target, run_id))
        yield link
        if not link.followed:
            return
        passed.add(target)
    with suppress(OSError), os.scandir(folder) as entries:
        for name in sorted(
            entry.name for entry in entries if entry.is_dir() and is_key(entry.name)
        ):
            yield from _links(folder / name, f"{prefix}{name}/", run_id, passed)


def _roots() -> dict[str, bool]:
    """Returns top folders that have declared keys, each with whether it may be a link."""
    roots: dict[str, bool] = {}
    for keys in declarations():
        root, slash, _ = keys.pattern.pattern.partition("/")
        if slash:
            roots[root] = roots.get(root, False) or keys.linked
    return roots


def _is_passable(prefix: str) -> bool:
    root, _, rest = prefix.partition("/")
    # Keys in the archive have the run's name.
    return _roots()[root] and (not rest or root == "archive")


def _is_of_another(target: Path, run_id: str) -> bool:
    for folder in (target, *target.parents):
        with suppress(OSError, ValueError):
            content = ContainedFolder(folder).read(IDENTITY_KEY)
            return parse_json(content, dict[str, Any]).get("id") != run_id
    return False


def listed_objects(store: ObjectStore, links: Iterable[FolderLink]) -> list[ListedObject]:
    """Returns the listed objects in the order of keys, those behind followed links included, behind
    others not.
    """
    every = {entry.key: entry for entry in store.list()}
    closed: list[str] = []
    for link in links:
        if link.followed:
            every |= {entry.key: entry for entry in store.list(link.prefix)}
        else:
            closed.append(link.prefix)
    return [entry for key, entry in sorted(every.items()) if not key.startswith(tuple(closed))]


def folder_links(folder: Path) -> tuple[FolderLink, ...]:
    """Returns the folder links in the place of a folder of the run's files."""
    paths = {name: folder / name for name in FOLDERS}
    return tuple(
        # Never followed: names like `logs/trainer.log` are not specific enough.
        FolderLink(path, _real(path), f"{name}/", False)
        for name, path in paths.items()
        if path.is_symlink() and not path.parent.is_symlink()
    )


def _real(path: Path) -> Path:
    # A path in a loop of links stays as it is.
    return Path(os.path.realpath(path))


def remove_link(link: FolderLink) -> None:
    """Removes the link, with the empty folders behind it, if it was followed."""
    if link.followed:
        remove_empty_folders(link.target)
    link.path.unlink(missing_ok=True)


def remove_empty_folders(folder: Path) -> None:
    """Folders that hold no file; no link is followed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):  # it holds a file
            os.rmdir(path)
