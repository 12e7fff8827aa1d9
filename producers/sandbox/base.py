"""The contract of a sandbox, which has no network, and sees of the host only programs and libraries
(read-only). Where a machine cannot provide one, `SandboxRefused` is raised: no program runs
unconfined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from types import TracebackType
from typing import Literal, Protocol, Self

from rollstream.errors import RollstreamError, SandboxRefused as SandboxRefused

WORK_FOLDER = "/work"
"""The only folder, besides /dev/shm, that programs may write to."""
SEARCH_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH_MAX = 1024  # most characters of a path that the host names
NOT_STARTED = 127
"""Exit code of a program that cannot be started, as a shell's."""
KILLED = 128 + 9
"""Exit code of a program that was killed, as a shell's."""
Ending = Literal["exit", "time", "output", "memory"]
"""By itself or by a signal, or at one of these bounds."""
ENVIRONMENT: Mapping[str, str] = {
    "PATH": SEARCH_PATH,
    "HOME": WORK_FOLDER,
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONUNBUFFERED": "1",
}
"""All environment variables of a sandbox; none is inherited from the host."""


class SandboxFailed(RollstreamError, OSError):
    """A sandbox that had started ended or did not answer; a new one may work."""


class SandboxFileError(RollstreamError, OSError):
    """A file is missing, a link, no regular file, too large, or outside of the work folder."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """`time_s` and `output_bytes` (stdout and stderr together) bound each `exec`, the others the
    sandbox (threads count). docs/how-to/run-code-in-a-sandbox.md states each mechanism.
    """

    time_s: float = 5.0
    output_bytes: int = 1 << 20
    memory_bytes: int = 512 << 20
    processes: int = 32
    disk_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """`code` is 128 + n after signal n, 127 if the program could not be started."""

    ended: Ending
    code: int
    stdout: bytes
    stderr: bytes
    seconds: float

    @property
    def ok(self) -> bool:
        return self.ended == "exit" and self.code == 0

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")

    @property
    def errors(self) -> str:
        return self.stderr.decode(errors="replace")


class Sandbox(Protocol):
    """Lives until `close`. Raises `SandboxFailed` when the sandbox itself ends; then it must be
    closed.
    """

    def exec(self, command: Sequence[str], stdin: bytes = b"") -> SandboxResult:
        """Runs a command in the work folder. No process that it started outlives this call."""
        ...

    def read(self, path: str) -> bytes:
        """Returns a regular file of the work folder, at most `output_bytes`. Raises
        `SandboxFileError`, also for links.
        """
        ...

    def write(self, path: str, data: bytes) -> None:
        """Writes a regular file of the work folder, and its folders. Raises `SandboxFileError`,
        also for links.
        """
        ...

    def close(self) -> None:
        """Ends all processes of the sandbox and removes its files. May be called twice."""
        ...

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class SandboxOptions:
    """Holds the Docker `image`, and `readable`, the folders of the host that programs may read."""

    image: str = ""
    readable: tuple[str, ...] = ()


class ClosedAfterBlock:
    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def run_in(
    sandbox: Sandbox, command: Sequence[str], stdin: bytes, files: Mapping[str, bytes]
) -> SandboxResult:
    with sandbox:
        for path, data in files.items():
            sandbox.write(path, data)
        return sandbox.exec(command, stdin)


class SandboxBackend(Protocol):
    """A plug-in is a callable `(options) -> SandboxBackend`, which a setting names as
    `module:attribute`.
    """

    def open(self, limits: SandboxLimits) -> Sandbox:
        """Returns a new, empty sandbox. Raises `SandboxRefused` if this machine cannot make one."""
        ...

    def run_once(
        self,
        command: Sequence[str],
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: SandboxLimits,
    ) -> SandboxResult:
        """Runs one command in a new sandbox that holds `files`, and removes the sandbox."""
        ...

    def report(self) -> Mapping[str, str]:
        """Returns the mechanism of each bound on this machine, by the bound's name. Raises
        `SandboxRefused`.
        """
        ...


BackendBuilder = Callable[[SandboxOptions], SandboxBackend]


def checked_path(path: str) -> str:
    """Returns the path without the work folder itself. Raises `SandboxFileError` for a path that
    leads out of it, or is too long.
    """
    pure = PurePosixPath(path)
    if pure.is_absolute():
        if not pure.is_relative_to(WORK_FOLDER):
            raise SandboxFileError(f"{path!r} is not in {WORK_FOLDER}")
        pure = pure.relative_to(WORK_FOLDER)
    parts = pure.parts
    if not parts or ".." in parts or "\0" in path or len(path) > PATH_MAX:
        raise SandboxFileError(f"{path[:80]!r} is not the path of a file in {WORK_FOLDER}")
    return str(pure)
