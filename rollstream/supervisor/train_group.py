"""Runs the trainer's processes on this machine as one (`run_rank_processes`): as many as
`trainer.processes` states, each a rank of one process group of torch.distributed.

The ranks train one model together (docs/how-to/several-gpus.md), so none continues without the
others: once one has ended, the others have `RANKS_END_S` seconds. No rank is left when
`run_rank_processes` returns, nor after a `kill -9` of the process that called it, which is their
parent. The supervisor starts and restarts only this parent, and with it all ranks.
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
from rollstream.consumers.trainer.rank_plan import is_launched, rank_of
from rollstream.errors import EXIT_REFUSED
from rollstream.import_path import module_environment
from rollstream.supervisor.process import PARENT_VARIABLE as PARENT, describe_exit

RANKS_END_S = 10.0
"""Once one rank has ended, the others have these seconds: rank 0 finds and reports the missing
ranks, or, after training, each rank closes its resources.
"""
TICK_S = 0.1
HOST = "127.0.0.1"
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

log = logging.getLogger(__name__)


def threads_per_rank(settings: TrainerSettings) -> int:
    """Returns the torch threads of one process: its share of `trainer.threads`, at least one."""
    return max(1, settings.threads // settings.processes)


def run_rank_processes(line: Sequence[str], settings: TrainerSettings, signals: StopSignals) -> int:
    """Run the command `line` in `trainer.processes` processes, one per rank, until all have ended;
    returns their `group_exit_code`. A signal to stop is forwarded to each rank; a second one kills
    all ranks.
    """
    shared = rank_group_environment(settings, _free_port())
    processes: list[subprocess.Popen[bytes]] = []
    ended: dict[int, int] = {}
    try:
        for rank in range(settings.processes):
            processes.append(_start(line, {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
        _watch_ranks(processes, ended, signals)
    # Every rank is reaped, so that the supervisor may give the nonce of their lease to the next
    # holder, which then need not wait for the lease to expire.
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return group_exit_code(ended)


def rank_group_environment(
    settings: TrainerSettings, port: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the environment that all ranks share: where they find each other on this machine, the
    process id of their parent, with which they end (`end_with_parent`), and their threads.
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
    """Returns one exit code for all ranks: `EXIT_REFUSED`, after which a restart is useless, if any
    rank ended with it; else 0 if rank 0 did; else that of the first rank that failed, or 1. `ended`
    maps rank to exit code in the order of their ends, without ranks that the parent killed.
    """
    if EXIT_REFUSED in ended.values():
        return EXIT_REFUSED
    if ended.get(0) == 0:
        return 0
    first = next((code for code in ended.values() if code), 1)
    return first if first > 0 else 128 - first  # as shells report a signal


def _start(line: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank in an operating-system process group of its own: Ctrl-C in the terminal then
    reaches only the parent, which forwards it once.
    """
    return subprocess.Popen(
        list(line),
        stdin=subprocess.DEVNULL,
        env=dict(environment),
        process_group=0,
        close_fds=False,  # ranks inherit the run's lock; no other descriptor is inheritable
    )


def _watch_ranks(
    processes: Sequence[subprocess.Popen[bytes]], ended: dict[int, int], signals: StopSignals
) -> None:
    """Fill `ended` (rank to exit code) until all ranks have ended, `RANKS_END_S` has passed since
    the first end, or a second signal has arrived.
    """
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
    """Returns a free port for the ranks' rendezvous, which rank 0 opens. If another process takes
    the port first, the ranks end, and the next start has another port.
    """
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def rank_name(name: str, environment: MutableMapping[str, str] = os.environ) -> str:
    """Returns the name of this process, which runs one rank: rank 0 keeps the role's `name`, any
    other gets a name of its own. For the latter `environment` is changed: its metrics get any free
    port, because rank 0 has the configured one.
    """
    rank = rank_of(environment)
    if not rank:
        return name
    environment[METRICS_PORT] = "0"
    return f"{name}-rank{rank}"


def rank_environment(environment: Mapping[str, str] = os.environ) -> Mapping[str, str]:
    """Returns the environment for `end_with_parent`, which names the parent with which this process
    ends. It is `environment` itself, except in a rank that was started by `torchrun` and not by
    `run_rank_processes`: that rank ends with `torchrun`.
    """
    if PARENT in environment or not is_launched(environment):
        return environment
    return {PARENT: str(os.getppid())}
