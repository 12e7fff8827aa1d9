"""A healthy run in a real log and a real store, written by the product's own writers, into which
faults are planted (`faults.py`). Its observer reads it as `top` does, under the run's own clock.
"""

import shutil
import threading
from pathlib import Path
from typing import Any

from rollstream.consumers.archive.service import ArchiveService
from rollstream.look.monitor.observer import RunObserver, opener_of_run
from rollstream.look.monitor.snapshot import run_settings_of
from rollstream.run.config.run_folder import RunFolder, bus_url, store_url, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.metrics_file import MetricsFile
from rollstream.storage.stores.connect import open_store
from rollstream.streams.connect import open_bus
from rollstream.streams.records import (
    Admitted,
    Annotation,
    Applied,
    GroupClosed,
    Record,
    RolloutStatus,
    StepDone,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import FencedWriter, publish
from testbed.oncall import records

RUN = "planted"
WRITERS = {"ledger": "trainer", "weights": "trainer", "admissions": "dispatch"}


class PlantedRun:
    """One run in `folder`. `now_s` is its present, which only `pass_time` moves; records are
    appended at it, or at their own time.
    """

    def __init__(self, folder: Path, term: int) -> None:
        self.folder = RunFolder(folder)
        self.configuration = Configuration.model_validate(
            {"run": RUN, "folder": str(folder), **records.SETTINGS}
        )
        self.settings = run_settings_of(self.configuration)
        self.now_s = self._append_s = records.NOW_S
        self.step = records.STEPS
        write_configuration(self.folder, self.configuration)
        self.bus = open_bus(bus_url(self.configuration, folder), lambda: self._append_s)
        self.bus.create(catalogue())
        self.store = open_store(store_url(self.configuration, folder))
        self._writers = {t: FencedWriter(self.bus, t, r, term) for t, r in WRITERS.items()}
        for writer in self._writers.values():
            writer.open()

    def apply(self, record: Record, time_s: float = 0.0) -> None:
        """Append the record to its topic, at `time_s`, or now without it."""
        self._append_s = time_s or self.now_s
        match record:
            case Take() | StepDone() | GroupClosed():
                self._writers["ledger"].append([("run", record)])
            case WeightsAnnounced():
                self._writers["weights"].append([(RUN, record)])
            case Admitted():
                self._writers["admissions"].append([(str(record.group), record)])
            case Trajectory():
                publish(self.bus, "trajectories", str(record.group), record)
            case Annotation():
                publish(self.bus, "annotations", str(record.group), record)
            case RolloutStatus():
                publish(self.bus, "status", f"{record.rollout}/{record.term}", record)
            case Applied():
                publish(self.bus, "applied", record.rollout, record)
            case _:
                raise AssertionError(f"{type(record).__name__} has no place here")

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    def beat(self, rollouts: int = 2, **changes: Any) -> None:
        """A heartbeat of each of the first so many rollouts."""
        for number in range(rollouts):
            self.apply(records.status(f"rollout-{number}", self.now_s, **changes))

    def train(self, counts: dict[str, int] | None = None, **metrics: float) -> None:
        """The next step, which ends now."""
        self.step += 1
        self.apply(records.done(self.step, self.now_s, counts, **metrics))

    def train_again(self, steps: int, counts: dict[str, int] | None = None, **given: float) -> None:
        """The last `steps` steps with other metrics."""
        for step in range(self.step - steps + 1, self.step + 1):
            at_s = self.now_s - (self.step - step) * records.STEP_S
            self.apply(records.done(step, at_s, counts, **given))

    def note(self, file: str, *lines: dict[str, Any]) -> None:
        """Append lines to a metrics file of the run."""
        with MetricsFile(self.folder.metrics / file) as metrics:
            for line in lines:
                metrics.append(line)

    def archive(self) -> None:
        """Archive the log up to its present end."""
        stop = threading.Event()
        stop.set()
        ArchiveService(self.bus, self.store, RUN, self.configuration.archive).run(stop)

    def observer(self) -> RunObserver:
        """Returns an observer of the run, under the run's clock."""
        opened = opener_of_run(self.folder.path)
        return RunObserver(self.settings, self.folder.metrics, opened, lambda: self.now_s)

    def close(self) -> None:
        self.bus.close()


def write_healthy_run(folder: Path) -> None:
    """Write a healthy run, from which `copy_of` makes copies."""
    run = PlantedRun(folder, term=1)
    records.apply_healthy(run)
    run.close()


def copy_of(healthy: Path, folder: Path) -> PlantedRun:
    """Returns a copy of a healthy run, with writers of the next term."""
    shutil.copytree(healthy, folder)
    (folder / "config.json").unlink()  # it names the original's folder
    return PlantedRun(folder, term=2)
