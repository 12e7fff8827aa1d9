"""A Prometheus endpoint per process, and forwarding of a run's metrics files.

`process` holds what a role offers: its metrics, its readers and the progress of its loop.
`catalogue` lists all metric families, `collector` converts offered values to them, `endpoint`
serves them with `/healthz`. `forwarder` sends metrics files to the targets in `sinks`.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.metrics.catalogue import FAMILIES as FAMILIES, Family as Family
    from rollstream.metrics.collector import MetricsCollector as MetricsCollector
    from rollstream.metrics.endpoint import serve_metrics as serve_metrics
    from rollstream.metrics.forwarder import Forwarder as Forwarder
    from rollstream.metrics.process import ProcessMetrics as ProcessMetrics

__getattr__ = lazy_exports(
    __name__,
    {
        "catalogue": (
            "FAMILIES",
            "Family",
        ),
        "collector": ("MetricsCollector",),
        "endpoint": ("serve_metrics",),
        "forwarder": ("Forwarder",),
        "process": ("ProcessMetrics",),
    },
)
