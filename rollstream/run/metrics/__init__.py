"""A Prometheus endpoint per process, and forwarding of a run's metrics files. `catalogue` lists all
metric families. `endpoint` serves a role's metrics, readers and progress, with `/healthz`;
`samples` converts the values. `metered` measures a process's use of log and store. `forwarder`
sends metrics files to TensorBoard or Weights & Biases.
"""
