"""A small real run with every role in its own process, on a random model."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Record
from testbed.run_driver import RunDriver
from testbed.scraping import endpoint, scrape, value

SETTINGS = [
    "warmup.enabled=false", "trainer.groups_per_step=4", "trainer.samples_per_group=4",
    "trainer.workers=1", "checkpoints.every=4", "rollouts.slots=8", "rollouts.count=1",
    "rollouts.context_max=128", "sampling.tokens_max=40", "dispatch.heartbeat_timeout_s=2",
    "dispatch.max_lag=2", "evaluation.every=2", "evaluation.prompts=2", "evaluation.samples=1",
    "evaluation.slots=4",
]  # fmt: skip


@contextmanager
def started(folder: Path, model: Path, *settings: str, **environment: str) -> Generator[RunDriver]:
    """Starts `rollstream run` with `environment` added to that of the test."""
    configuration = folder.parent / "tiny.toml"
    configuration.write_text('run = "tiny"\n')
    words = [*SETTINGS, f"model.path={model}", *settings]
    with RunDriver(folder, configuration, words, environment=environment) as run:
        run.start()
        yield run


def wait_for_iteration(run: RunDriver, name: str) -> None:
    """Until the loop of the role's process `name` has made an iteration, by which a long-lived role
    counts as healthy.
    """

    def turn_age() -> float:
        found = scrape(endpoint(run.folder, name)["url"])
        return value(found, "rollstream_role_turn_age_seconds")

    ages = [turn_age()]
    run.wait_for(lambda: ages.append(turn_age()) or ages[-1] < ages[-2])


def records(folder: Path, topic: str, kind: type[Record]) -> list:
    if not (folder / "bus" / f"{topic}.db").exists():
        return []
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    try:
        reader = TopicReader(bus, topic, from_begin(bus, topic))
        return [r.record for r in reader.read_to(bus.end(topic)) if isinstance(r.record, kind)]
    finally:
        bus.close()
