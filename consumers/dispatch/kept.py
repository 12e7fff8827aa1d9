"""The persisted state of dispatch (`dispatch/state.json`): the fold at one moment and the positions
from which to continue it. A rebuild reads only the records after them, and earlier ones may be
truncated (invariant 11).

Every write is a compare-and-swap, and a new holder swaps its own term in *before* it appends
`Opened`. From then on the earlier holder's swap fails and it exits; its last successful write
covers only records before that `Opened`. Without the swaps a stopped dispatch of term 3 could wake
up behind its successor, fold its own void admissions and persist them; term 5 would start from
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from consumers.dispatch.state import Chain, DispatchState, OpenGroup, Order
from storage.documents import FORMAT, decode, encode
from storage.objects import ObjectStore
from streams.errors import Fenced, ObjectExists, ObjectMissing, SwapLost
from streams.records import Admitted, Position

KEY = "dispatch/state.json"

Positions = Mapping[str, Mapping[int, Position]]
"""Topic → partition → next position to read."""


@dataclass(frozen=True, slots=True)
class KeptGroup:
    """An open group; its prompt is read again from the log."""

    admitted: Admitted
    open: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class KeptState:
    """`DispatchState` without rollouts and version, which are read again from compacted topics."""

    term: int
    positions: dict[str, dict[str, Position]]
    admitted: int = 0
    closed: int = 0
    trained: int = 0
    next_group: int = 0
    completed: int = 0
    late: int = 0
    groups: tuple[KeptGroup, ...] = ()
    orders: tuple[tuple[str, Order], ...] = ()
    chains: tuple[tuple[str, Chain], ...] = ()
    heard_s: tuple[tuple[str, float], ...] = ()
    """When each rollout sent its last status, by its own clock. Not read by this release: trainers
    of earlier releases pin versions by it.
    """
    format: int = FORMAT

    def where(self) -> dict[str, dict[int, Position]]:
        """Positions by number of the partition (JSON keys are strings)."""
        return {t: {int(p): at for p, at in by.items()} for t, by in self.positions.items()}


def kept_state(state: DispatchState, term: int, positions: Positions) -> KeptState:
    """The state in the form that is persisted; `positions` must be of the same moment."""
    return KeptState(
        term=term,
        positions={t: {str(p): at for p, at in by.items()} for t, by in positions.items()},
        admitted=state.admitted,
        closed=state.closed,
        trained=state.trained,
        next_group=state.next_group,
        completed=state.completed,
        late=state.late,
        groups=tuple(KeptGroup(g.admitted, tuple(sorted(g.open))) for g in state.groups.values()),
        orders=tuple(state.orders.items()),
        chains=tuple(state.chains.items()),
        heard_s=tuple((name, seen.status.time_s) for name, seen in state.rollouts.items()),
    )


def read_kept(store: ObjectStore) -> KeptState | None:
    """The persisted state, for read-only use; None before the first write."""
    try:
        return decode(store.get(KEY), KeptState, KEY)
    except ObjectMissing:
        return None


def restored(kept: KeptState | None) -> DispatchState:
    """The state from which to continue the fold; empty at the start of a run."""
    if kept is None:
        return DispatchState()
    return DispatchState(
        admitted=kept.admitted,
        closed=kept.closed,
        trained=kept.trained,
        next_group=kept.next_group,
        completed=kept.completed,
        late=kept.late,
        groups={g.admitted.group: OpenGroup(g.admitted, set(g.open)) for g in kept.groups},
        orders=dict(kept.orders),
        chains=dict(kept.chains),
    )


class Keeper:
    """The state object of one term. Its writes raise `Fenced` once a higher term has taken it."""

    def __init__(self, store: ObjectStore, term: int) -> None:
        self._store, self._term, self._etag = store, term, ""

    def take_over(self) -> KeptState | None:
        """Write this term into the object and return the earlier holder's state; None at the start
        of a run.
        """
        while True:
            try:
                data, etag = self._store.read(KEY)
            except ObjectMissing:
                try:
                    first = KeptState(self._term, {})
                    self._etag = self._store.create(KEY, encode(first))
                    return None
                except ObjectExists:
                    continue
            kept = decode(data, KeptState, KEY)
            if kept.term > self._term:
                raise Fenced(f"{KEY} is of term {kept.term}; this dispatch has term {self._term}")
            try:
                mine = encode(replace(kept, term=self._term))
                self._etag = self._store.swap(KEY, mine, etag)
            except SwapLost:
                continue  # the object changed meanwhile; a higher term is refused above
            return kept if kept.positions else None

    def keep(self, kept: KeptState) -> None:
        """Replace the persisted state. Raises `Fenced` if another term wrote the object since."""
        data = encode(kept)
        try:
            self._etag = self._store.swap(KEY, data, self._etag)
        except SwapLost as lost:
            present, etag = self._store.read(KEY)
            if present != data:  # equal bytes: this swap succeeded and its response was lost
                raise Fenced(f"{KEY} was taken by a later dispatch ({lost})") from lost
            self._etag = etag
