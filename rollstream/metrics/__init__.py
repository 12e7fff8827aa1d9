"""A Prometheus endpoint per process, and forwarding of a run's metrics files.

`process` holds what a role offers: its metrics, its readers and the progress of its loop.
`catalogue` lists all metric families, `collector` converts offered values to them, `endpoint`
serves them with `/healthz`. `forwarder` sends metrics files to the targets in `sinks`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.metrics.catalogue import FAMILIES, Family
    from rollstream.metrics.collector import MetricsCollector
    from rollstream.metrics.endpoint import serve_metrics
    from rollstream.metrics.forwarder import Forwarder
    from rollstream.metrics.process import ProcessMetrics

__all__ = [
    "FAMILIES",
    "Family",
    "Forwarder",
    "MetricsCollector",
    "ProcessMetrics",
    "serve_metrics",
]

_MODULES = {
    "FAMILIES": "catalogue",
    "Family": "catalogue",
    "Forwarder": "forwarder",
    "MetricsCollector": "collector",
    "ProcessMetrics": "process",
    "serve_metrics": "endpoint",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
