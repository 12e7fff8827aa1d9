"""Opens regular files of a folder that may come from another user, or of folders that the user
named: a followed link out of it would read, or change, the user's own files.
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

# Most bytes of a file that is read into memory at once: settings, metrics, tokenizers.
TEXT_BYTES_MAX = 256 << 20


def check_regular(*paths: str | Path, links: bool = True) -> None:
    """Raises `OutsideRun` for the first path to something other than a regular file or, with
    `links`, a link to one. Missing files pass.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            # Opening a pipe would wait for its other end.
            if not stat.S_ISREG(os.stat(path, follow_symlinks=links).st_mode):
                kinds = "pipe, device or socket" if links else "link, pipe, device or socket"
                raise OutsideRun(f"{path} is no regular file (a {kinds}): not opened")


class ContainedFolder:
    """Reads the folder `root`. A link is followed to a place inside `root` or a folder that `also`
    returns, those that the user named; another link, or a file that is not regular, raises
    `OutsideRun`.

    A user who may write to the folder can exchange a folder for a link between check and opening;
    that file is then read, never written.
    """

    def __init__(self, root: Path, also: Callable[[], Iterable[Path]] = tuple) -> None:
        self.root = Path(os.path.realpath(root))
        self._also = also

    @cached_property
    def also(self) -> tuple[Path, ...]:
        """Evaluated when the first link leaves `root`."""
        return tuple(Path(os.path.realpath(folder)) for folder in self._also())

    def contains(self, real: Path) -> bool:
        """A path without links is inside `root` or a folder that the user named."""
        return real.is_relative_to(self.root) or any(map(real.is_relative_to, self.also))

    def path(self, *parts: str | Path) -> Path:
        """Returns the path without links; it need not exist. An absolute part replaces those before
        it, as in `pathlib`.
        """
        joined = self.root.joinpath(*parts)
        real = Path(os.path.realpath(joined))
        if not self.contains(real):
            folder = real if real.is_dir() else real.parent
            raise OutsideRun(
                f"{joined} leads to {real}, outside of {self.root}, and is not followed; if that "
                "place belongs to the run, name it once: "
                + shell_command("trust", self.root, "--folder", folder)
            )
        return real

    def file(self, *parts: str | Path) -> Path:
        """Raises `OutsideRun` for another kind than a regular file, and an `OSError` if nothing is
        there.
        """
        real = self.path(*parts)
        if not stat.S_ISREG(os.stat(real, follow_symlinks=False).st_mode):
            if real.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(real))
            raise OutsideRun(f"{real} is no regular file (a pipe, device or socket): not opened")
        return real

    def has_file(self, *parts: str | Path) -> bool:
        """Raises `OutsideRun` for a link that leaves."""
        try:
            return bool(self.file(*parts))
        except OSError:
            return False

    def open(self, *parts: str | Path) -> BinaryIO:
        """Raises as `file`; never waits for a pipe."""
        path = self.file(*parts)
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        file = os.fdopen(os.open(path, flags), "rb")
        # The file may have been exchanged since the check.
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise OutsideRun(f"{path} is no regular file: not opened")
        return file

    def read(self, *parts: str | Path, bytes_max: int = TEXT_BYTES_MAX) -> bytes:
        """Raises as `file`, and `OutsideRun` for more than `bytes_max`."""
        with self.open(*parts) as file:
            size = os.fstat(file.fileno()).st_size
            # A sparse file needs no room on its disk.
            if size > bytes_max:
                raise OutsideRun(
                    f"{self.root.joinpath(*parts)} has {size:,} bytes; at most {bytes_max:,} are "
                    "read"
                )
            # A larger number takes memory at once, whatever the file has.
            return file.read(size)

    def walk(self, *parts: str | Path, skip: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
        """Each regular file below a folder: its path from `root` on, as if links were folders, and
        its bytes. Folders whose name `skip` accepts are left out, and links to a folder that
        contains them.
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
                # It was deleted meanwhile.
                except FileNotFoundError:
                    continue
                if stat.S_ISDIR(status.st_mode):
                    if not skip(entry.name):
                        yield from self._walk(at, (*above, real), skip)
                elif stat.S_ISREG(status.st_mode):
                    yield at.relative_to(self.root).as_posix(), status.st_size
