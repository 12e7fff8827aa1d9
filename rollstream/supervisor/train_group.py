"""The trainer's processes on this machine (`trainer.processes`), started, watched and ended as one.

They learn one model together (docs/sharded.md), so none goes on without the others: once one has
ended the rest have `RANKS_END_S` seconds, and none is left when `run_rank_processes` returns, nor
after a `kill -9` of this process (`lifeline.py`). Starting all again is the supervisor's: what
died is a trainer.

What one of the trainer's processes is called, and with whom it ends.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence

from rollstream.cli.signals import StopSignals
from rollstream.config.sources import METRICS_PORT
from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.sharded.rank_environment import is_launched, rank_of
from rollstream.import_path import module_environment
from rollstream.supervisor.process import EXIT_REFUSED, PARENT_VARIABLE as PARENT, describe_exit

RANKS_END_S = 10.0
"""For the other ranks once one has ended: rank 0 asks round who is gone and says so, or, when the
training is over, each closes what it has open.
"""
TICK_S = 0.1
HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

log = logging.getLogger(__name__)


def threads_per_rank(settings: TrainerSettings) -> int:
    """Torch threads of one process: its share of `trainer.threads`, at least one."""
    return max(1, settings.threads // settings.processes)


def run_rank_processes(line: Sequence[str], settings: TrainerSettings, signals: StopSignals) -> int:
    """Run `line` as so many ranks until all have ended, and return `group_exit_code` them. What
    asks this process to stop asks each of them; a second signal kills.
    """
    shared = rank_group_environment(settings, _free_port())
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, int] = {}
    try:
        for rank in range(settings.processes):
            processes.append(_start(line, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        _watch_ranks(processes, ended, signals)
    finally:  # reaped, so that the next holder may be handed the nonce of their lease
        for process in processes:
            process.kill()
            process.wait()
    return group_exit_code(ended)


def rank_group_environment(
    settings: TrainerSettings, port: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What all ranks find: each other, on this machine alone, with whom they end, and their
    threads.
    """
    threads = str(threads_per_rank(settings))
    return {
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        **environment,
        **module_environment(),
        "WORLD_SIZE": str(settings.processes),
        "LOCAL_WORLD_SIZE": str(settings.processes),
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        PARENT: str(os.getpid()),
    }


def group_exit_code(ended: Mapping[int, int]) -> int:
    """One exit code for exit codes by rank, in the order of their ends; those that had to be killed
    are missing. A refusal of any is one of all, and when rank 0 has done its work it is done.
    """
    if EXIT_REFUSED in ended.values():
        return EXIT_REFUSED
    if ended.get(0) == 0:
        return 0
    first = next((code for code in ended.values() if code), 1)
    return first if first > 0 else 128 - first  # as shells say it


def _start(line: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A process group of its own: Ctrl-C reaches this process alone, which passes it on once."""
    return subprocess.Popen(
        list(line),
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        process_group=0,
        close_fds=False,  # the run's lock goes on to them; nothing else of ours is inheritable
    )


def _watch_ranks(
    processes: Sequence[subprocess.Popen[bytes]], ended: dict[int, int], signals: StopSignals
) -> None:
    """Fill `ended` until all are there, the time of the last ones is over, or there is a hurry."""
    is_asked, deadline = False, None
    while len(ended) < len(processes) and not signals.hurry.is_set():
        if deadline is not None and time.monotonic() > deadline:
            return
        time.sleep(TICK_S)
        if signals.stop.is_set() and not is_asked:
            is_asked = True
            for process in processes:
                process.send_signal(signal.SIGTERM)
        for rank, process in enumerate(processes):
            code = process.poll()
            if code is None or rank in ended:
                continue
            ended[rank] = code
            log.info("rank %d (process %d) ended: %s", rank, process.pid, describe_exit(code))
            if deadline is None:
                deadline = time.monotonic() + RANKS_END_S


def _free_port() -> int:
    """For rank 0 to listen on; if somebody takes it first the ranks end, and another start has
    another one.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def rank_name(name: str, environment: MutableMapping[str, str] = os.environ) -> str:
    """Rank 0 has the name, others one of their own, and a free port for their metrics."""
    rank = rank_of(environment)
    if not rank:
        return name
    environment[METRICS_PORT] = "0"
    return f"{name}-rank{rank}"


def rank_environment(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """A rank that `torchrun` started ends with it; any other process with whom it was told."""
    if PARENT in environment or not is_launched(environment):
        return environment
    return {PARENT: str(os.getppid())}
