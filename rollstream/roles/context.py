"""Where a role runs: the configuration, the run's log and store, opened, and what ends it; and how
many threads torch takes there.
"""

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

from rollstream.config.settings import Configuration
from rollstream.config.run_folder import open_run_log_for_writing, store_url
from rollstream.metrics.process import ProcessMetrics
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.metric_values import ProvidesMetrics
from rollstream.streams.topics import catalogue


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLaunch:
    """Which role this process runs, for which run, and with which options."""

    role: str
    configuration: Configuration
    folder: Path
    name: str
    """Name of the process, e.g. `rollout-0`; its log, metrics and term carry it."""
    stop: threading.Event
    """Set when the role is asked to stop."""
    nonce: str
    """Identifies this process as holder of a lease."""
    handed_nonce: str | None = None
    """Nonce of the predecessor that the supervisor reaped, whose lease may be taken at once."""
    accept_config: bool = False
    """Continue although the run had another configuration."""
    grace_s: float | None = None
    """Seconds that a preemptible rollout has once it is asked to stop; None for other roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleContext(RoleLaunch):
    """A launched role with its run's log and store opened."""

    bus: Bus
    store: ObjectStore
    watch: ProcessMetrics
    """Collects the metrics and the liveness of this process."""


@contextmanager
def open_role_context(launch: RoleLaunch, watch: ProcessMetrics) -> Generator[RoleContext]:
    """Open the run's log and store for the block; all topics exist in it."""
    bus = open_run_log_for_writing(launch.configuration, launch.folder)
    if isinstance(bus, ProvidesMetrics):
        watch.beside.append(bus.figures)
    try:
        url = store_url(launch.configuration, launch.folder)
        store = open_store(url, launch.configuration.sync)
        bus.create(catalogue())
        given = {part.name: getattr(launch, part.name) for part in fields(RoleLaunch)}
        yield RoleContext(**given, bus=bus, store=store, watch=watch)
    finally:
        bus.close()


def set_torch_threads(threads: int) -> None:
    """Torch's threads in this process; several processes compute on few cores, so
    nobody takes all.
    """
    import torch

    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
