"""A Prometheus endpoint per process, and forwarding of a run's metrics files."""
