"""Reads all topics that dispatch follows, and applies their records to its `DispatchState`. Records
of attempts that were never assigned, of terms that were never taken, or with implausible values are
refused (invariant 12).
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.state import CurrentAssignment, DispatchState, VoidAssignment
from rollstream.storage.terms import RELAY_TERMS, RELAYS, ROLLOUTS, RoleTerms
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
"""Topics of other roles that a rebuild reads from stored positions; the compacted `weights` and
`status` are read from their beginning. Records of `applied` change no state: unreadable ones are
moved to `dead`, implausible ones counted.
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
"""Topics whose unreadable records dispatch appends to `dead`; for others the trainer does."""
CHECKED_TOPICS = ("partials", "status", "applied")
UNTAKEN = "this name never took this term"
PROMPTS_AHEAD = 64  # prompts kept for admission, or two waves if that is more; others stay unread
SLOTS_MAX = 1 << 16  # plausible slots, requests and size of the decode batch of one rollout
SPEED_MAX = 1e9  # plausible tokens per second of one rollout


def refused_status(status: records.RolloutStatus) -> str:
    """Returns why plans may not use the status; "" if they may."""
    counts = (status.slots, status.running, status.waiting, status.queued, status.decode_batch_max)
    if not all(0 <= count <= SLOTS_MAX for count in counts):
        return "slots or requests out of bounds"
    sizes = (status.term, status.kv_used, status.kv_capacity, status.kv_previous)
    if not all(map(is_count, (*sizes, abs(status.quota_left)))) or not is_version(status.version):
        return "a size, a term or a version out of bounds"
    return "" if 0 <= status.tokens_per_s <= SPEED_MAX else "tokens per second out of bounds"


def refused_applied(applied: records.Applied) -> str:
    numbers = (applied.rollout_term, applied.tensors, applied.compared)
    is_sound = all(map(is_count, numbers)) and is_version(applied.version)
    return "" if is_sound else "a count, a term or a version out of bounds"


def refused_partial(partial: records.Partial, assignment: CurrentAssignment | None) -> str:
    """Returns why no resume may start from the partial; "" if one may: the attempt must have been
    assigned, the newest one to its rollout.
    """
    if assignment is None or not 0 < partial.attempt <= assignment.attempt:
        return f"attempt {partial.attempt} was never assigned"
    holder = (assignment.rollout, assignment.rollout_term)
    if partial.attempt == assignment.attempt and (partial.rollout, partial.rollout_term) != holder:
        return f"attempt {partial.attempt} was not assigned to {partial.rollout}"
    return malformed_partial(partial)


@dataclass(slots=True)
class SilenceClock:
    """Measures the silence of rollouts in listening time (`now_s`): the seconds in which dispatch
    was able to read statuses. It advances only in a read that returned a record of `status`: by the
    time since the previous such read, at most by `step_s_max`, a quarter of the heartbeat time-out.
    So two failures make no living rollout silent:
    - Dispatch itself (SIGSTOP, a store or broker that hung), or the machine with all its rollouts,
      stood still for longer than the time-out: living rollouts send again before the rest has
      passed.
    - The broker was unreachable for a minute: no status was read, so the clock did not advance.

    If a rollout dies while no other one sends, it does not become silent; but then no other rollout
    could take its work.
    """

    heard_s: float
    step_s_max: float
    now_s: float = 0.0

    def advance(self, at_s: float) -> None:
        """Advances for a read that returned a status and began at `at_s` (monotonic seconds)."""
        self.now_s += max(0.0, min(at_s - self.heard_s, self.step_s_max))
        self.heard_s = at_s


STATUS_KEY_S = 600.0
"""Seconds of listening time without a record after which dispatch removes a key from `status`; at
least ten heartbeat time-outs.
"""


@dataclass(slots=True)
class StatusKeys:
    """The listening time of the last record of each key of `status` (a name and term), the longest
    silent first.

    Dispatch alone removes keys. Their writer may only have been suspended: a status appended
    between dispatch's last read and the tombstone is removed with the key, and the next one, a
    heartbeat later, adds it again.
    """

    read_s: dict[str, float] = field(default_factory=dict[str, float])
    rollouts: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])

    def note(self, key: str, now_s: float) -> None:
        self.read_s.pop(key, None)
        self.read_s[key] = now_s

    def silent(self, before_s: float) -> list[str]:
        return list(takewhile(lambda key: self.read_s[key] < before_s, self.read_s))

    def dead_rollouts(self, silent: Collection[str]) -> dict[str, int]:
        """Returns each rollout of which all keys are `silent`, with the newest of its terms."""
        alive = {name for key, (name, _) in self.rollouts.items() if key not in silent}
        silent_terms = sorted(self.rollouts[key] for key in silent if key in self.rollouts)
        return {name: term for name, term in silent_terms if name not in alive}

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            del self.read_s[key]
            self.rollouts.pop(key, None)


