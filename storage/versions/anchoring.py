"""When a version must be an anchor. Pure (invariant 9).

A chain is an anchor and the deltas on it. It ends, and the next version is an anchor, where going
on would cost a late reader more than an anchor saves (`BYTES_SHARE`), or where its length would
make retention choose between versions that are needed: two whole chains always fit in
`versions_max`, so the believed version and any that a rollout of the chain before still holds are
kept together.
"""

from dataclasses import dataclass

BYTES_SHARE = 1 / 3
"""Deltas of a chain together, as a share of a full version; above it the chain ends."""
BESIDE_SHARE = 1 / 2
"""An anchor holds its delta too, for readers of its parent, up to this share of a full version."""
MULTIPLES_MIN = 4
"""Multiples of `keep_every` that must fit in `versions_max` with all that lies between them; where
they do not, each of them is an anchor, which needs nothing else kept.
"""


@dataclass(frozen=True, slots=True)
class AnchorRule:
    """`every`: longest chain, in versions; the bounds are those of retention."""

    every: int
    versions_max: int
    keep_every: int

    @property
    def length_max(self) -> int:
        return max(1, min(self.every, self.versions_max // 2))


@dataclass(frozen=True, slots=True)
class Chain:
    """The believed version's chain: versions in it, its anchor among them, bytes of its deltas, and
    of one full version.
    """

    length: int
    delta_bytes: int
    full_bytes: int


def anchor_due(number: int, chain: Chain | None, rule: AnchorRule) -> bool:
    """Whether version `number`, the next after `chain` (None: there is none), is an anchor."""
    if chain is None or chain.length >= rule.length_max:
        return True
    if chain.delta_bytes > BYTES_SHARE * chain.full_bytes:
        return True
    crowded = rule.keep_every * MULTIPLES_MIN > rule.versions_max
    return rule.keep_every > 0 and crowded and number % rule.keep_every == 0


def is_kept_beside(delta_bytes: int, full_bytes: int) -> bool:
    """Whether an anchor holds its delta too."""
    return delta_bytes <= BESIDE_SHARE * full_bytes
