"""Ranks that a launcher starts, over tiny scripts: they end together whichever is killed, with one
exit code.
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from rollstream.consumers.settings import TrainerSettings
from rollstream.errors import EXIT_REFUSED
from rollstream.run.signals import StopSignals
from rollstream.run.supervisor import train_group
from rollstream.run.supervisor.train_group import (
    group_exit_code,
    rank_environment,
    rank_group_environment,
    run_rank_processes,
    threads_per_rank,
)
from testbed.repository import ROOT
from testbed.waiting import WAIT_S, wait_for

HEAD = "import os, signal, sys, time; rank = int(os.environ['RANK'])\n"
SLEEP = "open(f'{sys.argv[1]}/{rank}', 'w').write(str(os.getpid()) + chr(10)); time.sleep(600)"


def line(code: str, folder: Path) -> list[str]:
    return [sys.executable, "-c", HEAD + code, str(folder)]


def ranks(processes: int, threads: int = 1) -> TrainerSettings:
    return TrainerSettings(processes=processes, threads=threads)


def pids(folder: Path, count: int) -> list[int]:
    """The process ids of `SLEEP`, once all wrote theirs."""

    def texts() -> list[str]:
        return [path.read_text() for path in sorted(folder.iterdir())]

    wait_for(
        lambda: len(written := texts()) == count and all(text.endswith("\n") for text in written)
    )
    return [int(text) for text in texts()]


@pytest.mark.parametrize(
    ("ended", "code"),
    [
        ({1: 0, 0: 0}, 0),
        ({0: 0, 1: -9}, 0),
        ({1: 143, 0: 143}, 143),
        ({1: -9, 0: 1}, 137),
        ({0: 1, 1: EXIT_REFUSED}, EXIT_REFUSED),
        ({1: 0}, 1),
        ({}, 1),
    ],
)
def test_one_exit_code_states_how_all_ended(ended, code):
    assert group_exit_code(ended) == code


def test_ranks_divide_the_threads_of_the_trainer():
    assert [threads_per_rank(ranks(n, 4)) for n in (1, 2, 3, 8)] == [4, 2, 1, 1]
    found = rank_group_environment(ranks(2, 4), 1234, {"OMP_NUM_THREADS": "4", "PATH": "/bin"})
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "2"
    assert (found["PATH"], found["WORLD_SIZE"], found["MASTER_PORT"]) == ("/bin", "2", "1234")


def test_a_rank_ends_with_the_launcher_that_named_itself_or_with_torchrun():
    launched = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "h"}
    launched["MASTER_PORT"] = "1"
    assert rank_environment({**launched, "ROLLSTREAM_PARENT": "7"})["ROLLSTREAM_PARENT"] == "7"
    assert rank_environment(launched) == {"ROLLSTREAM_PARENT": str(os.getppid())}
    assert rank_environment({}) == {}


def test_each_rank_gets_its_number(tmp_path):
    code = (
        "import json; names = ('RANK', 'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_ADDR', 'MASTER_PORT')\n"
        "found = [os.environ[name] for name in names]\n"
        "open(f'{sys.argv[1]}/{rank}', 'w').write(json.dumps(found))"
    )
    assert run_rank_processes(line(code, tmp_path), ranks(3), StopSignals()) == 0
    environments = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [one[:4] for one in environments] == [
        [str(r), str(r), "3", "127.0.0.1"] for r in range(3)
    ]
    assert len({one[4] for one in environments}) == 1


def test_a_killed_rank_takes_the_others_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(train_group, "RANKS_END_S", 0.2)
    every = "sum(path.stat().st_size > 0 for path in Path(sys.argv[1]).iterdir()) == 3"
    kill = f"while rank == 1: {every} and os.kill(os.getpid(), signal.SIGKILL); time.sleep(0.01)"
    code = SLEEP.replace("; ", f"\nfrom pathlib import Path\n{kill}\n")
    assert run_rank_processes(line(code, tmp_path), ranks(3), StopSignals()) == 128 + signal.SIGKILL
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path, 3))


def test_a_rank_that_refuses_refuses_for_all(tmp_path):
    code = f"sys.exit({EXIT_REFUSED} if rank == 1 else 1)"
    assert run_rank_processes(line(code, tmp_path), ranks(2), StopSignals()) == EXIT_REFUSED


def test_a_stop_of_the_launcher_stops_every_rank_once(tmp_path):
    code = (
        "asked = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: asked.append(1))\n"
        "open(f'{sys.argv[1]}/{rank}', 'w').write(str(os.getpid()) + chr(10))\n"
        "while not asked: time.sleep(0.01)\n"
        "time.sleep(0.3)\n"
        "sys.exit(143 if asked == [1] else 9)"
    )
    signals = StopSignals()

    def ask() -> None:
        pids(tmp_path, 2)
        signals.stop.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert run_rank_processes(line(code, tmp_path), ranks(2), signals) == 143
    asking.join()


def test_a_second_signal_kills(tmp_path):
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP
    signals = StopSignals()

    def ask() -> None:
        pids(tmp_path, 2)
        signals.stop.set()
        signals.hurry.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert run_rank_processes(line(code, tmp_path), ranks(2), signals) != 0
    asking.join()
    assert not any(psutil.pid_exists(pid) for pid in pids(tmp_path, 2))


LAUNCHER = """
import sys
from rollstream.consumers.settings import TrainerSettings
from rollstream.run.signals import listen_for_signals
from rollstream.run.supervisor.train_group import run_rank_processes
sys.exit(run_rank_processes(sys.argv[1:], TrainerSettings(processes=2), listen_for_signals()))
"""


def test_no_rank_outlives_a_killed_launcher(tmp_path):
    code = (
        "from rollstream.run.supervisor.process import end_with_parent; end_with_parent()\n" + SLEEP
    )
    command = [sys.executable, "-c", LAUNCHER, *line(code, tmp_path)]
    with subprocess.Popen(command, cwd=ROOT) as launcher:
        started = [psutil.Process(pid) for pid in pids(tmp_path, 2)]
        launcher.kill()
        gone, alive = psutil.wait_procs(started, timeout=WAIT_S)
    assert len(gone) == 2
    assert not alive
