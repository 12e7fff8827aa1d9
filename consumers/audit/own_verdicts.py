"""Keeps verdicts in the user's private folder: an audit writes nothing into the run, and another
user's verdict would decide what stays unchecked. Without the folder each audit starts at the first
record.
"""

from contextlib import suppress
from hashlib import sha256

from rollstream.private_state import read_private, state_folder, write_private

_FOLDER = "audits"
VERDICTS_MAX = 64  # the oldest ones go
BYTES_MAX = 1 << 30  # 30 bytes a trajectory


def read_own(run: str, place: str) -> bytes | None:
    """Returns the last verdict of the run at this place (of its store); None without one."""
    return read_private(_name(run, place), BYTES_MAX)


def keep_own(run: str, place: str, data: bytes) -> bool:
    """Replace the verdict of the run at this place. Returns whether that was possible."""
    if len(data) > BYTES_MAX or not write_private(_name(run, place), data):
        return False
    with suppress(OSError):  # another audit removes the same ones
        files = [(path.stat().st_mtime, path) for path in (state_folder() / _FOLDER).iterdir()]
        for _, path in sorted(files, reverse=True)[VERDICTS_MAX:]:
            path.unlink(missing_ok=True)
    return True


def _name(run: str, place: str) -> str:
    return f"{_FOLDER}/{sha256(f'{run} {place}'.encode(errors='replace')).hexdigest()[:32]}"
