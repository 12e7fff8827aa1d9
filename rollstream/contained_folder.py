"""Opens the files of a folder that may come from another user (`ContainedFolder`): regular files
inside that folder, or inside folders that the user named, and nothing else.

A run that another user sent may hold links out of its folder, and pipes or devices in place of
files. A link that is followed reads, and where a program writes it changes, the user's own files.
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

from rollstream.errors import OutsideRun
from rollstream.printable import shell_command

TEXT_BYTES_MAX = 256 << 20
"""Most bytes of a file that is read into memory at once: settings, metrics, tokenizers."""


def check_regular(*paths: str | Path, links: bool = True) -> None:
    """Raise `OutsideRun` for the first of these paths at which something else is than a regular
    file or, with `links`, a link to one. Opening a pipe waits for its other end. Missing files are
    permitted.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            if not stat.S_ISREG(os.stat(path, follow_symlinks=links).st_mode):
                kinds = "pipe, device or socket" if links else "link, pipe, device or socket"
                raise OutsideRun(f"{path} is no regular file (a {kinds}): not opened")


class ContainedFolder:
    """Reads the folder `root`. A link inside it is followed if it leads to a place inside `root` or
    inside a folder that `also` returns, those that the user named; another link, and a file that is
    not regular (a pipe, a device), raises `OutsideRun`, which names it. Nothing is written.

    The check and the opening are two calls. A user who may write to the folder at that moment can
    exchange a folder for a link in between; the opened file is then read, never written.
    """

    def __init__(self, root: Path, also: Callable[[], Iterable[Path]] = tuple) -> None:
        self.root = Path(os.path.realpath(root))
        self._also = also

    @cached_property
    def also(self) -> tuple[Path, ...]:
        """The other folders, which are asked for when the first link leaves `root`."""
        return tuple(Path(os.path.realpath(folder)) for folder in self._also())

    def contains(self, real: Path) -> bool:
        """Returns whether a path without links is inside `root` or a folder that the user named."""
        return real.is_relative_to(self.root) or any(map(real.is_relative_to, self.also))

    def path(self, *parts: str | Path) -> Path:
        """Returns the path of a file or folder without links; it need not exist. Parts that are
        absolute paths replace those before them, as in `pathlib`.
        """
        named = self.root.joinpath(*parts)
        real = Path(os.path.realpath(named))
        if not self.contains(real):
            folder = real if real.is_dir() else real.parent
            raise OutsideRun(
                f"{named} leads to {real}, outside of {self.root}, and is not followed; if that "
                "place belongs to the run, name it once: "
                + shell_command("trust", self.root, "--folder", folder)
            )
        return real

    def file(self, *parts: str | Path) -> Path:
        """Returns the path of a regular file, without links. Raises `OutsideRun` if something else
        is there, and `FileNotFoundError` or another `OSError` if nothing can be found there.
        """
        real = self.path(*parts)
        if not stat.S_ISREG(os.stat(real, follow_symlinks=False).st_mode):
            if real.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(real))
            raise OutsideRun(f"{real} is no regular file (a pipe, device or socket): not opened")
        return real

    def has_file(self, *parts: str | Path) -> bool:
        """Returns whether a regular file is there. Raises `OutsideRun` for a link that leaves."""
        try:
            return bool(self.file(*parts))
        except OSError:
            return False

    def open(self, *parts: str | Path) -> BinaryIO:
        """Opens the file for reading. Raises as `file` does; never waits for a pipe."""
        path = self.file(*parts)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags), "rb")
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):  # exchanged since it was checked
            file.close()
            raise OutsideRun(f"{path} is no regular file: not opened")
        return file

    def read(self, *parts: str | Path, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
        """Returns the content of a file. Raises as `file` does, and `OutsideRun` for a file of more
        than `bytes_max`, which may be sparse and need no room on its disk.
        """
        with self.open(*parts) as file:
            size = os.fstat(file.fileno()).st_size
            if size > bytes_max:
                raise OutsideRun(
                    f"{self.root.joinpath(*parts)} has {size:,} bytes; at most {bytes_max:,} are "
                    "read"
                )
            return file.read(size)  # a larger number takes memory at once, whatever the file has

    def walk(self, *parts: str | Path, skip: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
        """Yields each regular file below a folder: its path from `root` on, as if links were
        folders, and its bytes. Folders whose name `skip` returns True for are left out, and so is a
        link to a folder that contains it.
        """
        yield from self._walk(self.root.joinpath(*parts), (), skip)

    def _walk(
        self, folder: Path, above: tuple[Path, ...], skip: Callable[[str], bool]
    ) -> Iterator[tuple[str, int]]:
        real = self.path(folder)
        if real in above:
            return
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(real) as entries:
            for entry in entries:
                at = folder / entry.name
                try:
                    status = os.stat(self.path(at), follow_symlinks=False)
                except FileNotFoundError:  # deleted meanwhile
                    continue
                if stat.S_ISDIR(status.st_mode):
                    if not skip(entry.name):
                        yield from self._walk(at, (*above, real), skip)
                elif stat.S_ISREG(status.st_mode):
                    yield at.relative_to(self.root).as_posix(), status.st_size
