"""Which partitions a member of a consumer group holds: a pure function over lease rows, the same
for every bus.

Partitions are dealt to the live members in turn, in the order of their names. At most one member
holds a partition at a time: a member takes a partition only if its lease is free, expired or
already its own, and gives back those outside its share.
"""

from collections.abc import Mapping
from dataclasses import dataclass

LEASE_S = 10.0  # a member that does not poll for this long loses its partitions


@dataclass(frozen=True, slots=True)
class PartitionLease:
    """`owner` holds something until `expires_s` on the bus's clock."""

    owner: str
    expires_s: float


@dataclass(frozen=True, slots=True)
class PartitionClaim:
    """What a member holds after its poll: `held` partitions are renewed, `released` ones go back to
    the group.
    """

    held: frozenset[int]
    released: frozenset[int]


def claim_partitions(
    member: str,
    members: Mapping[str, float],
    leases: Mapping[int, PartitionLease],
    partitions: int,
    now_s: float,
) -> PartitionClaim:
    """Compute the partitions of `member`. `members` maps names to expiry times, and `member` itself
    counts as alive; `leases` are by partition.
    """
    alive = sorted({name for name, expires_s in members.items() if expires_s > now_s} | {member})
    share = {p for p in range(partitions) if alive[p % len(alive)] == member}
    mine = {p for p, lease in leases.items() if lease.owner == member and lease.expires_s > now_s}
    taken = {p for p, lease in leases.items() if lease.expires_s > now_s} - mine
    return PartitionClaim(frozenset(share - taken), frozenset(mine - share))
