"""Sets a confined program's bounds before its first instruction: bwrap writes its process number to
`status` and waits for a byte on `block`; meanwhile the process is put into a control group.
"""

import itertools
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any, cast

from rollstream.deadline import Deadline
from rollstream.foreign_json import parse_json
from rollstream.producers.sandbox.base import (
    KILLED,
    NOT_STARTED,
    ClosedAfterBlock,
    Ending,
    SandboxFailed,
    SandboxLimits,
    SandboxRefused,
    SandboxResult,
)
from rollstream.producers.sandbox.control_groups import ControlGroup, ControlGroups
from rollstream.producers.sandbox.inside import pump
from rollstream.producers.sandbox.system_calls import call_filter, has_call_filter

SETUP_S = 60.0  # until the namespaces are set up, on a busy machine
END_S = 60.0  # until a killed sandbox is gone, on a busy machine
STATUS_MAX = 1 << 16  # most bytes of the status that bwrap writes
FILES_MAX = 64  # files that are handed to a sandbox at its start
OWN_PROCESSES = 1  # process 1 of the namespace
_REMEDY = (
    "Inside a container it must be allowed to make user namespaces and to mount /proc (Docker: "
    "--security-opt seccomp=unconfined --security-opt apparmor=unconfined --security-opt "
    "systempaths=unconfined); on a host see the sysctls user.max_user_namespaces and "
    "kernel.apparmor_restrict_unprivileged_userns. Or let a container be the sandbox: "
    'task.sandbox.backend = "docker". Nothing is run unconfined.'
)
_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Confinement:
    """`words` makes the command line from the descriptors of `status`, `block`, `seccomp` and
    `data`, and those of the `files` by path; `user` gives the host's user by the sandbox's number.
    """

    words: Callable[[Mapping[str, int], Mapping[str, int]], list[str]]
    limits: SandboxLimits
    data: Mapping[str, bytes]
    files: Mapping[str, bytes]
    groups: ControlGroups | None
    user: Callable[[int], int | None]


class ConfinedProcess(ClosedAfterBlock):
    """The first program has pipes for stdin, stdout and stderr. Raises `SandboxRefused` if the
    machine forbids it.
    """

    def __init__(self, plan: Confinement) -> None:
        self._limits = plan.limits
        self._group: ControlGroup | None = None
        self._first: int | None = None  # process 1 of the namespace, as a pidfd
        self._status, status = os.pipe()
        block, go = os.pipe()
        try:
            self._process = _spawn(plan, status, block)
        except BaseException:
            os.close(self._status)
            os.close(go)
            raise
        finally:
            os.close(status)
            os.close(block)
        try:
            self._set_bounds(plan, Deadline(SETUP_S))
            os.write(go, b"1")
        except BaseException:
            self.close()
            raise
        finally:
            os.close(go)

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        return (
            cast(IO[bytes], process.stdin),
            cast(IO[bytes], process.stdout),
            cast(IO[bytes], process.stderr),
        )

    def communicate(self, stdin: bytes) -> SandboxResult:
        begun_s = time.monotonic()
        into, out, errors = self.pipes
        source = os.dup(into.fileno())  # pump closes it once all was written
        into.close()
        sinks = {out.fileno(): bytearray(), errors.fileno(): bytearray()}
        room, end_s = self._limits.output_bytes, begun_s + self._limits.time_s
        ended = pump([], sinks, source, stdin, end_s, room)
        if ended == "exit":  # its pipes may end before it does
            left_s = max(0.0, end_s - time.monotonic())
            ended = "exit" if self._has_ended(left_s) else "time"
        seconds = time.monotonic() - begun_s
        self.kill()
        stdout, stderr = (bytes(sink) for sink in sinks.values())
        code = self._exit_code()
        if ended == "exit" and code not in (0, None) and self.memory_kills():
            ended = "memory"
        started = code is not None or ended != "exit"
        if code is None:
            code = KILLED if started else NOT_STARTED
        return SandboxResult(cast(Ending, ended), code, stdout, stderr, seconds)

    def memory_kills(self) -> int:
        return self._group.kills() if self._group is not None else 0

    def kill(self) -> None:
        # The kernel ends a PID namespace with its process 1, which counts as ended when all others
        # have.
        if self._first is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._first, signal.SIGKILL)
        else:
            self._process.kill()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_S)
        if self._first is not None:  # bubblewrap's own process may end before it
            ending = select.poll()
            ending.register(self._first, select.POLLIN)
            ending.poll(END_S * 1000)

    def close(self) -> None:
        self.kill()
        for pipe in self.pipes:
            pipe.close()
        for descriptor in (self._first, self._status):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._first, self._status = None, -1
        if self._group is not None:
            self._group.remove()
            self._group = None

    def _set_bounds(self, plan: Confinement, deadline: Deadline) -> None:
        pid = self._read_pid(deadline)
        self._first = os.pidfd_open(pid)
        if plan.groups is not None:
            limits = plan.limits
            self._group = plan.groups.make(limits.memory_bytes, limits.processes + OWN_PROCESSES)
            self._group.add(pid)

    def _read_pid(self, deadline: Deadline) -> int:
        status = b""
        while b"," not in status:
            if not select.select([self._status], [], [], deadline.remaining_s())[0]:
                raise SandboxFailed(f"bubblewrap was not ready after {SETUP_S:g} s")
            piece = os.read(self._status, 4096)
            if not piece:
                raise self._refused()
            status += piece
        return int(json.loads(status.partition(b",")[0] + b"}")["child-pid"])

    def _refused(self) -> SandboxRefused:
        _, _, errors = self.pipes
        self._process.wait(END_S)
        reason = errors.read(2000).decode(errors="replace").strip() or "it gave no reason"
        return SandboxRefused(f"bubblewrap cannot make a sandbox here: {reason}. {_REMEDY}")

    def _has_ended(self, within_s: float) -> bool:
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _exit_code(self) -> int | None:
        status = b""
        while len(status) < STATUS_MAX and (piece := os.read(self._status, 4096)):
            status += piece
        for line in reversed(status.splitlines()):
            with suppress(ValueError):
                code = parse_json(line, dict[str, Any]).get("exit-code")
                # None: not started, or killed from here.
                return None if code is None else int(code)
        return None


def _spawn(plan: Confinement, status: int, block: int) -> subprocess.Popen[bytes]:
    assert len(plan.files) <= FILES_MAX, f"at most {FILES_MAX} files"
    opened: list[int] = []

    def file_of(data: bytes) -> int:
        opened.append(os.memfd_create("rollstream", os.MFD_CLOEXEC))
        with os.fdopen(os.dup(opened[-1]), "wb") as file:
            file.write(data)
        os.lseek(opened[-1], 0, os.SEEK_SET)
        return opened[-1]

    try:
        descriptors = {name: file_of(data) for name, data in plan.data.items()}
        if has_call_filter():
            descriptors["seccomp"] = file_of(call_filter(plan.groups is not None))
        files = {path: file_of(data) for path, data in plan.files.items()}
        user = plan.user(next(_NUMBERS))
        # The program inherits no descriptor, variable, terminal or privilege but those that it
        # needs.
        return subprocess.Popen(
            plan.words({**descriptors, "status": status, "block": block}, files),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env={},  # that of process 1 can be read in its namespace
            cwd="/",
            pass_fds=(status, block, *opened),
            start_new_session=True,
            user=user,
            group=user,
            extra_groups=None if user is None else [],
        )
    except PermissionError as error:
        raise SandboxRefused(f"bubblewrap cannot be started: {error}. {_REMEDY}") from error
    finally:
        for descriptor in opened:
            os.close(descriptor)
