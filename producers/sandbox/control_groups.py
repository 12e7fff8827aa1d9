"""Bounds memory and processes by a control group, version 1 or 2, where this process is root."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_REMOVAL_S = 60.0
_PAUSE_S = 0.002


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Where groups are made: folders of `memory` and of `pids` (version 1), or one for both
    (version 2).
    """

    version: int
    memory: Path
    pids: Path

    def make(self, memory_bytes: int, processes: int) -> "ControlGroup":
        # Drawn: a killed process leaves its groups, and its pid may be given again.
        name = f"rollstream-sandbox-{os.getpid()}-{os.urandom(4).hex()}"
        group = ControlGroup(self.version, self.memory / name, self.pids / name)
        try:
            group.create(memory_bytes, processes)
        except OSError:
            group.remove()
            raise
        return group


@dataclass(frozen=True, slots=True)
class ControlGroup:
    version: int
    memory: Path
    pids: Path

    def create(self, memory_bytes: int, processes: int) -> None:
        for folder in {self.memory, self.pids}:
            folder.mkdir()
        (self.pids / "pids.max").write_text(str(processes))
        if self.version == 2:
            (self.memory / "memory.max").write_text(str(memory_bytes))
            swap = {"memory.swap.max": "0"}
        else:
            (self.memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
            swap = {"memory.memsw.limit_in_bytes": str(memory_bytes)}
        for name, limit in swap.items():
            if (self.memory / name).exists():  # absent in a kernel without accounting of swap
                (self.memory / name).write_text(limit)

    def add(self, pid: int) -> None:
        """Moves a process into the group; its later children are born there."""
        for folder in {self.memory, self.pids}:
            (folder / "cgroup.procs").write_text(str(pid))

    def kills(self) -> int:
        """Returns the number of processes that were killed because the group's memory was used
        up.
        """
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        for line in (self.memory / name).read_text().splitlines():
            key, _, count = line.partition(" ")
            if key == "oom_kill":
                return int(count)
        return 0

    def remove(self) -> None:
        end_s = time.monotonic() + _REMOVAL_S
        for folder in {self.memory, self.pids}:
            while folder.exists() and time.monotonic() < end_s:
                with suppress(OSError):  # a killed process has not left yet
                    folder.rmdir()
                    break
                time.sleep(_PAUSE_S)


def find_control_groups(
    mounts: str | None = None, groups: str | None = None, is_root: bool | None = None
) -> ControlGroups | None:
    """Returns None if this process is not root, or the controllers are missing or read-only. The
    arguments are the texts of /proc/self/mountinfo and /proc/self/cgroup.
    """
    if not (os.geteuid() == 0 if is_root is None else is_root):
        return None
    try:
        mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
        groups = Path("/proc/self/cgroup").read_text() if groups is None else groups
    except OSError:
        return None
    control_groups = _version_1(mounts, groups) or _version_2(mounts, groups)
    if control_groups is None or not all(
        os.access(folder, os.W_OK) for folder in (control_groups.memory, control_groups.pids)
    ):
        return None
    return control_groups


def _version_1(mounts: str, groups: str) -> ControlGroups | None:
    paths = {
        controller: path
        for line in groups.splitlines()
        for _, controllers, path in [line.split(":", 2)]
        for controller in controllers.split(",")
    }
    # Below this process's own groups, so an outer limit (of a container, of a batch system) holds
    # too.
    folders: dict[str, Path] = {}
    for kind, root, point, options in _mounts(mounts):
        for controller in {"memory", "pids"} & set(options) if kind == "cgroup" else ():
            folder = _below(point, root, paths.get(controller, "/"))
            if (folder / "cgroup.procs").exists():
                folders[controller] = folder
    return ControlGroups(1, **folders) if folders.keys() == {"memory", "pids"} else None


def _version_2(mounts: str, groups: str) -> ControlGroups | None:
    group_path = next((line[3:] for line in groups.splitlines() if line.startswith("0::")), "/")
    for kind, root, point, _ in _mounts(mounts):
        if kind != "cgroup2":
            continue
        folder = _below(point, root, group_path)
        # A group with processes cannot have limited children, so the nearest group above is taken
        # whose children have both controllers.
        for above in (folder, *folder.parents):
            with suppress(OSError):
                controllers = (above / "cgroup.subtree_control").read_text().split()
                if {"memory", "pids"} <= set(controllers):
                    return ControlGroups(2, above, above)
            if above == point:
                break
    return None


def _below(point: Path, root: str, group_path: str) -> Path:
    # The mount shows the groups below `root`. Within a namespace of control groups both are
    # relative to it.
    inner = group_path.removeprefix(root.rstrip("/")) if group_path.startswith(root) else "/"
    folder = point / inner.strip("/")
    return folder if folder.is_dir() else point


def _mounts(text: str) -> list[tuple[str, str, Path, list[str]]]:
    """Returns kind, root, mount point and options of each mount."""
    mounts: list[tuple[str, str, Path, list[str]]] = []
    for line in text.splitlines():
        before, dash, after = line.partition(" - ")
        fields, rest = before.split(), after.split()
        if dash and len(fields) >= 5 and len(rest) >= 3:
            mounts.append((rest[0], fields[3], Path(fields[4]), rest[2].split(",")))
    return mounts
