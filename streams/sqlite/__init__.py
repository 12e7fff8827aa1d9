"""The embedded bus: one SQLite file per topic, one for consumer groups.

`bus` implements the contract over `topic_log` (one topic) and `groups` (consumer groups).
`database` opens a file, runs its transactions and translates its errors; `read_only` reads a bus
that may come from another user.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.streams.sqlite.bus import SqliteBus as SqliteBus

__getattr__ = lazy_exports(__name__)
