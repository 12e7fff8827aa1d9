"""The readers of dispatch and the order in which they read, so that the state is consistent between
any two reads.

A rebuild reads `admissions` before `trajectories` before `ledger`, so no completion or closing is
read before the admission that it belongs to; afterwards only this holder admits groups.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.listening import SilenceClock
from rollstream.consumers.dispatch.plausible import RELAYS, ROLLOUTS, accept_any_term, refused_applied, refused_partial, refused_status
from rollstream.consumers.dispatch.state import DispatchState, VoidAssignment
from rollstream.storage.relay.chain import RELAY_TERMS
from rollstream.streams.bus import Bus
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.values import Address
from rollstream.streams.records import Admitted, Applied, Assignment, GroupClosed, Partial, Position, Prompt, Record, RelayStatus, RolloutStatus, Superseded, Take, Trajectory, WeightsAnnounced
from rollstream.streams.topics import is_in_key_partition
from rollstream.streams.truncation import move_back_to_oldest

log = logging.getLogger(__name__)

FOLDED_TOPICS = ("trajectories", "ledger", "partials", "applied")
"""Topics of other roles that dispatch folds from stored positions (of `applied` only the unreadable
records matter). Compacted topics are read from their beginning.
"""
DEAD_LETTERED_TOPICS = ("prompts", "assignments", "partials", "status", "weights", "applied", "ledger")
"""Topics whose unreadable bytes dispatch appends to `<topic>.dead`."""
CHECKED_TOPICS = ("partials", "status", "applied")
"""Topics whose readable records dispatch may refuse to act on."""
PROMPTS_AHEAD = 64  # groups read before they can be admitted, at least; more stay in the topic


class DispatchInbox:
    """Readers of every topic that dispatch follows, and the prompts read ahead."""

    def __init__(
        self,
        bus: Bus,
        state: DispatchState,
        monotonic: Callable[[], float],
        lengths: LengthHistory | None = None,
        groups_per_wave: int = 1,
        timeout_s: float = 10.0,
        has_taken: Callable[[str, str, int], bool] = accept_any_term,
    ) -> None:
        self._bus = bus
        self._state = state
        self._has_taken = has_taken
        self.refused: Counter[str] = Counter()
        """Records of many writers that dispatch did not act on, by topic."""
        self._monotonic = monotonic
        self._listening = SilenceClock(monotonic(), timeout_s / 4)
        self.lengths = lengths or LengthHistory()
        self._ahead = max(PROMPTS_AHEAD, 2 * groups_per_wave)  # a wave is ranked as a whole
        self._readers: dict[str, TopicReader] = {}
        self._prompts: dict[int, tuple[Prompt, Address]] = {}
        self._released: list[VoidAssignment] = []

    def rebuild(
        self,
        own: Mapping[str, Mapping[int, int]],
        kept: Mapping[str, Mapping[int, Position]],
    ) -> None:
        """Fold the log up to now, from the positions in `kept`; `own` holds the offsets of this
        term's `Opened` in dispatch's own topics.
        """
        for topic in ("admissions", "assignments"):
            upto = {partition: offset + 1 for partition, offset in own[topic].items()}
            reader = self._open(topic, kept)
            for received in reader.read_to(upto):
                self._apply(received, fresh=False)
            del self._readers[topic]  # from now on only this holder writes them
        for topic in (*FOLDED_TOPICS, "weights", "status"):
            reader = self._open(topic, kept)
            for batch in reader.batches_to(self._bus.end(topic)):
                for received in batch:
                    self._apply(received, fresh=False)
        self._listening.heard_s = self._monotonic()  # silence is measured from the rebuild on
        self._open("prompts", kept)
        self._released.clear()  # their rollouts were sent releases, or hold an older term

    def read(self) -> tuple[int, list[VoidAssignment]]:
        """Apply the new records; returns their number and the assignments that became void because
        their groups ended.
        """
        count, began_s = 0, self._monotonic()
        for topic, reader in self._readers.items():
            if topic == "prompts" and len(self._prompts) >= self._ahead:
                continue
            received = reader.follow()
            if received and topic == "status":
                self._listening.heard(began_s)
            for one in received:
                self._apply(one, fresh=True)
            count += len(received)
        released, self._released = self._released, []
        return count, released

    def read_to_end(self) -> None:
        """Apply all that rollouts have published by now. `status` comes last, so a rollout that is
        silent afterwards has nothing unread before its last status. Listening time stands still
        meanwhile.
        """
        for topic in ("trajectories", "partials", "status"):
            for batch in self._readers[topic].batches_to(self._bus.end(topic)):
                for received in batch:
                    self._apply(received, fresh=True)

    @property
    def listened_s(self) -> float:
        """Listening time in seconds, see `SilenceClock`; statuses are stamped with it."""
        return self._listening.now_s

    def next_prompt(self) -> tuple[Prompt, Address] | None:
        """Remove and return the next prompt in the seeded order, None if none was read. In a fork
        the topic omits the prompts that the parent finished.
        """
        return self._prompts.pop(min(self._prompts)) if self._prompts else None

    def ahead(self) -> Sequence[Prompt]:
        """Prompts that were read and not admitted yet, in their order."""
        return [self._prompts[group][0] for group in sorted(self._prompts)]

    @property
    def prompts_waiting(self) -> int:
        """Prompts that were read and not admitted yet."""
        return len(self._prompts)

    def readers(self) -> list[TopicReader]:
        return list(self._readers.values())

    def positions(self) -> dict[str, dict[int, Position]]:
        """Positions from which a later holder continues the fold, without dispatch's own topics; of
        `prompts` those of open groups are read again.
        """
        folded = {topic: dict(self._readers[topic].positions) for topic in FOLDED_TOPICS}
        return {**folded, "prompts": self._prompts_position()}

    def _prompts_position(self) -> dict[int, Position]:
        needed = [group.admitted.prompt for group in self._state.groups.values()]
        needed += [at for _, at in self._prompts.values()]
        return move_back_to_oldest(self._bus, "prompts", self._readers["prompts"].positions, needed)

    def _open(self, topic: str, kept: Mapping[str, Mapping[int, Position]]) -> TopicReader:
        begin = from_begin(self._bus, topic)
        positions = kept.get(topic) or begin
        if topic == "applied":  # not folded: records that an older trainer truncated are no loss
            at = dict(positions)
            positions = {p: max(first, at.get(p, first)) for p, first in begin.items()}
        dead_letters = DeadLetterWriter(self._bus, topic) if topic in DEAD_LETTERED_TOPICS else None
        reader = TopicReader(self._bus, topic, positions, dead_letters=dead_letters)
        self._readers[topic] = reader
        return reader

    def _refusal(self, record: Record) -> str:
        """The reason why dispatch does not act on a record of a topic with many writers; "" when it
        does.
        """
        match record:
            case Partial():
                return refused_partial(record, self._state.orders.get(record.trajectory))
            case RolloutStatus():
                who, reason = (ROLLOUTS, record.rollout, record.term), refused_status(record)
            case RelayStatus():  # all relays count their terms under one name
                who, reason = (RELAYS, RELAY_TERMS, record.term), ""
            case Applied():
                who = (ROLLOUTS, record.rollout, record.rollout_term)
                reason = refused_applied(record)
            case _:
                return ""
        return reason or ("" if self._has_taken(*who) else "this name never took this term")

    def _apply(self, received: Received, fresh: bool) -> None:
        state, record = self._state, received.record
        if reason := self._refusal(record):
            self.refused[received.topic] += 1
            log.debug("%s %s: %s", received.topic, received.address, reason)
            return
        match record:
            case Prompt():
                self._prompt(record, received.address)
            case Trajectory():
                self._complete(record, received.address.partition)
            case Partial():
                state.apply_partial(record, received.address)
            case RolloutStatus():
                state.apply_status(record, self._listening.now_s, fresh)
            case WeightsAnnounced():
                state.version = max(state.version, record.version)
            case Take():
                for group in record.groups:
                    self._released += state.apply_taken(group.group)
            case Superseded():
                state.apply_superseded(len(record.poisoned))
            case GroupClosed():
                self._released += state.apply_closed(record.group)
            case Admitted():
                state.apply_admitted(record)
            case Assignment():
                state.apply_assignment(record, received.address)
            case _:
                pass  # records of other roles in the ledger and relays' status

    def _complete(self, record: Trajectory, partition: int) -> None:
        """Record a completion, and the length of a living one for later predictions. A completion
        outside its group's partition is late, as for the trainer.
        """
        group = self._state.groups.get(record.group)
        partitions = self._bus.partitions("trajectories")
        if not is_in_key_partition(record.group, partition, partitions):
            self._state.late += 1
            return
        lived = len(record.logprobs) if record.finish != "dead" else None
        counts = self._state.apply_completion(record.group, record.trajectory, lived)
        if counts and lived is not None and group is not None and group.prompt is not None:
            self.lengths.note(group.prompt, lived)

    def _prompt(self, prompt: Prompt, at: Address) -> None:
        """Keep the prompt for admission, or attach it to an open group that a rebuild found."""
        group = self._state.groups.get(prompt.group)
        if group is not None:
            group.prompt = prompt
        elif prompt.group >= self._state.next_group:
            self._prompts[prompt.group] = (prompt, at)
