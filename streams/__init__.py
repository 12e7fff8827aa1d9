"""Streams: the records of a run, and the log that carries them.

`records` and `values` define every record, `codec` its bytes, `topics` the catalogue of topics.
`bus` is the contract of the log; `sqlite/` and `kafka/` implement it, and `connect` opens
one from its URL. Roles write with `writer` and read with `reader`, which applies the `fence` of
single-holder roles and writes `dead_letters`; consumer groups spread partitions over members.
`fence` also removes the old end of a topic. `admissible` decides which trajectories and partials
are valid; `release` decides which releases can work together.
"""

if __name__ == "streams":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.streams", name="streams")
