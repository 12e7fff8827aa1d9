"""A Prometheus endpoint per process, and forwarding of a run's metrics files.

`catalogue` lists all metric families. `endpoint` serves what a role offers (its metrics, its
readers and the progress of its loop) with `/healthz`; `samples` converts the values. `metered`
measures a process's use of log and store. `forwarder` sends metrics files to TensorBoard or Weights
& Biases.
"""
