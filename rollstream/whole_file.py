"""Writes a file that readers see whole or not at all."""

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
# Errors of a write, which names no file.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """A new, empty file beside `path`, for the block to write; at its end it replaces what has the
    name `path`, also a link (in a folder of another user nothing is written through), and after an
    error it is removed. An `OSError` about it names `path`.
    """
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    # Drawn and created exclusively: a link under a name that can be guessed would be followed, and
    # the file to which it leads overwritten.
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
    """Returns the output file as `whole_file`, for a path that the user typed: a link's target is
    replaced, and a pipe or device gets the content once the block ends. Without `is_typed`, e.g.
    for a default name in a run's folder, as `whole_file`.
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
    """Raises the `OSError` that `output_file` would raise because of the folder, before the work
    whose result is written there.
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
    absolute = Path(os.path.abspath(path))
    # `/dev/stdout` may be a file, whose name the shell opened.
    with suppress(FileNotFoundError):
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
    # A write has named no file.
    return OSError(error.errno, error.strerror, str(path))
