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

from rollstream.consumers.dispatch.state import PartialChain, DispatchState, UnfinishedGroup, CurrentAssignment
from rollstream.storage.stores.json_objects import FORMAT, decode_json, encode_json
from rollstream.storage.stores.base import ObjectStore
from rollstream.errors import Fenced, ObjectExists, ObjectMissing, SwapLost
from rollstream.streams.records import Admitted, Position

STATE_KEY = "dispatch/state.json"

TopicPositions = Mapping[str, Mapping[int, Position]]
"""Topic → partition → next position to read."""


@dataclass(frozen=True, slots=True)
class PersistedGroup:
    """An open group; its prompt is read again from the log."""

    admitted: Admitted
    open: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class PersistedState:
    """`DispatchState` without rollouts and version, which are read again from compacted topics."""

    term: int
    positions: dict[str, dict[str, Position]]
    admitted: int = 0
    closed: int = 0
    trained: int = 0
    next_group: int = 0
    completed: int = 0
    late: int = 0
    groups: tuple[PersistedGroup, ...] = ()
    orders: tuple[tuple[str, CurrentAssignment], ...] = ()
    chains: tuple[tuple[str, PartialChain], ...] = ()
    heard_s: tuple[tuple[str, float], ...] = ()
    """When each rollout sent its last status, by its own clock. Not read by this release: trainers
    of earlier releases pin versions by it.
    """
    format: int = FORMAT

    def where(self) -> dict[str, dict[int, Position]]:
        """Positions by number of the partition (JSON keys are strings)."""
        return {t: {int(p): at for p, at in by.items()} for t, by in self.positions.items()}


def state_to_persist(state: DispatchState, term: int, positions: TopicPositions) -> PersistedState:
    """The state in the form that is persisted; `positions` must be of the same moment."""
    return PersistedState(
        term=term,
        positions={t: {str(p): at for p, at in by.items()} for t, by in positions.items()},
        admitted=state.admitted,
        closed=state.closed,
        trained=state.trained,
        next_group=state.next_group,
        completed=state.completed,
        late=state.late,
        groups=tuple(PersistedGroup(g.admitted, tuple(sorted(g.open))) for g in state.groups.values()),
        orders=tuple(state.orders.items()),
        chains=tuple(state.chains.items()),
        heard_s=tuple((name, seen.status.time_s) for name, seen in state.rollouts.items()),
    )


def read_persisted_state(store: ObjectStore) -> PersistedState | None:
    """The persisted state, for read-only use; None before the first write."""
    try:
        return decode_json(store.get(STATE_KEY), PersistedState, STATE_KEY)
    except ObjectMissing:
        return None


def restore_state(kept: PersistedState | None) -> DispatchState:
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
        groups={g.admitted.group: UnfinishedGroup(g.admitted, set(g.open)) for g in kept.groups},
        orders=dict(kept.orders),
        chains=dict(kept.chains),
    )


class StateFile:
    """The state object of one term. Its writes raise `Fenced` once a higher term has taken it."""

    def __init__(self, store: ObjectStore, term: int) -> None:
        self._store, self._term, self._etag = store, term, ""

    def take_over(self) -> PersistedState | None:
        """Write this term into the object and return the earlier holder's state; None at the start
        of a run.
        """
        while True:
            try:
                data, etag = self._store.read(STATE_KEY)
            except ObjectMissing:
                try:
                    first = PersistedState(self._term, {})
                    self._etag = self._store.create(STATE_KEY, encode_json(first))
                    return None
                except ObjectExists:
                    continue
            kept = decode_json(data, PersistedState, STATE_KEY)
            if kept.term > self._term:
                raise Fenced(f"{STATE_KEY} is of term {kept.term}; this dispatch has term {self._term}")
            try:
                mine = encode_json(replace(kept, term=self._term))
                self._etag = self._store.swap(STATE_KEY, mine, etag)
            except SwapLost:
                continue  # the object changed meanwhile; a higher term is refused above
            return kept if kept.positions else None

    def keep(self, kept: PersistedState) -> None:
        """Replace the persisted state. Raises `Fenced` if another term wrote the object since."""
        data = encode_json(kept)
        try:
            self._etag = self._store.swap(STATE_KEY, data, self._etag)
        except SwapLost as lost:
            present, etag = self._store.read(STATE_KEY)
            if present != data:  # equal bytes: this swap succeeded and its response was lost
                raise Fenced(f"{STATE_KEY} was taken by a later dispatch ({lost})") from lost
            self._etag = etag