def _status_key(status: records.RolloutStatus | records.RelayStatus) -> str:
    name = status.relay if isinstance(status, records.RelayStatus) else status.rollout
    return f"{name}/{status.term}"


class DispatchInbox:
    """`rebuild` must be called first. `timeout_s` is the heartbeat time-out of rollouts. Without
    `terms` no term is checked.
    """

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
        self.foreign: Counter[str] = Counter()
        """Records that no process of this run writes: with values out of bounds, or of a name that
        never took the term.
        """
        self._monotonic = monotonic
        self._listening = SilenceClock(monotonic(), timeout_s / 4)
        self._status_keys = StatusKeys()
        self._status_key_s = max(STATUS_KEY_S, 10 * timeout_s)
        self.lengths = lengths or LengthHistory()
        # A wave is ranked as a whole.
        self._ahead = max(PROMPTS_AHEAD, 2 * groups_per_wave)
        self._readers: dict[str, TopicReader] = {}
        self._prompts: dict[int, tuple[records.Prompt, Address]] = {}
        self._newest_prompt: tuple[int, Address] | None = None
        self._released: list[VoidAssignment] = []

    def rebuild(
        self,
        opened: Mapping[str, Mapping[int, int]],
        stored: Mapping[str, Mapping[int, records.Position]],
    ) -> None:
        """Apply the log up to now, from the `stored` positions; dispatch's own topics up to the
        offsets `opened` of this term's `Opened`. `admissions` and `assignments` come first, so that
        a group's admission is applied before its completions.
        """
        for topic in ("admissions", "assignments"):
            upto = {partition: offset + 1 for partition, offset in opened[topic].items()}
            reader = self._open(topic, stored)
            for received in reader.read_to(upto):
                self._apply(received, fresh=False)
            # From now on only this holder writes them.
            del self._readers[topic]
        for topic in (*FOLDED_TOPICS, "weights", "status"):
            reader = self._open(topic, stored)
            for batch in reader.batches_to(self._bus.end(topic)):
                for received in batch:
                    self._apply(received, fresh=False)
        # Silence is measured from the rebuild on.
        self._listening.heard_s = self._monotonic()
        self._open("prompts", stored)
        # An earlier holder released these, or their rollouts restarted.
        self._released.clear()

    def read(self) -> tuple[int, list[VoidAssignment]]:
        """Returns the number of new records, and the assignments that became void because their
        groups ended.
        """
        count, began_s = 0, self._monotonic()
        for topic, reader in self._readers.items():
            if topic == "prompts" and len(self._prompts) >= self._ahead:
                continue
            received = reader.follow()
            if received and topic == "status":
                self._listening.advance(began_s)
            for message in received:
                self._apply(message, fresh=True)
            count += len(received)
        if self._terms is not None:
            self.foreign += self._terms.confirmed()
        released, self._released = self._released, []
        return count, released

    def read_to_end(self) -> None:
        """Apply all records that rollouts have appended by now. Listening time does not advance
        meanwhile.
        """
        # `status` last: of a rollout that is silent afterwards every record before its last status
        # was read.
        for topic in ("trajectories", "partials", "status"):
            for batch in self._readers[topic].batches_to(self._bus.end(topic)):
                for received in batch:
                    self._apply(received, fresh=True)

    def remove_silent_keys(self) -> None:
        """Remove the keys that were silent for too long, so that neither store nor topic grows with
        every rollout that ever ran: 1. retire their rollouts' names and terms; 2. append a
        tombstone for each key to `status`. After a kill in between a later dispatch refuses the
        statuses of these keys, and removes the keys after the same silence.
        """
        keys, before_s = self._status_keys, self.listening_s - self._status_key_s
        if not keys.silent(before_s):
            return
        # An unread record is not silence.
        self.read_to_end()
        if silent := keys.silent(before_s):
            if self._terms is not None:
                self._terms.retire(ROLLOUTS, keys.dead_rollouts(silent))  # 1
            self._bus.append("status", [AppendEntry(key.encode(), None) for key in silent])  # 2
            keys.remove(silent)

    @property
    def listening_s(self) -> float:
        return self._listening.now_s

    def next_prompt(self) -> tuple[records.Prompt, Address] | None:
        """Remove and return the next prompt in the seeded order, None if none was read."""
        return self._prompts.pop(min(self._prompts)) if self._prompts else None

    def ahead(self) -> Sequence[records.Prompt]:
        """Returns prompts that were read and not admitted yet, in their order."""
        return [self._prompts[group][0] for group in sorted(self._prompts)]

    @property
    def prompts_waiting(self) -> int:
        return len(self._prompts)

    def readers(self) -> list[TopicReader]:
        return list(self._readers.values())

    def positions(self) -> dict[str, dict[int, records.Position]]:
        """The positions from which a later holder's rebuild reads."""
        folded = {topic: dict(self._readers[topic].positions) for topic in FOLDED_TOPICS}
        return {**folded, "prompts": self._prompts_position()}

    def _prompts_position(self) -> dict[int, records.Position]:
        needed = [group.admitted.prompt for group in self._state.groups.values()]
        needed += [at for _, at in self._prompts.values()]
        # A restarted prompt source continues its numbers from the newest prompt.
        needed += [] if self._newest_prompt is None else [self._newest_prompt[1]]
        return move_back_to_oldest(self._bus, "prompts", self._readers["prompts"].positions, needed)

    def _open(
        self, topic: str, stored: Mapping[str, Mapping[int, records.Position]]
    ) -> TopicReader:
        begin = from_begin(self._bus, topic)
        positions = stored.get(topic) or begin
        if topic == "applied":  # it changes no state: records that were truncated are no loss
            at = dict(positions)
            positions = {p: max(first, at.get(p, first)) for p, first in begin.items()}
        dead_letters = DeadLetterWriter(self._bus, topic) if topic in DEAD_LETTERED_TOPICS else None
        reader = TopicReader(self._bus, topic, positions, dead_letters=dead_letters)
        self._readers[topic] = reader
        return reader

    def _refusal(self, topic: str, record: records.Record) -> str:
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
        self._terms.suspect(*who, label=topic)
        return UNTAKEN

    def _apply(self, received: Received, fresh: bool) -> None:
        state, record = self._state, received.record
        if isinstance(record, records.RolloutStatus | records.RelayStatus):
            self._status_keys.note(_status_key(record), self._listening.now_s)
        if reason := self._refusal(received.topic, record):
            self.refused[received.topic] += 1
            is_late = isinstance(record, records.Partial) and not malformed_partial(record)
            if reason != UNTAKEN and not is_late:
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
                    self._released += state.apply_taken(group.group, record.step)
            case records.Superseded():
                state.apply_superseded(len(record.poisoned), record.step)
            case records.GroupClosed():
                self._released += state.apply_closed(record.group)
            case records.Admitted():
                state.apply_admitted(record)
            case records.Assignment():
                state.apply_assignment(record, received.address)
            case _:
                pass  # relays' statuses, and records of other roles in the ledger

    def _complete(self, record: records.Trajectory, partition: int) -> None:
        group = self._state.groups.get(record.group)
        partitions = self._bus.partitions("trajectories")
        # The trainer does not use such a completion either.
        if not is_in_key_partition(record.group, partition, partitions):
            self._state.late += 1
            return
        generated = len(record.logprobs) if record.finish != "dead" else None
        counts = self._state.apply_completion(record.group, record.trajectory, generated)
        if counts and generated is not None and group is not None and group.prompt is not None:
            self.lengths.note(group.prompt, generated)
        self._released += self._state.end_if_full(record.group)

    def _prompt(self, prompt: records.Prompt, at: Address) -> None:
        if self._newest_prompt is None or prompt.group > self._newest_prompt[0]:
            self._newest_prompt = prompt.group, at
        group = self._state.groups.get(prompt.group)
        if group is not None:
            # A rebuild restored the group without its prompt.
            group.prompt = prompt
        elif prompt.group >= self._state.next_group:
            self._prompts[prompt.group] = (prompt, at)
