"""The back end `docker`, for machines that refuse user namespaces and programs that need an image
with `python3`. The daemon's users are root on that machine.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO, cast

from rollstream.producers.sandbox.base import (
    ENVIRONMENT,
    WORK_FOLDER,
    SandboxFailed,
    SandboxLimits,
    SandboxOptions,
    SandboxRefused,
    SandboxResult,
    run_in,
)
from rollstream.producers.sandbox.session import SandboxSession, agent_command
from rollstream.producers.sandbox.system_calls import call_filters

PROGRAM = "docker"
NOBODY = 65534
CALL_S = 30.0  # of one call of the command, on a busy machine
SHARED_MEMORY_BYTES = 16 << 20
_OPEN_FILES_MAX = 256
_OWN_PROCESSES = 1  # process 1, which serves the verbs
_NUMBERS = itertools.count()
_SETTING = 'task.sandbox.backend = "docker"'


def docker_command(
    program: str, name: str, options: SandboxOptions, limits: SandboxLimits
) -> list[str]:
    owner = f"uid={NOBODY},gid={NOBODY}"
    words = [
        *(program, "run", "--rm", "--interactive", "--name", name, "--pull", "never"),
        *("--label", "rollstream.sandbox=1", "--network", "none", "--read-only"),
        *("--user", f"{NOBODY}:{NOBODY}", "--cap-drop", "ALL", "--hostname", "sandbox"),
        *("--security-opt", "no-new-privileges", "--ipc", "private", "--cgroupns", "private"),
        *("--pids-limit", str(limits.processes + _OWN_PROCESSES)),
        *("--memory", str(limits.memory_bytes), "--memory-swap", str(limits.memory_bytes)),
        *("--ulimit", "core=0", "--ulimit", f"nofile={_OPEN_FILES_MAX}"),
        *("--ulimit", f"fsize={limits.disk_bytes}", "--shm-size", str(SHARED_MEMORY_BYTES)),
        *("--tmpfs", f"{WORK_FOLDER}:rw,exec,nosuid,nodev,size={limits.disk_bytes},{owner}"),
        *("--tmpfs", f"/tmp:rw,nosuid,nodev,size={SHARED_MEMORY_BYTES},{owner}"),
        *("--workdir", WORK_FOLDER, "--entrypoint", "python3"),
    ]
    for variable, value in ENVIRONMENT.items():
        words += ["--env", f"{variable}={value}"]
    for folder in options.readable:
        words += ["--volume", f"{folder}:{folder}:ro"]
    filters = json.dumps(call_filters())  # Docker's own filter lets some of these calls pass
    return [*words, options.image, *agent_command("python3")[1:], filters]


class DockerBackend:
    def __init__(self, options: SandboxOptions, program: str | None = None) -> None:
        program_path = program or shutil.which(PROGRAM)
        if program_path is None:
            raise SandboxRefused(f"{_SETTING}: there is no program `docker` on this machine")
        if not options.image:
            raise SandboxRefused(
                f"{_SETTING}: set task.sandbox.image to an image with python3, such as "
                '"python:3.12-slim"'
            )
        self._program, self._options = program_path, options
        self._check()

    def open(self, limits: SandboxLimits) -> SandboxSession:
        name = f"rollstream-sandbox-{os.getpid()}-{next(_NUMBERS)}-{os.urandom(4).hex()}"
        command = docker_command(self._program, name, self._options, limits)
        return SandboxSession(DockerProcess(self._program, name, command), limits)

    def run_once(
        self,
        command: Sequence[str],
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: SandboxLimits,
    ) -> SandboxResult:
        return run_in(self.open(limits), command, stdin, files)

    def report(self) -> Mapping[str, str]:
        result = self.run_once(["python3", "--version"], b"", {}, SandboxLimits())
        if not result.ok:
            raise SandboxRefused(f"{_SETTING} runs no program here: {result.errors.strip()}")
        group = "control group of the container"
        return {
            "backend": f"docker ({self._program}), image {self._options.image}",
            "network": "none (--network none)",
            "user": f"{NOBODY} of the daemon's user namespace",
            "memory": group,
            "processes": group,
            "disk": "size of a tmpfs; counted as memory",
            "system calls": "filtered, by Docker's filter too",
            "python": result.text.strip(),
        }

    def _check(self) -> None:
        image = self._options.image
        answer = _call([self._program, "image", "inspect", "--format", "{{.Id}}", image])
        if answer.returncode:
            reason = answer.stderr.decode(errors="replace").strip()[:500]
            raise SandboxRefused(
                f"{_SETTING}: {reason}. A daemon must run and hold the image: docker pull {image}"
            )


class DockerProcess:
    """The client of one container, whose pipes are those of the container's first process."""

    def __init__(self, program: str, name: str, command: Sequence[str]) -> None:
        self._program, self._name = program, name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C in the terminal must not reach it
        )

    @property
    def pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self._process
        return (
            cast(IO[bytes], process.stdin),
            cast(IO[bytes], process.stdout),
            cast(IO[bytes], process.stderr),
        )

    def memory_kills(self) -> int:
        """Returns 0: the daemon names no killed process of a living container."""
        return 0

    def close(self) -> None:
        _call([self._program, "rm", "--force", self._name])
        self._process.kill()
        self._process.wait()
        for pipe in self.pipes:
            pipe.close()


def _call(command: Sequence[str]) -> "subprocess.CompletedProcess[bytes]":
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CALL_S
        )
    except subprocess.TimeoutExpired as error:
        raise SandboxFailed(f"{' '.join(command[:2])} took longer than {CALL_S:g} s") from error
