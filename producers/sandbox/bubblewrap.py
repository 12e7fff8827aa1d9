"""The back end `bubblewrap`: namespaces by the program `bwrap`, without daemon or privileges.
`bubblewrap_command` is the whole confinement; `process.py` sets bounds.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rollstream.producers.sandbox.base import (
    ENVIRONMENT,
    NOT_STARTED,
    SEARCH_PATH,
    WORK_FOLDER,
    SandboxLimits,
    SandboxOptions,
    SandboxRefused,
    SandboxResult,
    checked_path,
)
from rollstream.producers.sandbox.control_groups import find_control_groups
from rollstream.producers.sandbox.process import (
    OWN_PROCESSES,
    SETUP_S,
    ConfinedProcess,
    Confinement,
)
from rollstream.producers.sandbox.session import SandboxSession, agent_command
from rollstream.producers.sandbox.system_calls import has_call_filter

PROGRAM = "bwrap"
NOBODY = 65534
SHARED_MEMORY_BYTES = 16 << 20  # of /dev/shm
OPEN_FILES_MAX = 256
_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs")
_LINKED = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PASSWD = b"nobody:x:65534:65534:nobody:/work:/bin/sh\n"
_OWN_USERS = 0x6000_0000  # 64 users for each process number, below 0x7000_0000
_OWN_USERS_SMALL = 40_000  # where a container maps 65,536 users only


@dataclass(frozen=True, slots=True)
class Mounts:
    """What a sandbox sees of the host, read-only: `folders` and `links` (place → target)."""

    folders: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


@cache
def host_mounts(readable: tuple[str, ...]) -> Mounts:
    """Returns programs, libraries and the configured folders. Raises `SandboxRefused` for one that
    is missing or holds the work folder.
    """
    folders, links = ["/usr"], list[tuple[str, str]]()
    for name in _LINKED:
        path = Path("/", name)
        if path.is_symlink():
            links.append((str(path), os.readlink(path)))
        elif path.is_dir():
            folders.append(str(path))
    folders += [f"/etc/{name}" for name in _ETC if Path("/etc", name).exists()]
    for folder in readable:
        if not Path(folder).is_absolute() or not Path(folder).exists() or folder == "/":
            raise SandboxRefused(
                f"task.sandbox.readable: {folder!r} is not a folder of this machine; give absolute "
                "paths of what programs may read"
            )
        folders.append(folder)
    return Mounts(tuple(folders), tuple(links))


def bubblewrap_command(
    program: str,
    mounts: Mounts,
    limits: SandboxLimits,
    descriptors: Mapping[str, int],
    files: Mapping[str, int],
    command: Sequence[str],
) -> list[str]:
    """`descriptors` are those of `status`, `block`, `passwd` and, with a filter, `seccomp`; `files`
    those of the work folder's files, by path.
    """
    words = [
        *(program, "--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent"),
        *("--new-session", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"),
        *("--hostname", "sandbox", "--clearenv"),
    ]
    for name, value in ENVIRONMENT.items():
        words += ["--setenv", name, value]
    for folder in mounts.folders:
        words += ["--ro-bind", folder, folder]
    for place, target in mounts.links:
        words += ["--symlink", target, place]
    words += [
        *("--ro-bind-data", str(descriptors["passwd"]), "/etc/passwd"),
        *("--proc", "/proc", "--dev", "/dev"),
        # /dev is a tmpfs without a bound of its own: read-only, but for /dev/shm.
        *("--size", str(SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
        *("--size", str(limits.disk_bytes), "--tmpfs", WORK_FOLDER),
        *("--dir", f"{WORK_FOLDER}/.tmp", "--symlink", f"{WORK_FOLDER}/.tmp", "/tmp"),
    ]
    for path, descriptor in files.items():
        words += ["--file", str(descriptor), f"{WORK_FOLDER}/{path}"]
    words += ["--remount-ro", "/", "--chdir", WORK_FOLDER]
    if "seccomp" in descriptors:
        words += ["--seccomp", str(descriptors["seccomp"])]
    words += ["--json-status-fd", str(descriptors["status"])]
    return [*words, "--block-fd", str(descriptors["block"]), "--", *command]


def limited_command(
    command: Sequence[str], limits: SandboxLimits, has_groups: bool
) -> tuple[str, ...]:
    """Returns the command behind a shell that first sets the limits of each process."""
    # From outside the host could set them only with CAP_SYS_RESOURCE, which containers lack.
    blocks = limits.disk_bytes // 512
    lines = ["ulimit -c 0", f"ulimit -n {OPEN_FILES_MAX}", f"ulimit -f {blocks}"]
    if not has_groups:
        # No control group bounds memory and processes.
        processes = limits.processes + OWN_PROCESSES
        lines += [
            f"ulimit -v {limits.memory_bytes // 1024}",
            # the letter of this limit is p in dash and u in bash
            f"{{ ulimit -p {processes} || ulimit -u {processes}; }} 2>/dev/null",
        ]
    script = f'{" && ".join(lines)} || exit {NOT_STARTED}; exec "$@"'
    return ("/bin/sh", "-c", script, "sandbox", *command)


class Bubblewrap:
    """Makes sandboxes with `bwrap`, at the path `program`; without `has_groups` no control groups
    are used.
    """

    def __init__(
        self, options: SandboxOptions, program: str | None = None, has_groups: bool = True
    ) -> None:
        program_path = program or shutil.which(PROGRAM)
        if not sys.platform.startswith("linux") or program_path is None:
            raise SandboxRefused(
                'task.sandbox.backend = "bubblewrap": there is no program `bwrap` on this machine; '
                "install it (Debian: apt-get install bubblewrap; Fedora: dnf install bubblewrap), "
                'or set task.sandbox.backend = "docker"'
            )
        self._program = program_path
        self._mounts = host_mounts(options.readable)
        self._groups = find_control_groups() if has_groups else None

    def open(self, limits: SandboxLimits) -> SandboxSession:
        process = self._start(agent_command(self._interpreter), limits, {}, as_first=True)
        return SandboxSession(process, limits)

    def run_once(
        self,
        command: Sequence[str],
        stdin: bytes,
        files: Mapping[str, bytes],
        limits: SandboxLimits,
    ) -> SandboxResult:
        checked = {checked_path(path): data for path, data in files.items()}
        words = [self._interpreter if command[0] == "python3" else command[0], *command[1:]]
        with self._start(words, limits, checked) as process:
            return process.communicate(stdin)

    def report(self) -> Mapping[str, str]:
        result = self.run_once(["/bin/true"], b"", {}, SandboxLimits(time_s=SETUP_S))
        if not result.ok:
            raise SandboxRefused(f"bubblewrap runs no program here: {result.errors.strip()}")
        groups = self._groups and f"control group v{self._groups.version}"
        is_own = own_user(0) is not None
        filtered = "filtered" if has_call_filter() else "not filtered on this architecture"
        return {
            "backend": f"bubblewrap ({self._program})",
            "network": "none (namespace)",
            "user": "a user of its own (root starts it)" if is_own else "this process's user",
            "memory": groups or "each process's address space (RLIMIT_AS), not their sum",
            "processes": groups or "processes of its user namespace (RLIMIT_NPROC)",
            "disk": "size of a tmpfs; counted as memory" if groups else "size of a tmpfs",
            "system calls": filtered,
            "python": self._interpreter,
        }

    def _start(
        self,
        command: Sequence[str],
        limits: SandboxLimits,
        files: Mapping[str, bytes],
        as_first: bool = False,
    ) -> ConfinedProcess:
        def words(descriptors: Mapping[str, int], opened: Mapping[str, int]) -> list[str]:
            command_line = bubblewrap_command(
                self._program, self._mounts, limits, descriptors, opened, command
            )
            return [command_line[0], "--as-pid-1", *command_line[1:]] if as_first else command_line

        command = limited_command(command, limits, self._groups is not None)
        plan = Confinement(words, limits, {"passwd": _PASSWD}, files, self._groups, own_user)
        return ConfinedProcess(plan)

    @property
    def _interpreter(self) -> str:
        return _interpreter(self._mounts)


@cache
def _interpreter(mounts: Mounts) -> str:
    python = shutil.which("python3", path=SEARCH_PATH)
    if python is not None:
        return python
    # This process's own Python serves, if its folder is among the readable ones.
    this_python = Path(sysconfig.get_config_var("BINDIR") or "/") / "python3"
    if (
        any(this_python.is_relative_to(folder) for folder in mounts.folders)
        and this_python.exists()
    ):
        return str(this_python)
    raise SandboxRefused(
        f"no python3 in {SEARCH_PATH}, which a sandbox can read: install one there (Debian: "
        f"apt-get install python3-minimal), or add {Path(sys.base_prefix)} to task.sandbox.readable"
    )


def own_user(number: int, uid_map: str | None = None) -> int | None:
    """Returns a host's user that owns nothing; None where this process may not choose its user."""
    if os.geteuid() != 0:
        return None
    # Even a program that left all namespaces would be no user with rights.
    lines = (Path("/proc/self/uid_map").read_text() if uid_map is None else uid_map).splitlines()
    ranges = [tuple(map(int, line.split())) for line in lines]
    for base, users in ((_OWN_USERS, 1 << 28), (_OWN_USERS_SMALL, 1 << 14)):
        if any(first <= base and base + users <= first + count for first, _, count in ranges):
            return base + (os.getpid() * 64 + number % 64) % users
    return None
