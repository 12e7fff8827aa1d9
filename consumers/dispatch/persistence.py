"""Persists dispatch's state (`dispatch/state.json`) and answer lengths (`dispatch/lengths.json`),
and truncates records that no rebuild from them needs (invariant 11).
"""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import msgspec

from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.lengths import LengthHistory, PersistedLengths
from rollstream.consumers.dispatch.state import (
    CurrentAssignment,
    DispatchState,
    PartialChain,
    UnfinishedGroup,
)
from rollstream.errors import CorruptObject, Fenced, ObjectExists, ObjectMissing, SwapLost
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import FORMAT, decode_json, encode_json
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.streams.bus import Bus
from rollstream.streams.fence import (
    DISPATCH_GROUP,
    REBUILD_TOPICS,
    move_back_to_oldest,
    renew_truncated,
    truncate,
)
from rollstream.streams.records import Admitted, Position
from rollstream.streams.values import Address
from rollstream.streams.writer import FencedWriter

STATE_KEY = "dispatch/state.json"
LENGTHS_KEY = "dispatch/lengths.json"
RUN_KEYS = (RunKeys(re.compile(f"{re.escape(STATE_KEY)}|{re.escape(LENGTHS_KEY)}"), "cut"),)

TopicPositions = Mapping[str, Mapping[int, Position]]
"""Topic → partition → next position to read."""


@dataclass(frozen=True, slots=True)
class PersistedGroup:
    """An open group; its prompt is read again from the log."""

    admitted: Admitted
    open: tuple[str, ...]
    living: int = 0


@dataclass(frozen=True, slots=True)
class PersistedState:
    """A `DispatchState` without its rollouts and version, which compacted topics hold."""

    term: int
    """The term of the last holder that wrote or took over this state."""
    positions: dict[str, dict[str, Position]]
    admitted: int = 0
    closed: int = 0
    trained: int = 0
    next_group: int = 0
    completed: int = 0
    late: int = 0
    released: int = 0
    groups: tuple[PersistedGroup, ...] = ()
    orders: tuple[tuple[str, CurrentAssignment], ...] = ()
    """The newest assignment of each open trajectory."""
    chains: tuple[tuple[str, PartialChain], ...] = ()
    heard_s: tuple[tuple[str, float], ...] = ()
    """When each rollout sent its last status, by the rollout's own clock. Not read by this release;
    trainers of earlier releases keep the versions of rollouts by it.
    """
    format: int = FORMAT
    taken: tuple[tuple[int, int], ...] = ()
    """(step, groups) of the trained groups after the newest version."""

    def where(self) -> dict[str, dict[int, Position]]:
        # JSON keys are strings.
        return {t: {int(p): at for p, at in by.items()} for t, by in self.positions.items()}


def state_to_persist(state: DispatchState, term: int, positions: TopicPositions) -> PersistedState:
    """`positions` must be of the same moment as the state."""
    return PersistedState(
        term=term,
        positions={t: {str(p): at for p, at in by.items()} for t, by in positions.items()},
        admitted=state.admitted,
        closed=state.closed,
        trained=state.trained,
        next_group=state.next_group,
        completed=state.completed,
        late=state.late,
        released=state.released,
        groups=tuple(
            PersistedGroup(g.admitted, tuple(sorted(g.open)), g.living)
            for g in state.groups.values()
        ),
        orders=tuple(state.assignments.items()),
        chains=tuple(state.chains.items()),
        heard_s=tuple((name, rollout.status.time_s) for name, rollout in state.rollouts.items()),
        taken=state.unsettled,
    )


def read_persisted_state(store: ObjectStore) -> PersistedState | None:
    """Returns the state, for roles that only read it; None before the first write."""
    try:
        return decode_json(store.get(STATE_KEY), PersistedState, STATE_KEY)
    except ObjectMissing:
        return None


def restore_state(persisted: PersistedState | None) -> DispatchState:
    """The state into which a new holder folds further records."""
    if persisted is None:
        return DispatchState()
    return DispatchState(
        admitted=persisted.admitted,
        closed=persisted.closed,
        trained=persisted.trained,
        next_group=persisted.next_group,
        completed=persisted.completed,
        late=persisted.late,
        released=persisted.released,
        groups={
            g.admitted.group: UnfinishedGroup(g.admitted, set(g.open), living=g.living)
            for g in persisted.groups
        },
        assignments=dict(persisted.orders),
        chains=dict(persisted.chains),
        taken=dict(persisted.taken),
    )


