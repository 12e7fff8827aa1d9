"""A small real run with every role in its own process, on a random model."""

import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Record
from testbed.run_process import run_line, running
from testbed.scraping import endpoint, scrape, value
from testbed.waiting import wait_for

SETTINGS = [
    "warmup.enabled=false", "trainer.groups_per_step=4", "trainer.samples_per_group=4",
    "trainer.workers=1", "checkpoints.every=4", "rollouts.slots=8", "rollouts.count=1",
    "rollouts.context_max=128", "sampling.tokens_max=40", "dispatch.heartbeat_timeout_s=2",
    "dispatch.max_lag=2", "evaluation.every=2", "evaluation.prompts=2", "evaluation.samples=1",
    "evaluation.slots=4",
]  # fmt: skip


@contextmanager
def started(
    folder: Path, model: Path, *settings: str, **environment: str
) -> Generator[subprocess.Popen[bytes]]:
    """Starts `rollstream run` with `environment` added to that of the test."""
    configuration = folder.parent / "tiny.toml"
    configuration.write_text('run = "tiny"\n')
    line = run_line(configuration, folder, [*SETTINGS, f"model.path={model}", *settings])
    given = {**os.environ, **environment}
    with running(line, folder.parent / "output.txt", environment=given) as process:
        yield process


def wait_for_iteration(folder: Path, name: str, process: subprocess.Popen[bytes]) -> None:
    """Until the loop of the role's process `name` has made an iteration, by which a long-lived role
    counts as healthy.
    """

    def turn_age() -> float:
        found = scrape(endpoint(folder, name)["url"])
        return value(found, "rollstream_role_turn_age_seconds")

    ages = [turn_age()]
    wait_for(lambda: ages.append(turn_age()) or ages[-1] < ages[-2], process)


def records(folder: Path, topic: str, kind: type[Record]) -> list:
    if not (folder / "bus" / f"{topic}.db").exists():
        return []
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    try:
        reader = TopicReader(bus, topic, from_begin(bus, topic))
        return [r.record for r in reader.read_to(bus.end(topic)) if isinstance(r.record, kind)]
    finally:
        bus.close()
