"""Which holders of leases live (`living_leases`), for commands that must not touch a living run."""

import time
from collections.abc import Callable, Iterable
from math import inf

from rollstream.errors import LeaseHeld
from rollstream.storage.leases import POLL_S_MAX
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.terms import RoleRecord, read_role, role_key


def living_leases(
    store: ObjectStore,
    roles: Iterable[str],
    watch_s_max: float = inf,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RoleRecord]:
    """Returns the leases renewed at the first poll that finds renewals, so other holders may live
    too; [] if none is renewed for the longest duration of these leases. Raises `LeaseHeld` at once
    for a lease of more than `watch_s_max`, which a store of another user may state.
    """
    leases = {role: stored for role in roles if (stored := read_role(store, role)) is not None}
    unreleased = {role: stored for role, stored in leases.items() if not stored[0].released}
    for record, _ in unreleased.values():
        if record.duration_s > watch_s_max:  # its holder need not renew it sooner
            raise LeaseHeld(
                f"the lease of role {record.role} (by {record.holder}, term {record.term}) lasts "
                f"{record.duration_s:,.0f} s, and at most {watch_s_max:,.0f} s are waited to see "
                "whether its holder lives; if no process of the run lives, delete "
                f"{role_key(record.role)} in the store, then repeat the command"
            )
    give_up = clock() + max((record.duration_s for record, _ in unreleased.values()), default=0.0)
    while unreleased and clock() < give_up:
        sleep(POLL_S_MAX)
        now = {role: read_role(store, role) for role in unreleased}
        renewed = [
            stored[0] for role, stored in now.items() if stored and stored[1] != unreleased[role][1]
        ]
        if living := [record for record in renewed if not record.released]:
            return living
        unreleased = {
            role: stored for role, stored in now.items() if stored and not stored[0].released
        }
    return []
