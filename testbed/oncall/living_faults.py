"""Faults of machines, servers, programs and people that a game day plants into a living run
(`testbed/oncall/game_day.py`). A fault lasts until the operator mends its cause.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from testbed.oncall.game_stack import LivingStack, watch_until
from testbed.repository import ROOT
from testbed.run_driver import HERE, RunProcess
from testbed.servers.fault_proxy import FOREVER, Fault
from testbed.waiting import wait_for

STRAY = """\
import sys, time
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
bus = open_bus(sys.argv[1])
while True:
    bus.append("trajectories", [AppendEntry(b"load-test-7", b"not a record")])
    time.sleep(2)
"""
MEMORY_S = 15.0  # after its start a trainer reaches the limit
Mended = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class LivingFault:
    """`plant` does `what` and returns the check whether its cause has gone."""

    what: str
    plant: Callable[[LivingStack], Mended]


def _broker_dies(living: LivingStack) -> Mended:
    living.broker.kill()
    return living.broker.is_running


def _store_unavailable(living: LivingStack) -> Mended:
    living.proxy.inject(Fault("status", 503, count=FOREVER))
    return lambda: not living.proxy.has_faults()


def _key_rotated(living: LivingStack) -> Mended:
    living.objects.stop()
    living.objects.secret_key = os.urandom(16).hex()
    living.objects.start()
    living.notice = f"we replaced your secret key; the new one: {living.objects.secret_key}"
    return lambda: living.objects.secret_key in (living.folder / "credentials.sh").read_text()


def _store_full(living: LivingStack) -> Mended:
    disk = living.folder / "objects"
    with suppress(OSError), (disk / "old-backup.tar").open("wb") as file:
        while True:
            file.write(bytes(1 << 16))
            file.flush()
    return lambda: shutil.disk_usage(disk).free > shutil.disk_usage(disk).total // 5


def _rollout_hangs(living: LivingStack) -> Mended:
    (process,) = living.roles("rollout-1")
    process.suspend()
    return lambda: all(one.status() != psutil.STATUS_STOPPED for one in living.roles("rollout-1"))


def _trainer_out_of_memory(living: LivingStack) -> Mended:
    """The kernel kills each trainer until its settings need less memory."""

    def needed() -> int:
        return _setting(living, "trainer", "micro_batch_tokens")

    before = needed()

    def kill() -> None:
        for process in living.roles("train") if needed() >= before else ():
            with suppress(psutil.NoSuchProcess):
                if time.time() - process.create_time() > MEMORY_S:
                    process.kill()
                    with (living.folder / "kernel.log").open("a") as file:
                        what = f"Out of memory: Killed process {process.pid} (python, trainer)"
                        file.write(f"{time.strftime('%H:%M:%S')} {what}\n")

    watch_until(living.ended, 1.0, kill)
    return lambda: needed() < before


def _reward_service_fails(living: LivingStack) -> Mended:
    living.reward_service_down.touch()
    return lambda: not living.reward_service_down.exists()


def _archive_damaged(living: LivingStack) -> Mended:
    """A backup was made shortly before, and an audit every night finds the damage. No concern does:
    an observer reads the archive only where the log is truncated before it has read it.
    """
    living.start("backup", "backup", str(living.run), str(living.folder / "backup"))
    living.processes["backup"].wait()
    parquet = [one for one in living.objects_under("archive") if one.suffix == ".parquet"]
    whole = {one: one.read_bytes() for one in parquet[:4]}
    for one in whole:
        _damage(one)
    living.job_failed = "cron: `rollstream audit $RUN --whole` ended with exit code 1"
    return lambda: all(one.read_bytes() == content for one, content in whole.items())


def _damage(path: Path) -> None:
    """Overwrites bytes in the middle of the file, which keeps its size."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        file.write(b"\xff" * 64)


def _stray_writer(living: LivingStack) -> Mended:
    file = living.folder / "load-test-7.py"
    file.write_text(STRAY)
    line, log = [sys.executable, str(file), living.bus], living.folder / "load-test-7.txt"
    process = HERE.start(line, log, {"PYTHONPATH": str(ROOT)})
    writer = living.processes["load-test-7"] = RunProcess("load-test-7", process, log)
    return lambda: writer.is_over


def _machine_restarts(living: LivingStack) -> Mended:
    supervisor = living.processes["run"]
    for one in [*psutil.Process(supervisor.pid).children(recursive=True), supervisor]:
        os.kill(one.pid, signal.SIGKILL)
    supervisor.wait(None)
    return lambda: living.is_alive("run")


def _wrong_setting(living: LivingStack) -> Mended:
    living.stop("run")
    changed = ("--set", "sampling.tokens_max=4", "--accept-config")
    living.start("run", "run", str(living.run), *changed)
    wait_for(
        lambda: _setting(living, "sampling", "tokens_max") == 4, living.processes["run"].process
    )
    return lambda: _setting(living, "sampling", "tokens_max") > 16


def _setting(living: LivingStack, table: str, name: str) -> int:
    return int(json.loads((living.run / "config.json").read_text())[table][name])


LIVING_FAULTS: Mapping[str, LivingFault] = {
    "broker_dies": LivingFault("kill -9 of the broker", _broker_dies),
    "store_unavailable": LivingFault("the store answers all with 503", _store_unavailable),
    "key_rotated": LivingFault("the secret key of the store was replaced", _key_rotated),
    "store_full": LivingFault("a file fills the store's disk", _store_full),
    "rollout_hangs": LivingFault("SIGSTOP of rollout-1", _rollout_hangs),
    "trainer_out_of_memory": LivingFault(
        "the kernel kills each trainer for its memory", _trainer_out_of_memory
    ),
    "reward_service_fails": LivingFault("the reward's service is down", _reward_service_fails),
    "archive_damaged": LivingFault("four files of the archive are damaged", _archive_damaged),
    "stray_writer": LivingFault("a program writes bytes that are no record", _stray_writer),
    "machine_restarts": LivingFault("kill -9 of supervisor and roles", _machine_restarts),
    "wrong_setting": LivingFault(
        "somebody resumed the run with sampling.tokens_max = 4", _wrong_setting
    ),
}
"""What each does, by its name."""
