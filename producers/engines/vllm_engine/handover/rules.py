"""Whether KV that another engine computed may be used here. Pure (invariant 9).

`versions` are all under which any of it may have been computed: what the exporter served while it
had the trajectory, and what the KV that it had itself been handed was of. A vLLM that preempted and
computed anew makes the truth newer than that, never other. What may be used follows from what the
update mode promises of KV that stays at home:

* `keep_version`: one version from the first token to the last, so only the importer's own.
* `in_flight_recompute`: KV is always of the weights that generate, so again only the importer's.
* `in_flight`: old KV stays in use under newer weights, so anything up to the importer's version; it
  is what the trajectory would have had, had it stayed until its engine took that version. KV of a
  later one it would have had nowhere.
"""

from collections.abc import Collection

import numpy as np

from producers.engines.base import UpdateMode
from streams.records import Tokens, Version


def may_use(mode: UpdateMode, versions: Collection[Version], mine: Version) -> bool:
    """For an engine that serves `mine`."""
    if not versions:
        return False
    if mode == "in_flight":
        return max(_order(version) for version in versions) <= _order(mine)
    return set(versions) == {mine}


def blocks_of_use(computed: Tokens, wanted: Tokens, block: int) -> int:
    """How many whole blocks of the KV of `computed` belong to `wanted`: 0 where any token differs.
    The newest token has none, so at least one is always left to compute.
    """
    shared = min(len(computed), len(wanted) - 1)
    if shared < block or not np.array_equal(computed[:shared], wanted[:shared]):
        return 0
    return shared // block


def _order(version: Version) -> tuple[int, int]:
    return version.number, version.term
