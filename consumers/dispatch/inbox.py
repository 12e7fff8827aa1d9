"""The inbox keeps dispatch's state consistent between any two reads: it orders the readers of all
topics and refuses implausible records.

A rebuild reads `admissions` before `trajectories` before `ledger`, so no completion or closing is
read before the admission that it belongs to; afterwards only this holder admits groups. Records of
topics with many writers are applied only if they are plausible and the rollout that they name has
taken their term (invariant 12).
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState, VoidAssignment
from rollstream.storage.relay.topology import RELAY_TERMS
from rollstream.storage.terms import RELAYS, ROLLOUTS, RoleTerms
from rollstream.streams import records
from rollstream.streams.admissible import is_count, is_version, malformed_partial
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.fence import move_back_to_oldest
from rollstream.streams.reader import Received, TopicReader, from_begin
from rollstream.streams.topics import is_in_key_partition
from rollstream.streams.values import Address

log = logging.getLogger(__name__)

FOLDED_TOPICS = ("trajectories", "ledger", "partials", "applied")
"""Topics of other roles that dispatch folds from stored positions (of `applied` only the unreadable
records matter). Compacted topics are read from their beginning.
"""
DEAD_LETTERED_TOPICS = (
    "prompts",
    "assignments",
    "partials",
    "status",
    "weights",
    "applied",
    "ledger",
)
"""Topics whose unreadable bytes dispatch appends to `dead`."""
CHECKED_TOPICS = ("partials", "status", "applied")
"""Topics whose readable records dispatch may refuse to act on."""
PROMPTS_AHEAD = 64  # groups read before they can be admitted, at least; more stay in the topic
SLOTS_MAX = 1 << 16  # of one rollout: slots, requests and the decode batch
SPEED_MAX = 1e9  # tokens per second


def refused_status(status: records.RolloutStatus) -> str:
    """The reason why no plan may use the status; "" if it may be used."""
    counts = (status.slots, status.running, status.waiting, status.queued, status.decode_batch_max)
    if not all(0 <= count <= SLOTS_MAX for count in counts):
        return "slots or requests out of bounds"
    sizes = (status.term, status.kv_used, status.kv_capacity, status.kv_previous)
    if not all(map(is_count, (*sizes, abs(status.quota_left)))) or not is_version(status.version):
        return "a size, a term or a version out of bounds"
    return "" if 0 <= status.tokens_per_s <= SPEED_MAX else "tokens per second out of bounds"


def refused_applied(applied: records.Applied) -> str:
    """The reason why the record is not plausible; "" if it is."""
    numbers = (applied.rollout_term, applied.tensors, applied.compared)
    is_sound = all(map(is_count, numbers)) and is_version(applied.version)
    return "" if is_sound else "a count, a term or a version out of bounds"


def refused_partial(partial: records.Partial, assignment: CurrentAssignment | None) -> str:
    """The reason why no resume may start from the partial; "" if one may. Its attempt must have
    been assigned, the newest one to this rollout and term.
    """
    if assignment is None or not 0 < partial.attempt <= assignment.attempt:
        return f"attempt {partial.attempt} was never assigned"
    holder = (assignment.rollout, assignment.rollout_term)
    if partial.attempt == assignment.attempt and (partial.rollout, partial.rollout_term) != holder:
        return f"attempt {partial.attempt} was not assigned to {partial.rollout}"
    return malformed_partial(partial)


@dataclass(slots=True)
class SilenceClock:
    """Listening time, by which dispatch measures the silence of rollouts: `now_s`, in seconds. One
    read adds at most `step_s_max` seconds.

    A rollout is silent when records of other rollouts were read for the heartbeat's time-out since
    its own last status. So the clock advances only in a read that returned something from `status`,
    by the time since the previous such read, and by a quarter of the time-out at most. Two failures
    that this handles:

    - Dispatch itself stood still (SIGSTOP, a store or broker that hung) for 12 s, or the machine
      with all its rollouts did: its first read counts for a quarter of the time-out, in which
      living rollouts send again.
    - The broker was unreachable for a minute: no status could be read, so no rollout became silent.

    A single rollout that died stays known while no other rollout sends; no other one could take its
    work.
    """

    heard_s: float
    step_s_max: float
    now_s: float = 0.0

    def advance(self, at_s: float) -> None:
        """Advance for a read of a status that started `at_s` on dispatch's monotonic clock."""
        self.now_s += max(0.0, min(at_s - self.heard_s, self.step_s_max))
        self.heard_s = at_s


STATUS_KEY_S = 600.0
"""Listening time without a record after which dispatch removes a key from `status`."""


