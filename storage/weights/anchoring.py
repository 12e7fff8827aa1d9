"""When a version must be an anchor. Pure (invariant 9).

A chain is an anchor and the deltas on it. It ends, and the next version is an anchor, in two cases:
when another delta would cost a late reader more than an anchor saves (`BYTES_SHARE`), and when its
length would make retention choose between needed versions. Two complete chains always fit in
`versions_max`, so the believed version is kept together with any version of the previous chain that
a rollout still holds.
"""

from dataclasses import dataclass

BYTES_SHARE = 1 / 3
"""Most bytes of a chain's deltas together, as a share of a full version; above it the chain
ends.
"""
BESIDE_SHARE = 1 / 2
"""An anchor also holds its delta, for readers of its parent, if the delta is at most this share of
a full version.
"""
MULTIPLES_MIN = 4
"""Multiples of `keep_every` that must fit in `versions_max` together with all versions between
them. If they do not fit, each multiple is an anchor, which needs no other version kept.
"""


@dataclass(frozen=True, slots=True)
class AnchorRule:
    """When anchors are due. `every` is the longest chain, in versions; the other bounds are those
    of retention.
    """

    every: int
    versions_max: int
    keep_every: int

    @property
    def length_max(self) -> int:
        return max(1, min(self.every, self.versions_max // 2))


@dataclass(frozen=True, slots=True)
class AnchorChain:
    """The believed version's chain: the number of its versions including the anchor, the bytes of
    its deltas, and those of one full version.
    """

    length: int
    delta_bytes: int
    full_bytes: int


def anchor_due(number: int, chain: AnchorChain | None, rule: AnchorRule) -> bool:
    """Whether version `number`, the next after `chain` (None: there is none), is an anchor."""
    if chain is None or chain.length >= rule.length_max:
        return True
    if chain.delta_bytes > BYTES_SHARE * chain.full_bytes:
        return True
    crowded = rule.keep_every * MULTIPLES_MIN > rule.versions_max
    return rule.keep_every > 0 and crowded and number % rule.keep_every == 0


def is_kept_beside(delta_bytes: int, full_bytes: int) -> bool:
    """Whether an anchor also holds its delta."""
    return delta_bytes <= BESIDE_SHARE * full_bytes
