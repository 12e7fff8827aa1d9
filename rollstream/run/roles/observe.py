"""The role `observe`: serves the metrics of a whole run, above all its concerns, from log and
metrics files, for a run without `rollstream run`. It only reads, so there may be several.
"""

import logging
import time

from rollstream.errors import ConfigurationError, StoreError
from rollstream.look.monitor.observer import STORE_S, RunObserver
from rollstream.look.monitor.snapshot import run_settings_of
from rollstream.run.config.recorded_configuration import RECORDED_S, present_configuration
from rollstream.run.config.run_folder import RunFolder, store_url
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import RoleContext
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store

log = logging.getLogger(__name__)

# As Prometheus scrapes (deploy/prometheus.yml); over Kafka some 40 requests each.
REFRESH_S = 5.0


def run_observe(context: RoleContext) -> bool:
    """Observes until the run is complete or stopped (True), or the role is stopped."""
    c = context.configuration
    # Not the context's store, for which roles wait for minutes: an alert must state its absence.
    store = open_store(store_url(c, context.folder), c.sync, STORE_S)
    view = LogView(context.bus, store, c.run)
    metrics = RunFolder(context.folder).metrics
    observer = RunObserver(run_settings_of(c), metrics, lambda: view, time.time)
    context.watch.offer(observer.metric_values)
    looked_s = float("-inf")
    while not context.stop.wait(0.0 if observer.is_behind else REFRESH_S):
        if time.monotonic() - looked_s >= RECORDED_S:
            looked_s = time.monotonic()
            observer.settings = run_settings_of(_present(c, store))
        shown = observer.observe()
        # A failed run stays observed: else its last alert would end with its supervisor.
        if shown.is_over and not shown.has_failed and not observer.is_behind:
            return True
    return False


def _present(configuration: Configuration, store: ObjectStore) -> Configuration:
    try:
        # A run resumed with `--accept-config` stays observed.
        return present_configuration(store, configuration)
    except (ConfigurationError, StoreError) as error:
        log.warning("the run's present settings cannot be read: %s", error)
        return configuration
