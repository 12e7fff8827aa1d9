"""Storage: objects, weight versions, checkpoints, the archive, and the leases and terms of roles.

`stores/` are the object stores, `weights/` the versions, `archive/` the log as Parquet files, which
it reads together with the log, `relay/` a node's cache of versions, which is one of the
`weight_paths`. `checkpoints` holds the trainer's state. `leases` and `terms` give a role its one
holder. `claim_check` puts large records into the store; its `open_log` opens a run's log. `models`
builds a model from a configuration, a folder or a version, `hf_folder` finds Hugging Face
checkpoints, `hf_weights` and `hf_tokenizer` read them for every role, `model_fit` compares them
with their class, `starting_model/` holds that of a run in its store, `lora` attaches adapters,
which `lora_folder` reads. `identity` is the `run.json` of a run, `stored_settings` are the settings
that it had. `skipped_rows` are those of a data set that a run does not ask, `metrics_file` are a
process's metrics, `settings` the settings of all this.
"""

if __name__ == "storage":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.storage", name="storage")
