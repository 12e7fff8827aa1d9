"""Writes a file that readers see whole or not at all: into a folder that may come from another user
(`whole_file`: no file or link that is there is written through), or to a path that the user typed
(`output_file`: links are followed, pipes and devices are written to).
"""

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYSTEM_FOLDERS = (Path("/dev"), Path("/proc"))
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors of a write, which names no file


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Yield the path of a new, empty file beside `path`, for the block to write. It takes the name
    `path` when the block ends, and replaces what has it, also a link; after an error it is removed.
    An `OSError` about the new file names `path` instead.

    The name is drawn and created exclusively: a link under a name that can be guessed would be
    followed, and the file to which it leads overwritten.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
    try:
        partial.open("xb").close()
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and (
            error.filename == str(partial) or (error.filename is None and error.errno in _NO_ROOM)
        ):
            raise _about(path, error) from None
        raise


@contextmanager
def output_file(path: Path, is_typed: bool = True) -> Generator[Path]:
    """As `whole_file`, for a path that the user typed: the target of a link is replaced and not the
    link, and a pipe or device gets the content once the block ends. A path that the user did not
    type (`is_typed` False), e.g. a default name in a run's folder, is treated as by `whole_file`.
    """
    if is_typed and _is_written_through(path):
        with tempfile.TemporaryDirectory(prefix="rollstream-output-") as folder:
            partial = Path(folder) / (path.name or "output")
            partial.touch()
            yield partial
            _copy(partial, path)
    else:
        with whole_file(Path(os.path.realpath(path)) if is_typed else path) as partial:
            yield partial


def check_output(path: Path) -> None:
    """Raise the `OSError` with which `output_file` would fail because of the folder of a path that
    the user typed. Commands call it before the work whose result is written there.
    """
    if _is_written_through(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        return
    folder = Path(os.path.realpath(path)).parent
    if not folder.is_dir():
        number = errno.ENOTDIR if folder.exists() else errno.ENOENT
    elif os.access(folder, os.W_OK | os.X_OK):
        return
    else:
        number = errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES
    raise OSError(number, os.strerror(number), str(path))


def _is_written_through(path: Path) -> bool:
    """Returns whether the path leads to something other than a regular file or a free name."""
    absolute = Path(os.path.abspath(path))
    with suppress(FileNotFoundError):  # `/dev/stdout` may be a file, whose name the shell opened
        mode = path.stat().st_mode
        return not stat.S_ISREG(mode) or any(map(absolute.is_relative_to, _SYSTEM_FOLDERS))
    return False


def _copy(source: Path, path: Path) -> None:
    try:
        with source.open("rb") as content, path.open("wb") as output:
            shutil.copyfileobj(content, output)
    except OSError as error:
        raise _about(path, error) from None


def _about(path: Path, error: OSError) -> OSError:
    """Returns the error with `path` as the file that it names; a write has named none."""
    return OSError(error.errno, error.strerror, str(path))
