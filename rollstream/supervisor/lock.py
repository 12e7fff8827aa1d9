"""One supervisor per run's folder, and proof that the processes of its predecessor are gone.

The lock is an advisory lock on an open file that every role inherits, so it is free only when the
supervisor *and* all its roles have ended. Its new holder therefore knows that the former holders of
the leases are dead, and may use their nonces (`nonces.json`) instead of waiting for the leases to
expire.
"""

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from rollstream.errors import LeaseHeld

LOCK_WAIT_S = 5.0  # roles of a killed supervisor die at once, their own children a moment later


class RunLock:
    """Held from construction until `close`, or until the last process that inherited it ends."""

    def __init__(self, folder: Path, wait_s: float = LOCK_WAIT_S) -> None:
        self._nonces = folder / "nonces.json"
        self.descriptor = os.open(folder / "run.lock", os.O_RDWR | os.O_CREAT, 0o666)
        deadline = time.monotonic() + wait_s
        while not self._taken():
            if time.monotonic() > deadline:
                holder = os.pread(self.descriptor, 32, 0).decode(errors="replace").strip()
                os.close(self.descriptor)
                raise LeaseHeld(
                    f"the run in {folder} is running already (supervisor: process {holder}); "
                    "stop it first, or choose another folder with --run DIR"
                )
            time.sleep(0.05)
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{os.getpid()}\n".encode(), 0)

    def nonces(self) -> dict[str, str]:
        """By role, the nonce of the last process that the former supervisor started."""
        try:
            found = json.loads(self._nonces.read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):  # torn by a kill: wait for the lease instead
            return {}
        return cast(dict[str, str], found) if isinstance(found, dict) else {}

    def keep_nonces(self, nonces: Mapping[str, str]) -> None:
        """Write these nonces for the next supervisor."""
        partial = self._nonces.with_suffix(".partial")
        partial.write_text(json.dumps(dict(nonces)), encoding="utf-8")
        os.replace(partial, self._nonces)

    def close(self) -> None:
        os.close(self.descriptor)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
