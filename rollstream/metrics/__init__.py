"""A Prometheus endpoint per process, and forwarding of a run's metrics files.

`catalogue` lists all metric families. `endpoint` serves what a role offers (its metrics, its
readers and the progress of its loop) with `/healthz`; `samples` converts the values. `metered`
measures a process's use of log and store. `forwarder` sends metrics files to TensorBoard or Weights
& Biases.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.metrics.catalogue import (
        FAMILIES as FAMILIES,
        Family as Family,
    )
    from rollstream.metrics.endpoint import (
        MetricsCollector as MetricsCollector,
        ProcessMetrics as ProcessMetrics,
        serve_metrics as serve_metrics,
    )
    from rollstream.metrics.forwarder import Forwarder as Forwarder

__getattr__ = lazy_exports(__name__)