@dataclass(slots=True)
class StatusKeys:
    """When each key of `status` was last read, the longest silent first. One entry per key that the
    compacted topic keeps.

    Dispatch alone removes keys, and only those of rollouts and relays that were silent for
    `STATUS_KEY_S`. A status that its writer appends between dispatch's last read and the tombstone
    is removed with the key; the next one, a heartbeat later, brings the key back. So a writer that
    lives on after so long a pause is missed for one heartbeat, by a reader that starts just then.
    """

    read_s: dict[str, float] = field(default_factory=dict[str, float])
    rollouts: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Name and term of the keys that are rollouts'."""

    def note(self, key: str, now_s: float) -> None:
        """Record that the key's newest record was read now, in listening time."""
        self.read_s.pop(key, None)
        self.read_s[key] = now_s

    def silent(self, before_s: float) -> list[str]:
        """The keys without a record since `before_s`."""
        return list(takewhile(lambda key: self.read_s[key] < before_s, self.read_s))

    def dead_rollouts(self, silent: Collection[str]) -> dict[str, int]:
        """Each rollout of which all keys are `silent`, with the newest of its terms."""
        alive = {name for key, (name, _) in self.rollouts.items() if key not in silent}
        found = sorted(self.rollouts[key] for key in silent if key in self.rollouts)
        return {name: term for name, term in found if name not in alive}

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self.read_s[key]
            self.rollouts.pop(key, None)


