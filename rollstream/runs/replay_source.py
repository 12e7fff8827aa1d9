"""What a replay reads: a run's folder, its config.json, or an archive (a folder or a store's URL),
as one log that can only be read.
"""

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace

from rollstream.consumers.replay.recorded_steps import RecordedSteps, read_recorded
from rollstream.analysis.live import has_topic, open_run_log
from rollstream.analysis.locate import RunLocation, locate_run
from rollstream.storage.archive.reading import archived_files
from rollstream.storage.archive.log import LogWithArchive
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.base import ObjectStore
from rollstream.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class ReplaySource:
    """`store` None where the place has none."""

    place: RunLocation
    store: ObjectStore | None
    log: LogWithArchive

    def recorded(self) -> RecordedSteps:
        """Its ledger; `ConfigurationError` if there is nothing of it."""
        if not any(self.log.end("ledger").values()):
            raise ConfigurationError(
                f"{self.place.name} has no ledger, and only the ledger says what a step trained"
            )
        return read_recorded(self.log)


@contextmanager
def open_replay_source(named: str, name: str | None = None) -> Generator[ReplaySource]:
    """`name` is the run, where an archive holds several."""
    place = locate_run(named)
    place = place if name is None else replace(place, run=name)
    store = open_store(place.store) if place.has_store else None
    bus = None if place.bus is None else open_run_log(place)
    if bus is not None and not has_topic(bus, "ledger"):
        bus.close()
        bus = None
    run = place.run or (_only_run(place, store) if store is not None else "run")
    with closing(LogWithArchive(bus, store, run)) as log:
        yield ReplaySource(place, store, log)


def _only_run(place: RunLocation, store: ObjectStore) -> str:
    runs = sorted({file.run for file in archived_files(store)})
    if len(runs) == 1:
        return runs[0]
    if runs:
        raise ConfigurationError(
            f"{place.name} holds the archives of {len(runs)} runs ({', '.join(runs[:8])}): name "
            "one with --name NAME"
        )
    raise ConfigurationError(f"{place.name} holds no archive of a run; is the path right?")
