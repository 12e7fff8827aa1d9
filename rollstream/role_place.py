"""Where a role runs: the configuration, the run's log and store, opened, and what ends it; and how
many threads torch takes there.
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rollstream.config import Configuration
from rollstream.folder import run_log, store_url
from rollstream.metrics.watch import Watch
from storage.connect import open_store
from storage.objects import ObjectStore
from streams.bus import Bus
from streams.figures import TellsFigures
from streams.topics import catalogue


@dataclass(frozen=True, slots=True)
class Place:
    """Where a role runs and by which nonces it holds its lease."""

    configuration: Configuration
    folder: Path
    name: str
    bus: Bus
    store: ObjectStore
    stop: threading.Event
    nonce: str
    handed_nonce: str | None
    watch: Watch
    accept_config: bool = False
    """Go on although the run had another configuration."""
    grace_s: float | None = None
    """A rollout that may be taken away has so many seconds once it is asked to stop."""


@contextmanager
def placed(
    configuration: Configuration,
    folder: Path,
    name: str,
    watch: Watch,
    nonce: str,
    handed_nonce: str | None,
) -> Generator[Place]:
    """Log and store of the run, opened; all topics exist."""
    bus = run_log(configuration, folder)
    if isinstance(bus, TellsFigures):
        watch.beside.append(bus.figures)
    try:
        store = open_store(store_url(configuration, folder), configuration.sync)
        bus.create(catalogue())
        yield Place(configuration, folder, name, bus, store, watch.stop, nonce, handed_nonce, watch)
    finally:
        bus.close()


def set_threads(threads: int) -> None:
    """Torch's threads in this process; several processes compute on few cores, so
    nobody takes all.
    """
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
