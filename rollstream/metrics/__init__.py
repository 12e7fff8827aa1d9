"""Metrics: a Prometheus endpoint per process, and forwarders of the metrics files."""
