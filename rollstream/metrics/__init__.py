"""A Prometheus endpoint per process, and forwarding of a run's metrics files.

`process` holds what a role offers: its metrics, its readers and the progress of its loop.
`catalogue` lists all metric families, `collector` converts offered values to them, `endpoint`
serves them with `/healthz`. `forwarder` sends metrics files to the targets in `sinks`.
"""
