"""Storage: objects, weight versions, checkpoints, the archive, and the leases and terms of roles.

`stores/` are the object stores, `weights/` the versions, `archive/` the log as Parquet files,
`relay/` a node's cache of versions. `checkpoints` holds the trainer's state. `leases` and `terms`
give a role its one holder. `claim_check` puts large records into the store; its `open_log` opens a
run's log. `models` builds a model from a configuration, a folder or a version, and `hf_folder`
finds Hugging Face checkpoints. `metrics_file` are a process's metrics, `settings` the settings of
all this.
"""

if __name__ == "storage":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.storage", name="storage")
