"""The user's private folder on this machine: facts about runs that a run, perhaps another user's,
cannot state about itself. Reading creates nothing. Writing creates the folder with mode 0700 and
files with mode 0600, whole or not at all. A folder that cannot be used never fails a command.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

# Names the folder itself; it wins over `XDG_STATE_HOME`.
STATE_VARIABLE = "ROLLSTREAM_STATE"
FILE_BYTES_MAX = 1 << 20


def state_folder() -> Path:
    """`ROLLSTREAM_STATE`, else `rollstream` in `XDG_STATE_HOME`, else `~/.local/state/rollstream`;
    it need not exist.
    """
    configured = Path(os.environ.get(STATE_VARIABLE, ""))
    # A relative value counts as unset, as the XDG specification requires: the working directory may
    # be a run of another user.
    if configured.is_absolute():
        return configured
    shared = Path(os.environ.get("XDG_STATE_HOME", ""))
    if shared.is_absolute():
        return shared / "rollstream"
    home = Path(os.path.expanduser("~"))
    return (home if home.is_absolute() else Path("/nonexistent")) / ".local/state/rollstream"


def read_private(name: str, bytes_max: int = FILE_BYTES_MAX) -> bytes | None:
    """Returns None if the file is missing, larger than `bytes_max`, or not a regular file of this
    user that others cannot write.
    """
    try:
        descriptor = os.open(state_folder() / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        is_own = status.st_uid == os.geteuid() and not status.st_mode & 0o022
        if not (stat.S_ISREG(status.st_mode) and is_own and status.st_size <= bytes_max):
            return None
        with suppress(OSError):
            return file.read(bytes_max)
    return None


def write_private(name: str, content: bytes) -> bool:
    """Returns whether the file could be replaced."""
    path = state_folder() / name
    try:
        state_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=".partial-")
    except OSError:
        return False
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        return False
    return True
