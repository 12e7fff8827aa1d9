"""The run of a game day (`testbed/oncall/game_day.py`): real processes over a Kafka broker and an
S3 server of their own, watched by a Prometheus. Everything of it is in one folder.
"""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from os.path import dirname
from pathlib import Path

import psutil

from testbed.reference_pages import ALERTS
from testbed.repository import ROOT
from testbed.run_driver import Machine, RunProcess, set_words, steps_done
from testbed.run_process import SETTINGS, random_model
from testbed.servers import versity
from testbed.servers.fault_proxy import FaultProxy
from testbed.servers.kafka_broker import KafkaBroker
from testbed.servers.prometheus import Prometheus
from testbed.waiting import wait_for

SCRAPE_S = 5.0  # as in deploy/prometheus.yml
PROCESSES, OBSERVER = 10, 11
"""The supervisor and its roles serve metrics on consecutive ports, the observer on the eleventh."""
STORE_BYTES = "128m"
BUCKET = "game"
MORE = [
    "trainer.steps=1000000", "trainer.lr=1e-7", "task.name=testbed.oncall.game_task:Judged",
    "dispatch.group_deadline_s=300", "dispatch.heartbeat_timeout_s=30", "checkpoints.every=20",
    "checkpoints.keep=2", "weights.versions_max=4", "archive.roll_s=20", "rollouts.count=2",
    "sampling.tokens_max=48", "rollouts.slots=4", "metrics.stalled_s=60",
]  # fmt: skip


@dataclass
class LivingStack:
    """What operator and faults act on. `port` is that of the supervisor's metrics."""

    folder: Path
    broker: KafkaBroker
    objects: versity.VersityGW
    proxy: FaultProxy
    port: int
    notice: str = ""
    """What the provider of the object store has to say."""
    job_failed: str = ""
    """What last night's job reports."""
    ended: threading.Event = field(default_factory=threading.Event)
    processes: dict[str, RunProcess] = field(default_factory=dict[str, RunProcess])
    """What this process started, by name: `run` (the supervisor), `observer`, and of faults."""

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def bus(self) -> str:
        return f"kafka://{self.broker.server}/game"

    @property
    def reward_service_down(self) -> Path:
        return self.folder / "reward-service.down"

    def start(self, name: str, *words: str, **more: str) -> None:
        """Starts `rollstream` with these words, with the operator's credentials, as `name`."""
        python = f'. {self.folder}/credentials.sh; exec {sys.executable} -m "$@"'
        line, log = ["bash", "-c", python, "-", "rollstream", *words], self.folder / f"{name}.txt"
        process = Machine(folder=ROOT).start(line, log, more)
        self.processes[name] = RunProcess(name, process, log)

    def is_alive(self, name: str) -> bool:
        return name in self.processes and not self.processes[name].is_over

    def stop(self, name: str) -> None:
        """Ends it in order, as Ctrl-C does."""
        if self.is_alive(name):
            self.processes[name].stop()

    def start_observer(self) -> None:
        observer = str(self.port + OBSERVER)
        self.start("observer", "observe", str(self.run), ROLLSTREAM_METRICS_PORT=observer)

    def roles(self, name: str) -> list[psutil.Process]:
        """The living processes of a role of the run, whoever started them."""
        found: list[psutil.Process] = []
        for one in psutil.process_iter(["cmdline"]):
            words: list[str] = one.info["cmdline"] or []
            if str(self.run / "config.json") in words and name in words:
                found.append(one)
        return found

    def objects_under(self, prefix: str) -> list[Path]:
        """The files of these objects, the oldest first."""
        files = [p for p in (self.objects.data / BUCKET / "run" / prefix).rglob("*") if p.is_file()]
        return sorted(files, key=lambda path: path.stat().st_mtime)

    def write_credentials(self) -> None:
        pair = f"AWS_ACCESS_KEY_ID={self.objects.access_key} "
        pair += f"AWS_SECRET_ACCESS_KEY={self.objects.secret_key}"
        (self.folder / "credentials.sh").write_text(f"export {pair}\n")

    def close(self) -> None:
        self.ended.set()
        for process in self.processes.values():
            process.kill()
        for one in psutil.process_iter(["cmdline"]):
            words: list[str] = one.info["cmdline"] or []
            if "rollstream" in words and str(self.run) in (*words, *map(dirname, words)):
                with suppress(psutil.NoSuchProcess):
                    one.kill()


@contextmanager
def living_stack(folder: Path) -> Generator[tuple[LivingStack, Prometheus]]:
    """A run that trains, with its Prometheus; the object store is on a file system of
    `STORE_BYTES`, which needs root.
    """
    with ExitStack() as stack:
        objects = _object_store(folder / "objects", stack)
        broker = KafkaBroker()
        stack.callback(broker.close)
        broker.start()
        broker.wait_ready()
        proxy = stack.enter_context(FaultProxy(objects.endpoint))
        living = LivingStack(folder, broker, objects, proxy, _free_row(PROCESSES + 2))
        stack.callback(living.close)
        living.write_credentials()
        options = f'[task.options]\nservice = "{living.reward_service_down}"\n'
        (folder / "game.toml").write_text(f'run = "game"\n{options}')
        url = f"s3://{BUCKET}/run?endpoint={proxy.endpoint}"
        given = [f"bus={living.bus}", f"store={url}", f"metrics.port={living.port}"]
        given += [f"model.path={random_model(folder / 'model')}"]
        settings = set_words([*SETTINGS, *MORE, *given])
        living.start("run", "run", f"{folder}/game.toml", "--run", str(living.run), *settings)
        run = living.processes["run"]
        wait_for(lambda: steps_done(living.run) >= 3, run.process, run.describe)
        living.start_observer()
        ports = [*range(living.port, living.port + PROCESSES), living.port + OBSERVER]
        targets = [f"127.0.0.1:{port}" for port in ports]
        yield living, stack.enter_context(Prometheus(targets, ALERTS, SCRAPE_S))


def _object_store(folder: Path, stack: ExitStack) -> versity.VersityGW:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={STORE_BYTES}", "game-day", str(folder)]
    subprocess.run(mount, check=True)
    stack.callback(subprocess.run, ["umount", "--lazy", str(folder)], check=False)
    objects = versity.VersityGW(parent=folder)
    stack.callback(objects.close)
    objects.start()
    objects.make_bucket(BUCKET)
    return objects


def _free_row(count: int) -> int:
    """The first of `count` consecutive free ports."""
    for base in range(20_000 + os.getpid() % 1000, 30_000, count):
        with ExitStack() as stack, suppress(OSError):
            for port in range(base, base + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return base
    raise RuntimeError("no free ports")


def watch_until(ended: threading.Event, every_s: float, act: Callable[[], None]) -> None:
    """Does it every so often in a thread until the stack ends."""

    def run() -> None:
        while not ended.wait(every_s):
            act()

    threading.Thread(target=run, daemon=True).start()
