"""The role `observe`: serves the metrics of a whole run, above all its concerns, from its log and
its metrics files. It only reads, so any number of processes may observe a run.

The supervisor of `rollstream run` does this for its own run. A run whose roles are started by an
orchestrator needs one process of this role.
"""

import time

from rollstream.config.run_folder import RunFolder
from rollstream.monitor.observer import RunObserver
from rollstream.monitor.snapshot import run_settings_of
from rollstream.roles.context import RoleContext
from rollstream.storage.log_view import LogView

REFRESH_S = 5.0  # the scrape interval of deploy/prometheus.yml; a refresh over Kafka is 30 requests


def run_observe(context: RoleContext) -> bool:
    """Observe the run until it is complete or stopped (returns True) or the role is stopped. A run
    that has failed stays observed: else its last alert would end with its supervisor.
    """
    c = context.configuration
    view = LogView(context.bus, context.store, c.run)
    metrics = RunFolder(context.folder).metrics
    observer = RunObserver(run_settings_of(c), metrics, lambda: view, time.time)
    context.watch.offer(observer.metric_values)
    while not context.stop.wait(0.0 if observer.is_behind else REFRESH_S):
        shown = observer.observe()
        if shown.is_over and not shown.has_failed and not observer.is_behind:
            return True
    return False
