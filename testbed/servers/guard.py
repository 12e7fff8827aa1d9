"""Ends with a test process all that it started, whatever ends it: an error, Ctrl-C or `kill -9`.

`guard` marks the environment of this process, which every process inherits that is started from
here on, and starts a watcher: a process that waits until this one has ended, then kills each that
has the mark, with its children, and removes the temporary files of all of them. The watcher has no
mark and a session of its own, so that no signal meant for the tests reaches it.
"""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from testbed.repository import ROOT
from testbed.waiting import let_pass

VARIABLE = "TESTS_STARTED_BY"
"""Names the guarded processes among the ancestors of a process, the nearest one last."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PAUSE_S = 0.02
_END_S = 60.0
_LEFT_S = 5.0  # for what ends by itself
_MEMORY = Path("/dev/shm")
_kept: set[int] = set()
_watchers: dict[int, subprocess.Popen[bytes]] = {}
"""The watcher of this process, by its id: a fork has none."""


def guard() -> None:
    """Starts the watcher of this process, once. Temporary files are in a folder that is removed
    with it from here on (`TMPDIR`).
    """
    if os.getpid() in _watchers:
        return
    mark, of = uuid.uuid4().hex[:12], os.environ.get(VARIABLE, "").split("/")[1:]
    folder = _beside(Path(tempfile.gettempdir())) / _folder_name(mark)
    folder.mkdir(mode=0o711)  # tests start processes of other users, too
    words = ["-m", __name__, str(os.getpid()), mark, str(folder), str(_MEMORY / folder.name)]
    _watchers[os.getpid()] = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not any(m in value for m in of)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.environ[VARIABLE] = f"{os.environ.get(VARIABLE, '')}/{mark}"
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
    if sys.platform == "linux":  # a fork has the environment of before
        library = ctypes.CDLL(None)
        end = (_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        os.register_at_fork(after_in_child=lambda: library.prctl(*end))


def mark_variable() -> dict[str, str]:
    """Returns the variable for an environment that is not a copy of this process's."""
    return {name: value for name, value in os.environ.items() if name == VARIABLE}


def memory_folder() -> str | None:
    """Returns a folder in memory that is removed with the guarded process that this one is, or is a
    descendant of; None where there is no memory for files.
    """
    if not _MEMORY.is_dir():
        return None
    nearest = os.environ.get(VARIABLE, "").rpartition("/")[2]
    folder = _MEMORY / _folder_name(nearest) if nearest else _MEMORY
    folder.mkdir(mode=0o700, exist_ok=True)
    return str(folder)


def started(mark: str, but: Collection[int] = ()) -> list[psutil.Process]:
    """Returns the living processes that have the mark, be it in `TMPDIR` alone, and their
    descendants, but for these ids.
    """
    together: dict[int, psutil.Process] = {}
    for pid in _marked(mark.encode()):
        if pid not in but:
            with suppress(psutil.Error):
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                together |= {one.pid: one for one in family if one.pid not in but and _lives(one)}
    return [*together.values()]


def keep(process: int) -> None:
    """Notes a server that this process needs until its end: it is no leftover of a test."""
    _kept.add(process)


def left_over() -> list[str]:
    """Returns the command lines of processes that tests of this process started and left running,
    but for those that end by themselves within seconds.
    """
    nearest = os.environ[VARIABLE].rpartition("/")[2]
    give_up, pause_s = time.monotonic() + _LEFT_S, _PAUSE_S
    while True:
        processes = started(nearest, but=_kept)
        if not processes or time.monotonic() > give_up:
            _kept.update(one.pid for one in processes)  # one file answers for each of them
            return [line for one in processes if (line := _command(one))]
        let_pass(pause_s)
        pause_s = min(2 * pause_s, 1.0)


def end_started(mark: str) -> None:
    """Kills them until two looks show none: what a process starts while it is killed is found by
    the next one.
    """
    empty_looks, give_up = 0, time.monotonic() + _END_S
    while empty_looks < 2 and time.monotonic() < give_up:
        processes = started(mark)
        empty_looks = 0 if processes else empty_looks + 1
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, timeout=1)
        let_pass(_PAUSE_S)


def watch(guarded: int, mark: str, folders: Iterable[Path]) -> None:
    """Waits until the process has ended, ends what it started and removes its files."""
    if os.getppid() == guarded:  # else it has ended already
        with suppress(psutil.NoSuchProcess):
            psutil.Process(guarded).wait()
    end_started(mark)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _beside(temporary: Path) -> Path:
    """Returns the folder for the files of a process that another guarded one started: not within
    that one's, because a socket's path has at most 107 bytes and a browser's is long.
    """
    return temporary.parent if temporary.name.startswith(_folder_name("")) else temporary


def _folder_name(mark: str) -> str:
    return f"rollstream-tests-{mark}"


def _marked(mark: bytes) -> Iterator[int]:
    if sys.platform == "linux":  # psutil takes ten times as long, and tests look often
        for name in filter(str.isdecimal, os.listdir("/proc")):
            with suppress(OSError):
                if mark in Path("/proc", name, "environ").read_bytes():
                    yield int(name)
    else:
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if any(mark.decode() in value for value in process.environ().values()):
                    yield process.pid


def _command(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.Error:
        return ""


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch(int(sys.argv[1]), sys.argv[2], [Path(folder) for folder in sys.argv[3:]])
