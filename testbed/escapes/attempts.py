"""The attempts to leave a sandbox (`ATTEMPTS`): programs, and the proof that one had its effect.

`succeeds` runs one against a back end and a new host. A proof reads the host's own targets, or
finds the host's token, or a mark behind a bound, in what the program printed.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollstream.producers.sandbox.base import (
    SandboxBackend,
    SandboxFailed,
    SandboxFileError,
    SandboxLimits,
    SandboxResult,
)
from testbed.escapes import programs
from testbed.escapes.host import Host

LIMITS = SandboxLimits(
    time_s=30.0,
    output_bytes=1 << 20,
    memory_bytes=96 << 20,
    processes=16,
    disk_bytes=16 << 20,
)
"""Small bounds, so that passing one harms no machine; the programs aim at three times as much."""
Proof = Callable[[Host, SandboxResult], bool]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One way out of a sandbox. With `reads` the host then reads these paths of the work folder by
    the verb, and writes to a link.
    """

    name: str
    program: str
    proof: Proof
    reads: tuple[str, ...] = ()

    def succeeds(self, backend: SandboxBackend, limits: SandboxLimits = LIMITS) -> bool:
        """Returns whether the attempt has its effect."""
        files = {"main.py": (programs.BEGIN + self.program).encode()}
        command = ["python3", "main.py"]
        with Host() as host:
            if not self.reads:
                result = backend.run_once(command, host.targets(), files, limits)
                return self.proof(host, result)
            return self._succeeds_by_verbs(host, backend, limits)

    def _succeeds_by_verbs(
        self, host: Host, backend: SandboxBackend, limits: SandboxLimits
    ) -> bool:
        found = b""
        with backend.open(limits) as sandbox:
            sandbox.write("main.py", (programs.BEGIN + self.program).encode())
            result = sandbox.exec(["python3", "main.py"], host.targets())
            for path in self.reads:
                with suppress(SandboxFileError, OSError):
                    found += sandbox.read(path)
            for path in ("new", f"folder/{host.mark}"):
                with suppress(SandboxFileError, OSError):
                    sandbox.write(path, host.mark.encode())
            return self.proof(host, _with_output(result, found))


def _with_output(result: SandboxResult, found: bytes) -> SandboxResult:
    out = result.stdout + found
    return SandboxResult(result.ended, result.code, out, result.stderr, result.seconds)


def _token(host: Host, result: SandboxResult) -> bool:
    return host.token.encode() in result.stdout + result.stderr


def _mark(host: Host, result: SandboxResult) -> bool:
    return host.mark.encode() in result.stdout


def _shadow(host: Host, result: SandboxResult) -> bool:
    try:
        lines = Path("/etc/shadow").read_bytes().splitlines()
    except OSError:  # of a host whose tests are not root
        return b"root:" in result.stdout
    return any(line and line in result.stdout for line in lines)


def _called(host: Host, result: SandboxResult) -> bool:
    return host.was_called()


def _written(host: Host, result: SandboxResult) -> bool:
    return host.was_written()


def _harmed(host: Host, result: SandboxResult) -> bool:
    return host.is_victim_harmed()


def _typed(host: Host, result: SandboxResult) -> bool:
    return host.was_typed()


def _flooded(host: Host, result: SandboxResult) -> bool:
    return len(result.stdout) + len(result.stderr) > LIMITS.output_bytes


def _outlived(host: Host, result: SandboxResult) -> bool:
    return bool(host.survivors())


def _linked(host: Host, result: SandboxResult) -> bool:
    return _token(host, result) or host.was_written()


ATTEMPTS = (
    Attempt("file_read", programs.READ_FILE, _token),
    Attempt("file_shadow", programs.READ_SHADOW, _shadow),
    Attempt("file_write", programs.WRITE_FILES, _written),
    Attempt("links", programs.LINKS, _linked, programs.LINK_NAMES),
    Attempt("proc_root", programs.PROC_ROOT, _token),
    Attempt("proc_environ", programs.PROC_ENVIRONMENT, _token),
    Attempt("environment", programs.ENVIRONMENT, _token),
    Attempt("descriptors", programs.DESCRIPTORS, _token),
    Attempt("network_tcp", programs.TCP, _called),
    Attempt("network_udp", programs.UDP, _called),
    Attempt("network_abstract", programs.ABSTRACT, _called),
    Attempt("network_vsock", programs.VSOCK, _mark),
    Attempt("process_kill", programs.KILL, _harmed),
    Attempt("process_trace", programs.TRACE, _harmed),
    Attempt("shared_memory", programs.SHARED_MEMORY, _token),
    Attempt("keys", programs.KEYS, _token),
    Attempt("memory", programs.MEMORY, _mark),
    Attempt("forks", programs.FORKS, _mark),
    Attempt("disk", programs.DISK, _mark),
    Attempt("become_root", programs.BECOME_ROOT, _written),
    Attempt("devices", programs.DEVICES, _mark),
    Attempt("mounts", programs.MOUNTS, _mark),
    Attempt("chroot", programs.CHROOT, _token),
    Attempt("executables", programs.EXECUTABLES, _mark),
    Attempt("kernel_files", programs.KERNEL_FILES, _mark),
    Attempt("terminal", programs.TERMINAL, _typed),
    Attempt("output_flood", programs.FLOOD, _flooded),
    Attempt("outlive", programs.OUTLIVE, _outlived),
)


def escaped(backend: SandboxBackend, limits: SandboxLimits = LIMITS) -> list[str]:
    """Returns the names of the attempts that have their effect. A sandbox that fails has held."""
    found: list[str] = []
    for attempt in ATTEMPTS:
        with suppress(SandboxFailed):
            if attempt.succeeds(backend, limits):
                found.append(attempt.name)
    return found
