"""The embedded bus: one SQLite file per topic, one for consumer groups.

`bus` implements the contract over `topic_log` (one topic) and `groups` (consumer groups).
`database` opens a file, runs its transactions and translates its errors; `read_only` reads a bus
that may come from another user. `kind` opens one by its URL, `removal` removes one.
"""
