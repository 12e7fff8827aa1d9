"""A Prometheus endpoint per process, and forwarding of a run's metrics files.

`catalogue` lists all metric families. `collector` holds what a role offers (its metrics, its
readers and the progress of its loop) and converts it to them, `endpoint` serves them with
`/healthz`.
`forwarder` sends metrics files to TensorBoard or Weights & Biases.
"""
