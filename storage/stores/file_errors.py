"""Errors of the operating system about a folder, as the errors of `rollstream/errors.py`."""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rollstream.errors import ObjectMissing, StoreError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REFUSED = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_OBJECT = {errno.ENOENT, errno.EISDIR, errno.ENOTDIR}
_IN_THE_WAY = {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY}


@contextmanager
def translate_os_errors(action: str, path: Path) -> Generator[None]:
    """Raise an `OSError` of the block as a `StoreError` with advice."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        if action == "read" and error.errno in _NO_OBJECT:
            raise ObjectMissing(f"no object {path}") from error
        raise StoreError(f"cannot {action} {path}: {error.strerror}; {_advice(error)}") from error


def _advice(error: OSError) -> str:
    if error.errno in _FULL:
        return "the disk, quota or file size limit is reached: free space and start again"
    if error.errno in _REFUSED:
        return "the folder is read-only or belongs to another user: choose a writable one"
    if error.errno in _IN_THE_WAY:
        return "a file or folder is in the way: a key cannot be the folder of another key"
    return "nothing acknowledged was lost"
