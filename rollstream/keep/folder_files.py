"""Sorts the files of a run's folder into the run's and the user's, and deletes the run's.
Everything behind a link stays.
"""

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from rollstream.keep.links import FolderLink, folder_links, remove_empty_folders, remove_link
from rollstream.run.config.run_files import (
    CONFIGURATION_FILE,
    FOLDERS,
    LOCKS,
    REMOVAL_FILE,
    declared_files,
)

LAST = (CONFIGURATION_FILE, REMOVAL_FILE, *LOCKS)


@dataclass(frozen=True, slots=True)
class FolderFiles:
    """`foreign` files stay. It is false if there is nothing to delete."""

    delete: tuple[Path, ...] = ()
    links: tuple[FolderLink, ...] = ()
    foreign: tuple[Path, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.delete or self.links)


def folder_files(
    folder: Path | None, is_kept: bool, names: Collection[str], beside: Collection[Path]
) -> FolderFiles:
    """With `is_kept` the files stay that readers of a kept part of the store need. `names` are
    files in the run's manifests; `beside` are the folders of log and store, whose content the
    caller sorts.
    """
    if folder is None or not folder.is_dir():
        return FolderFiles()
    links = folder_links(folder)
    closed = {*beside, *(link.path for link in links)}
    delete: list[Path] = []
    foreign: list[Path] = []
    for path in _files(folder, closed):
        declared = declared_files(path.relative_to(folder).as_posix(), names)
        if declared is None:
            foreign.append(path)
        elif path.parent == folder and path.name in LOCKS:
            continue  # held by the caller; they go with the folder
        elif not (is_kept and declared.kept):
            delete.append(path)
    return FolderFiles(tuple(delete), links, tuple(foreign))


def _files(folder: Path, closed: Collection[Path]) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        inner = [Path(path, name) for name in sorted(folders)]
        yield from (entry for entry in inner if entry.is_symlink() and entry not in closed)
        folders[:] = [entry.name for entry in inner if entry not in closed]
        yield from (Path(path, name) for name in sorted(files))


def delete_files(folder: Path, files: FolderFiles) -> None:
    """Deletes the files except `LAST`, with the links and the folders that are empty then."""
    for path in files.delete:
        if path.parent != folder or path.name not in LAST:
            path.unlink(missing_ok=True)
    for link in files.links:
        remove_link(link)
    for name in FOLDERS:
        remove_empty_folders(folder / name)
