"""Runs the trainer's processes on this machine as one: `trainer.processes` ranks, none of which
continues without the others, nor after a `kill -9` of their parent, which alone the supervisor
starts.
"""

import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.rank_plan import is_launched, rank_of
from rollstream.errors import EXIT_REFUSED
from rollstream.import_path import module_environment
from rollstream.run.config.sources import METRICS_PORT
from rollstream.run.signals import StopSignals
from rollstream.run.supervisor.process import PARENT_VARIABLE as PARENT, describe_exit

# Once one rank has ended, the others have these seconds: rank 0 finds and reports the missing
# ranks, or, after training, each closes its resources.
RANKS_END_S = 10.0
TICK_S = 0.1
HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

log = logging.getLogger(__name__)


def threads_per_rank(settings: TrainerSettings) -> int:
    """Returns the threads per rank of torch: a rank's share of `trainer.threads`, at least one."""
    return max(1, settings.threads // settings.processes)


def run_rank_processes(line: Sequence[str], settings: TrainerSettings, signals: StopSignals) -> int:
    """Runs the rank processes until all have ended; returns their `group_exit_code`. A signal to
    stop is forwarded to each rank; a second one kills all.
    """
    shared = rank_group_environment(settings, _free_port())
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, int] = {}
    try:
        for rank in range(settings.processes):
            processes.append(_start(line, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        _watch_ranks(processes, ended, signals)
    # Every rank is reaped, so that the supervisor may pass on the nonce of their lease without a
    # wait for it to expire.
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return group_exit_code(ended)


def rank_group_environment(
    settings: TrainerSettings, port: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns what all ranks share: their rendezvous, their parent's process id, with which they
    end (`end_with_parent`), and their threads.
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
    """`EXIT_REFUSED` if any rank has it, since a restart is useless; else 0 if rank 0 did; else
    that of the first rank that failed, or 1. `ended` maps rank to exit code in the order of their
    ends, without killed ranks.
    """
    if EXIT_REFUSED in ended.values():
        return EXIT_REFUSED
    if ended.get(0) == 0:
        return 0
    first = next((code for code in ended.values() if code), 1)
    # As shells report a signal.
    return first if first > 0 else 128 - first


def _start(line: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(line),
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        # Ctrl-C in the terminal reaches only the parent, which forwards it once.
        process_group=0,
        # Ranks inherit the run's lock; no other descriptor is inheritable.
        close_fds=False,
    )


def _watch_ranks(
    processes: Sequence[subprocess.Popen[bytes]], ended: dict[int, int], signals: StopSignals
) -> None:
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
    with socket.socket() as probe:
        # If another process takes it before rank 0, the ranks end, and the next start has another.
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def rank_name(name: str, environment: MutableMapping[str, str] = os.environ) -> str:
    """Rank 0 keeps the role's name, another gets its own, and in `environment` any free metrics
    port, because rank 0 has the configured one.
    """
    rank = rank_of(environment)
    if not rank:
        return name
    environment[METRICS_PORT] = "0"
    return f"{name}-rank{rank}"


def rank_environment(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Returns the rank environment for `end_with_parent`: a rank of `torchrun` ends with it."""
    if PARENT in environment or not is_launched(environment):
        return environment
    return {PARENT: str(os.getppid())}
