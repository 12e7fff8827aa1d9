"""Runs programs without any sandbox: the control of the attempts, by which their proofs can fail.

Never a back end: it is not registered and the product does not import it.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollstream.producers.sandbox.base import (
    ClosedAfterBlock,
    SandboxLimits,
    SandboxOptions,
    SandboxResult,
    run_in,
)


class Unconfined:
    """Has the interface of a back end."""

    def open(self, limits: SandboxLimits) -> "UnconfinedFolder":
        return UnconfinedFolder(limits)

    def run_once(
        self,
        command: Sequence[str],
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: SandboxLimits,
    ) -> SandboxResult:
        return run_in(self.open(limits), command, stdin, files)

    def report(self) -> Mapping[str, str]:
        return {"backend": "none"}


def plug_in(options: SandboxOptions) -> Unconfined:
    """Builds it, as a plug-in of a user is built."""
    return Unconfined()


class UnconfinedFolder(ClosedAfterBlock):
    """A folder of the host, whose links are followed."""

    def __init__(self, limits: SandboxLimits) -> None:
        self._held = tempfile.TemporaryDirectory(prefix="escape-work-")
        self._folder, self._limits = Path(self._held.name), limits

    def exec(self, command: Sequence[str], stdin: bytes = b"") -> SandboxResult:
        words = [sys.executable if command[0] == "python3" else command[0], *command[1:]]
        out, errors = self._folder / ".out", self._folder / ".err"
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            done = subprocess.run(
                words,
                input=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=self._folder,
                close_fds=False,
                start_new_session=True,  # no attempt may type into the developer's terminal
                timeout=600,
            )
        result = out.read_bytes(), errors.read_bytes()
        return SandboxResult("exit", done.returncode, *result, 0.0)

    def read(self, path: str) -> bytes:
        one = os.open(self._folder / path, os.O_RDONLY | os.O_NONBLOCK)
        with open(one, "rb") as file:
            return file.read(1 << 20)

    def write(self, path: str, data: bytes) -> None:
        (self._folder / path).write_bytes(data)

    def close(self) -> None:
        self._held.cleanup()