class StateFile:
    """Reads and writes the state object for the holder of one term. Its writes raise `Fenced` once
    a holder of a higher term has taken the object over.

    Every write is a compare-and-swap, and a new holder swaps its own term in *before* it appends
    `Opened`, so the earlier holder's last write covers only records before that `Opened`. Otherwise
    a suspended dispatch of term 3 could wake after term 4 has opened, fold its own void admissions,
    and persist them; term 5 would start from them.
    """

    def __init__(self, store: ObjectStore, term: int) -> None:
        self._store, self._term, self._etag = store, term, ""

    def take_over(self) -> PersistedState | None:
        """Write this term into the object and return the earlier holder's state, or None. Raises
        `Fenced` if the object has a higher term.
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
            persisted = decode_json(data, PersistedState, STATE_KEY)
            if persisted.term > self._term:
                raise Fenced(
                    f"{STATE_KEY} is of term {persisted.term}; this dispatch has term {self._term}"
                )
            try:
                mine = encode_json(replace(persisted, term=self._term))
                self._etag = self._store.swap(STATE_KEY, mine, etag)
            except SwapLost:
                # The object changed meanwhile; a higher term is refused above.
                continue
            return persisted if persisted.positions else None

    def keep(self, persisted: PersistedState) -> None:
        """Replace the state. Raises `Fenced` if another holder has written the object since."""
        data = encode_json(persisted)
        try:
            self._etag = self._store.swap(STATE_KEY, data, self._etag)
        except SwapLost as lost:
            present, etag = self._store.read(STATE_KEY)
            if present != data:  # equal bytes: this swap succeeded and its response was lost
                raise Fenced(f"{STATE_KEY} was taken by a later dispatch ({lost})") from lost
            self._etag = etag


log = logging.getLogger(__name__)

LENGTHS_SAVE_S = 60.0  # between two writes; each is some MB where a run has many prompts
RENEW_S = 3600.0  # between two commits of positions that do not move; brokers drop them after days


@dataclass(slots=True)
class DispatchPersistence:
    """Persists every `keep_s` seconds, and then truncates if `truncate` is set. Dispatch calls
    `state_file.take_over` and `load_lengths` once, `keep` and `save_lengths` each round.
    """

    bus: Bus
    store: ObjectStore
    term: int
    truncate: bool
    keep_s: float
    monotonic: Callable[[], float]
    state_file: StateFile = field(init=False)
    _due_s: float = field(init=False)
    _lengths_due_s: float = field(init=False)
    _renew_due_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.state_file = StateFile(self.store, self.term)
        self._due_s = self.monotonic() + self.keep_s
        self._lengths_due_s = self.monotonic() + LENGTHS_SAVE_S
        self._renew_due_s = self.monotonic()

    def keep(
        self,
        state: DispatchState,
        inbox: DispatchInbox,
        admissions: FencedWriter,
        assignments: FencedWriter,
    ) -> None:
        """Persist the state if it is due; called between two rounds, where state and positions are
        of the same moment.
        1. Persist the state.
        2. Commit the positions from which a rebuild continues: the trainer truncates shared topics
           only before them.
        3. Truncate the topics that only dispatch needs: `prompts` up to the oldest needed prompt,
           `assignments` and `partials` up to the oldest ones of an open trajectory.
        """
        if self.monotonic() < self._due_s:
            return
        positions = inbox.positions()
        positions["admissions"], positions["assignments"] = (
            admissions.positions(),
            assignments.positions(),
        )
        self.state_file.keep(state_to_persist(state, self.term, positions))  # 1
        for topic in REBUILD_TOPICS:
            self.bus.commit(DISPATCH_GROUP, topic, positions[topic])  # 2
        if self.truncate:
            self._truncate(state, positions)  # 3
        self._due_s = self.monotonic() + self.keep_s

    def load_lengths(self) -> LengthHistory:
        """Returns the history; empty if missing or damaged."""
        try:
            return LengthHistory(
                decode_json(self.store.get(LENGTHS_KEY), PersistedLengths, LENGTHS_KEY)
            )
        except ObjectMissing:
            return LengthHistory()
        except CorruptObject as error:
            log.warning("the length history cannot be read and restarts empty: %s", error)
            return LengthHistory()

    def save_lengths(self, lengths: LengthHistory) -> None:
        """Writes if it changed and is due; the last writer wins."""
        if lengths.changed and self.monotonic() >= self._lengths_due_s:
            self.store.put(LENGTHS_KEY, msgspec.json.encode(lengths.known()))
            self._lengths_due_s = self.monotonic() + LENGTHS_SAVE_S

    def _truncate(
        self, state: DispatchState, positions: Mapping[str, Mapping[int, Position]]
    ) -> None:
        assignments = (a.at for a in state.assignments.values() if a.at is not None)
        partials = (chain.first for chain in state.chains.values())
        needed: dict[str, Iterable[Address]] = {
            "prompts": (),
            "assignments": assignments,
            "partials": partials,
        }
        is_renewed = self.monotonic() >= self._renew_due_s
        if is_renewed:
            self._renew_due_s = self.monotonic() + RENEW_S
        for topic, addresses in needed.items():
            if is_renewed:
                renew_truncated(self.bus, topic)
            truncate(
                self.bus, topic, move_back_to_oldest(self.bus, topic, positions[topic], addresses)
            )
