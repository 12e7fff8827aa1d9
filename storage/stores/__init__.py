"""Object stores: one contract, two back ends.

`base` is the contract, with the rules for keys and the hash of content. `file` and `s3/` implement
it; `kind` says what is known of a back end by its URL alone (`file_kind`). `connect` opens a store,
and checks that it honours the conditions which terms, leases and versions rely on; `read_only`
opens it for readers, `part` makes a store of the objects under one prefix. `json_objects` reads and
writes small JSON objects, `run_keys` declares which objects are a run's.
"""
