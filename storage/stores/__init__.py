"""Object stores: one contract, three back ends.

`base` is the contract, with the rules for keys and the hash of content. `file`, `memory` and `s3/`
implement it, and `connect` opens a store from its URL. `json_objects` reads and writes small JSON
objects. `conditional_writes` checks that a store honours the conditions which terms, leases and
versions rely on.
"""
