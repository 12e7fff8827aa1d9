"""Streams: the records of a run, and the log that carries them.

`records` (with `ledger_records` and `status_records`) and `values` define every record, `codec` its
bytes, `topics` the catalogue of topics. `bus` is the contract of the log; `sqlite/` and `kafka/`
implement it with the same `bus_checks`, a `bus_wrapper` changes one, and `connect` opens one from
its URL by its `kind`. Roles write with `writer` and read with `reader`, which by `classified`
applies the `fence` of single-holder roles and writes `dead_letters`; consumer groups spread
partitions over members. `fence` also removes the old end of a topic, `removal` a whole run.
`foreign_text` makes text and JSON of other programs clean where they enter, `admissible` decides
which trajectories and partials are valid, `branches` reads the paths of episodes, `token_arrays`
the named arrays beside tokens, `tails` is the rule for short answers beside long ones; `release`
decides which releases can work together.
"""

if __name__ == "streams":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.streams", name="streams")
