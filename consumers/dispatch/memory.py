"""When dispatch persists its state, and which records may be truncated afterwards.

1. The state is persisted. 2. The positions from which the fold continues are committed: the trainer
   truncates the topics that both read only up to them. 3. Topics that only dispatch needs are
   truncated: `prompts` up to the oldest prompt of an open group, `assignments` and `partials` up to
   the oldest assignment and the oldest partial of an open trajectory.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from rollstream.consumers.dispatch.inbox import DispatchInbox
from rollstream.consumers.dispatch.persistence import StateFile, PersistedState, state_to_persist
from rollstream.consumers.dispatch.lengths import PersistedLengths, LengthHistory
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.storage.stores.json_objects import decode_json
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.errors import CorruptObject, ObjectMissing
from rollstream.streams.values import Address
from rollstream.streams.records import Position
from rollstream.streams.truncation import DISPATCH_GROUP, REBUILD_TOPICS, move_back_to_oldest, truncate
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)

LENGTHS_KEY = "dispatch/lengths.json"
LENGTHS_SAVE_S = 60.0  # between two writes: some MB where a run has many prompts


@dataclass(slots=True)
class DispatchPersistence:
    """Persists the state of one term; with `truncate` False nothing is truncated."""

    bus: Bus
    store: ObjectStore
    term: int
    truncate: bool
    keep_s: float
    monotonic: Callable[[], float]
    _keeper: StateFile = field(init=False)
    _due_s: float = field(init=False)
    _lengths_due_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._keeper = StateFile(self.store, self.term)
        self._due_s = self.monotonic() + self.keep_s
        self._lengths_due_s = self.monotonic() + LENGTHS_SAVE_S

    def recall(self) -> PersistedState | None:
        """Take the persisted state over for this term and return it."""
        return self._keeper.take_over()

    def keep(
        self, state: DispatchState, inbox: DispatchInbox, admissions: FencedWriter, orders: FencedWriter
    ) -> None:
        """Persist the state if it is due. Between two rounds the state is the fold of all records
        read.
        """
        if self.monotonic() < self._due_s:
            return
        positions = inbox.positions()
        positions["admissions"], positions["assignments"] = (
            admissions.positions(),
            orders.positions(),
        )
        self._keeper.keep(state_to_persist(state, self.term, positions))  # 1
        for topic in REBUILD_TOPICS:
            self.bus.commit(DISPATCH_GROUP, topic, positions[topic])  # 2
        if self.truncate:
            self._forget(state, positions)  # 3
        self._due_s = self.monotonic() + self.keep_s

    def recall_lengths(self) -> LengthHistory:
        """The length history of an earlier holder; empty if there is none or it is damaged, as it
        only serves predictions.
        """
        try:
            return LengthHistory(decode_json(self.store.get(LENGTHS_KEY), PersistedLengths, LENGTHS_KEY))
        except ObjectMissing:
            return LengthHistory()
        except CorruptObject as error:
            log.warning("the length history cannot be read and restarts empty: %s", error)
            return LengthHistory()

    def keep_lengths(self, lengths: LengthHistory) -> None:
        """Write the length history if it changed and is due; the last writer wins."""
        if lengths.changed and self.monotonic() >= self._lengths_due_s:
            self.store.put(LENGTHS_KEY, msgspec.json.encode(lengths.known()))
            self._lengths_due_s = self.monotonic() + LENGTHS_SAVE_S

    def _forget(
        self, state: DispatchState, positions: Mapping[str, Mapping[int, Position]]
    ) -> None:
        orders = (order.at for order in state.orders.values() if order.at is not None)
        partials = (chain.first for chain in state.chains.values())
        needed: dict[str, Iterable[Address]] = {
            "prompts": (),
            "assignments": orders,
            "partials": partials,
        }
        for topic, addresses in needed.items():
            truncate(self.bus, topic, move_back_to_oldest(self.bus, topic, positions[topic], addresses))