def _status_key(status: records.RolloutStatus | records.RelayStatus) -> str:
    name = status.relay if isinstance(status, records.RelayStatus) else status.rollout
    return f"{name}/{status.term}"


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
        terms: RoleTerms | None = None,
    ) -> None:
        self._bus = bus
        self._state = state
        self._terms = terms
        self.refused: Counter[str] = Counter()
        """Records of many writers that dispatch did not act on, by topic."""
        self.foreign: Counter[str] = Counter()
        """Those among them that no program of this run writes: out of bounds, or of a name or term
        that was never taken. Others are normal, such as partials of an ended trajectory.
        """
        self._monotonic = monotonic
        self._listening = SilenceClock(monotonic(), timeout_s / 4)
        self._status_keys = StatusKeys()
        self._status_key_s = max(STATUS_KEY_S, 10 * timeout_s)
        self.lengths = lengths or LengthHistory()
        self._ahead = max(PROMPTS_AHEAD, 2 * groups_per_wave)  # a wave is ranked as a whole
        self._readers: dict[str, TopicReader] = {}
        self._prompts: dict[int, tuple[records.Prompt, Address]] = {}
        self._newest_prompt: tuple[int, Address] | None = None
        self._released: list[VoidAssignment] = []

    def rebuild(
        self,
        own: Mapping[str, Mapping[int, int]],
        kept: Mapping[str, Mapping[int, records.Position]],
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
                self._listening.advance(began_s)
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

    def remove_silent_keys(self) -> None:
        """1. Retire the names, and 2. append a tombstone to `status`, of each key that was silent
        for too long, so that neither store nor topic grows with every rollout that ever ran. After
        a kill between 1 and 2 a later dispatch refuses the statuses of these keys and removes them.
        """
        keys, before_s = self._status_keys, self.listening_s - self._status_key_s
        if not keys.silent(before_s):
            return
        self.read_to_end()  # an unread record is not silence
        if silent := keys.silent(before_s):
            if self._terms is not None:
                self._terms.retire(ROLLOUTS, keys.dead_rollouts(silent))  # 1
            self._bus.append("status", [AppendEntry(key.encode(), None) for key in silent])  # 2
            keys.remove(silent)

    @property
    def listening_s(self) -> float:
        """Listening time in seconds, see `SilenceClock`; statuses are stamped with it."""
        return self._listening.now_s

    def next_prompt(self) -> tuple[records.Prompt, Address] | None:
        """Remove and return the next prompt in the seeded order, None if none was read. In a fork
        the topic omits the prompts that the parent finished.
        """
        return self._prompts.pop(min(self._prompts)) if self._prompts else None

    def ahead(self) -> Sequence[records.Prompt]:
        """Prompts that were read and not admitted yet, in their order."""
        return [self._prompts[group][0] for group in sorted(self._prompts)]

    @property
    def prompts_waiting(self) -> int:
        """Prompts that were read and not admitted yet."""
        return len(self._prompts)

    def readers(self) -> list[TopicReader]:
        return list(self._readers.values())

    def positions(self) -> dict[str, dict[int, records.Position]]:
        """Positions from which a later holder continues the fold, without dispatch's own topics. In
        `prompts` they precede the prompts of open groups, to read these again, and the newest
        prompt, from which a restarted prompt source continues its numbers.
        """
        folded = {topic: dict(self._readers[topic].positions) for topic in FOLDED_TOPICS}
        return {**folded, "prompts": self._prompts_position()}

    def _prompts_position(self) -> dict[int, records.Position]:
        needed = [group.admitted.prompt for group in self._state.groups.values()]
        needed += [at for _, at in self._prompts.values()]
        needed += [] if self._newest_prompt is None else [self._newest_prompt[1]]
        return move_back_to_oldest(self._bus, "prompts", self._readers["prompts"].positions, needed)

    def _open(self, topic: str, kept: Mapping[str, Mapping[int, records.Position]]) -> TopicReader:
        begin = from_begin(self._bus, topic)
        positions = kept.get(topic) or begin
        if topic == "applied":  # not folded: records that an older trainer truncated are no loss
            at = dict(positions)
            positions = {p: max(first, at.get(p, first)) for p, first in begin.items()}
        dead_letters = DeadLetterWriter(self._bus, topic) if topic in DEAD_LETTERED_TOPICS else None
        reader = TopicReader(self._bus, topic, positions, dead_letters=dead_letters)
        self._readers[topic] = reader
        return reader

    def _refusal(self, record: records.Record) -> str:
        """The reason why dispatch does not act on a record of a topic with many writers; "" when it
        does.
        """
        match record:
            case records.Partial():
                return refused_partial(record, self._state.assignments.get(record.trajectory))
            case records.RolloutStatus():
                who, reason = (ROLLOUTS, record.rollout, record.term), refused_status(record)
            case records.RelayStatus():  # all relays count their terms under one name
                who, reason = (RELAYS, RELAY_TERMS, record.term), ""
            case records.Applied():
                who = (ROLLOUTS, record.rollout, record.rollout_term)
                reason = refused_applied(record)
            case _:
                return ""
        if reason or self._terms is None or self._terms.has_taken(*who):
            return reason
        return "this name never took this term"

    def _apply(self, received: Received, fresh: bool) -> None:
        state, record = self._state, received.record
        if isinstance(record, records.RolloutStatus | records.RelayStatus):
            self._status_keys.note(_status_key(record), self._listening.now_s)
        if reason := self._refusal(record):
            self.refused[received.topic] += 1
            if not isinstance(record, records.Partial) or malformed_partial(record):
                self.foreign[received.topic] += 1
            log.debug("%s %s: %s", received.topic, received.address, reason)
            return
        match record:
            case records.Prompt():
                self._prompt(record, received.address)
            case records.Trajectory():
                self._complete(record, received.address.partition)
            case records.Partial():
                state.apply_partial(record, received.address)
            case records.RolloutStatus():
                self._status_keys.rollouts[_status_key(record)] = record.rollout, record.term
                state.apply_status(record, self._listening.now_s, fresh)
            case records.WeightsAnnounced():
                state.version = max(state.version, record.version)
            case records.Take():
                for group in record.groups:
                    self._released += state.apply_taken(group.group)
            case records.Superseded():
                state.apply_superseded(len(record.poisoned))
            case records.GroupClosed():
                self._released += state.apply_closed(record.group)
            case records.Admitted():
                state.apply_admitted(record)
            case records.Assignment():
                state.apply_assignment(record, received.address)
            case _:
                pass  # relays' statuses, and records of other roles in the ledger

    def _complete(self, record: records.Trajectory, partition: int) -> None:
        """Apply a completion, and record its length for predictions unless it is dead. A completion
        outside its group's partition is late, as for the trainer.
        """
        group = self._state.groups.get(record.group)
        partitions = self._bus.partitions("trajectories")
        if not is_in_key_partition(record.group, partition, partitions):
            self._state.late += 1
            return
        generated = len(record.logprobs) if record.finish != "dead" else None
        counts = self._state.apply_completion(record.group, record.trajectory, generated)
        if counts and generated is not None and group is not None and group.prompt is not None:
            self.lengths.note(group.prompt, generated)

    def _prompt(self, prompt: records.Prompt, at: Address) -> None:
        """Keep the prompt for admission, or attach it to an open group that a rebuild found."""
        if self._newest_prompt is None or prompt.group > self._newest_prompt[0]:
            self._newest_prompt = prompt.group, at
        group = self._state.groups.get(prompt.group)
        if group is not None:
            group.prompt = prompt
        elif prompt.group >= self._state.next_group:
            self._prompts[prompt.group] = (prompt, at)
