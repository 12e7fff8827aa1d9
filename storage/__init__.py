"""Storage: objects, weight versions, checkpoints, the archive, and the leases and terms of roles.

`stores/` are the object stores, `weights/` the versions with the trainer's checkpoints,
`model_folder/` models as folders, `starting_model/` that of a run in its store, `archive/` the log
as Parquet files, which it reads together with the log, `relay/` a node's cache of versions, which
is one of the `weight_paths`. `leases` (with `lease_renewal` and
`living_leases`) and `terms` give a role its one holder. `claim_check` puts
large records into the store; its `open_log` opens a run's log. `identity` is the `run.json` of a
run, `stored_settings` are the settings that it had. `skipped_rows` are those of a data set that a
run does not ask, `metrics_file` are a process's metrics, `settings` the settings of all this.
"""

if __name__ == "storage":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.storage", name="storage")
