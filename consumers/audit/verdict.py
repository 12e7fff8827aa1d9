"""Stores an audit's verdict in the user's private folder, from which this user's next audit
continues. `TopicCursor` selects the records that the earlier audit did not judge for good.

It is used only by the same release, rules and settings, on the same log (docs/reference/audit.md),
and takes about 30 bytes a trajectory, compressed.
"""

import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, MutableSet, Sequence
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, cast, get_args, get_origin, get_type_hints

import msgspec
import xxhash

from rollstream.consumers.audit.folds import DERIVED, InvariantResult, Offender
from rollstream.consumers.audit.own_verdicts import keep_own, read_own
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.consumers.audit.trainer_reads import GroupRecords
from rollstream.errors import CorruptObject
from rollstream.private_state import STATE_VARIABLE, state_folder
from rollstream.storage.archive.segments import Hole
from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.streams.bus import Message
from rollstream.streams.codec import decode, encode, record_hash
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.release import RELEASE
from rollstream.streams.values import Address

VERDICT_KEY = "audit/verdict"
"""Where earlier releases kept the verdict. It is not read: it may have come with the run, and a
verdict decides what stays unchecked.
"""
RUN_KEYS = (RunKeys(re.compile(re.escape(VERDICT_KEY)), "never"),)
"""No backup has the verdict: a restored run is audited from its begin."""
FORMAT = 1
_HASH_BYTES = 32


class VerdictRefused(Exception):
    """Raised if a verdict was made from another log."""


class JudgedTopic(msgspec.Struct):
    """How far one topic was judged, by partition: `ends` has the first offset after the judged
    ones, `last` the offset and hash of the last judged record, by which the next audit recognises
    the log. `left` has the offsets that the next audit judges again: records of open groups, and
    unreadable bytes that may still prove to be a violation.
    """

    ends: dict[int, int] = {}
    last: dict[int, tuple[int, str]] = {}
    left: dict[int, list[int]] = {}
    count: int = 0
    """Number of judged messages."""
    gone: int = 0
    """Number of offsets that could not be read."""

    def end(self, partition: int) -> int:
        return self.ends.get(partition, 0)


class VerdictBasis(msgspec.Struct, frozen=True):
    """Two audits must have it in common so that one continues from the other's verdict. `rules` is
    a hash of the rules' source files and of the run's settings.
    """

    run: str
    release: str
    rules: str


class Verdict(msgspec.Struct):
    """`state` is the state of the folds without the records that `left` names. `found` are the
    violations, which every later audit reports; `former` those that an audit from the first record
    on did not find again.
    """

    basis: VerdictBasis
    topics: dict[str, JudgedTopic]
    state: bytes
    found: list[tuple[int, Offender]] = []
    former: list[tuple[int, Offender]] = []
    time_s: float = 0.0
    """End of the audit, in seconds since the epoch."""
    format: int = FORMAT


def basis_of(run: str, policy: object) -> VerdictBasis:
    """Returns the basis of an audit by this program; `policy` has the settings of the rules."""
    return VerdictBasis(run, RELEASE, content_hash(f"{_rules_hash()} {policy!r}".encode()))


@cache
def _rules_hash() -> str:
    # The audit applies the trainer's rules too.
    own, consumers = Path(__file__).parent, Path(__file__).parents[1]
    digest = xxhash.xxh3_128()
    trained = [*(consumers / "trainer" / "data").glob("*.py"), consumers / "credit.py"]
    for path in sorted([*own.glob("*.py"), *trained]):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_verdict(run: str, place: str) -> Verdict | None:
    """Returns the verdict of this user's last audit of the run at this place; None without one.
    Raises `CorruptObject` if it is damaged or has a newer format.
    """
    data = read_own(run, place)
    if data is None:
        return None
    body = data[_HASH_BYTES:]
    if content_hash(body).encode() != data[:_HASH_BYTES]:
        raise CorruptObject("the last audit's verdict differs from the hash in it")
    try:
        verdict = msgspec.msgpack.decode(zlib.decompress(body), type=Verdict)
    except (zlib.error, msgspec.DecodeError) as error:
        raise CorruptObject(f"the last audit's verdict cannot be read: {error}") from error
    if verdict.format > FORMAT:
        raise CorruptObject(f"the last audit's verdict has the newer format {verdict.format}")
    return verdict


def write_verdict(verdict: Verdict, place: str) -> str:
    """Replace the last verdict of the run at this place. Returns "", or why the next audit cannot
    use it.
    """
    body = zlib.compress(msgspec.msgpack.encode(verdict), 1)
    if keep_own(verdict.basis.run, place, content_hash(body).encode() + body):
        return ""
    return f"{state_folder()} cannot be written ({STATE_VARIABLE} names another folder)"


class TopicCursor:
    """Selects the messages of a topic that one audit judges: those after the ends in `before` and
    those that `before` left.

    The last judged message of each partition is read again. `VerdictRefused` if its hash differs,
    or if it is missing although it was neither truncated nor compacted (`is_compacted`).
    """

    def __init__(self, before: JudgedTopic, is_compacted: bool) -> None:
        self._before, self._ends = before, dict(before.ends)
        self._again = {p: set(offsets) for p, offsets in before.left.items()}
        # Partitions whose last judged message was found again.
        self._proven = set[int]()
        self._excused = set(before.last) if is_compacted else set[int]()  # where it may be gone
        self._newest: dict[int, tuple[int, bytes | str | None]] = {}
        self.left: dict[int, list[int]] = {}
        self.count, self.gone = before.count, before.gone

    def start(self, partition: int) -> int:
        # The last judged message is read again to compare its hash.
        last, _ = self._before.last.get(partition, (self._before.end(partition), ""))
        return min([last, *self._before.left.get(partition, ())])

    def is_due(self, message: Message) -> bool:
        """Whether the message is to be judged, now or again. Raises `VerdictRefused`."""
        partition, offset = message.partition, message.offset
        if offset >= self._before.end(partition):
            self._newest[partition] = offset, message.value
            self._ends[partition] = offset + 1
            self.count += 1
            return True
        self._compare(partition, offset, lambda: _hash_of(message.value))
        return offset in self._again.get(partition, ())

    def is_first_time(self, message: Message) -> bool:
        return message.offset >= self._before.end(message.partition)

    def split(self, rows: TrajectoryRows) -> tuple[list[int], TrajectoryRows | None]:
        """Returns the indices of the rows to be judged again, and the new rows, None if there are
        none. Raises `VerdictRefused`.
        """
        end, offsets = self._before.end(rows.partition), self._again.get(rows.partition, set[int]())
        old = max(0, min(len(rows), end - rows.first))
        for index in range(old):
            self._compare(rows.partition, rows.first + index, lambda i=index: rows.hashes[i])
        due = [index for index in range(old) if rows.first + index in offsets] if offsets else []
        if old == len(rows):
            return due, None
        self._newest[rows.partition] = rows.first + len(rows) - 1, rows.hashes[-1]
        self._ends[rows.partition] = rows.first + len(rows)
        self.count += len(rows) - old
        return due, rows.since(old)

    def is_new(self, hole: Hole) -> bool:
        """Count the offsets of a hole. Returns whether it is to be judged: it reaches beyond the
        judged end, or is empty and reports another defect.
        """
        end, partition = self._before.end(hole.partition), hole.partition
        last, _ = self._before.last.get(partition, (-1, ""))
        self._ends[partition] = max(hole.end, self._ends.get(partition, 0))
        offsets = self._again.get(partition, ())
        self.gone += max(0, hole.end - max(hole.start, end))
        self.gone += sum(hole.start <= offset < min(hole.end, end) for offset in offsets)
        if hole.start <= last < hole.end:
            self._excused.add(partition)
        return hole.end > end or hole.start == hole.end

    def leave(self, at: Address) -> None:
        self.left.setdefault(at.partition, []).append(at.offset)

    def judged(self, *, must_prove: bool) -> JudgedTopic:
        """Returns how far the topic is judged now. Raises `VerdictRefused` if the last judged
        record of a partition is missing and not excused by truncation or compaction; `must_prove`
        excuses none.
        """
        if self._before.last.keys() - self._proven - (set() if must_prove else self._excused):
            raise VerdictRefused
        newest = {
            partition: (offset, value if isinstance(value, str) else _hash_of(value))
            for partition, (offset, value) in self._newest.items()
        }
        return JudgedTopic(self._ends, self._before.last | newest, self.left, self.count, self.gone)

    def _compare(self, partition: int, offset: int, read_hash: Callable[[], str]) -> None:
        at, expected_hash = self._before.last.get(partition, (-1, ""))
        if offset == at:
            if read_hash() != expected_hash:
                raise VerdictRefused
            self._proven.add(partition)


def _hash_of(value: bytes | None) -> str:
    return "" if value is None else record_hash(value)


class _HeldGroup(msgspec.Struct):
    """A `GroupRecords` with its records as bytes."""

    names: tuple[str, ...]
    arrived: dict[str, tuple[bytes, Address]]
    noted: dict[tuple[str, str], tuple[bytes, Address]]
    needed: int = 0


_HELD = dict[int, GroupRecords]


def encode_state(folds: Sequence[object]) -> bytes | None:
    """Encode the state of the folds, which are dataclasses, as MessagePack typed by their fields'
    annotations. Returns None if a (hostile) record holds a number beyond 64 bits.
    """
    fold_ids = {id(fold) for fold in folds}
    try:
        parts = [
            {
                name: msgspec.msgpack.encode(_packed(value) if hint == _HELD else value)
                for name, hint, value in _state_fields(fold)
                # That fold is encoded on its own.
                if id(value) not in fold_ids
            }
            for fold in folds
        ]
    except OverflowError:
        return None
    return msgspec.msgpack.encode(parts)


def restore_state(folds: Sequence[object], state: bytes) -> None:
    """Fill the same folds, in the same order, from `state`; inverse of `encode_state`."""
    parts = msgspec.msgpack.decode(state, type=list[dict[str, bytes]])
    for fold, part in zip(folds, parts, strict=True):
        for name, hint, present in _state_fields(fold):
            if name in part:
                _fill(fold, name, present, _decoded(part[name], hint))


def _state_fields(fold: object) -> Iterator[tuple[str, Any, object]]:
    hints = get_type_hints(type(fold))
    for field in fields(cast(Any, fold)):
        # A field without a default refers to an object that other folds use too.
        is_state = field.default is not MISSING or field.default_factory is not MISSING
        if is_state and not field.metadata.get(DERIVED):
            yield field.name, hints[field.name], getattr(fold, field.name)


def _decoded(data: bytes, hint: Any) -> object:
    if hint == _HELD:
        groups = msgspec.msgpack.decode(data, type=dict[int, _HeldGroup])
        return {group: _unpacked(records) for group, records in groups.items()}
    if get_origin(hint) is Counter:
        hint = dict[get_args(hint)[0], int]
    return msgspec.msgpack.decode(data, type=hint)


def _fill(fold: object, name: str, present: object, value: object) -> None:
    # Containers are filled in place, because folds share some of them.
    if isinstance(present, MutableMapping | MutableSet):
        container = cast(Any, present)
        container.clear()
        container |= cast(Any, value)
    elif isinstance(present, list):
        present[:] = cast(list[Any], value)
    else:
        setattr(fold, name, value)


def _packed(value: object) -> dict[int, _HeldGroup]:
    groups = cast(dict[int, GroupRecords], value)
    return {
        group: _HeldGroup(
            records.names,
            {name: (encode(record), at) for name, (record, at) in records.arrived.items()},
            {key: (encode(note), at) for key, (note, at) in records.noted.items()},
            records.needed,
        )
        for group, records in groups.items()
        # The next audit selects groups without a record again.
        if records.arrived or records.noted
    }


def _unpacked(packed: _HeldGroup) -> GroupRecords:
    arrived = {n: (cast(Trajectory, decode(d).record), at) for n, (d, at) in packed.arrived.items()}
    notes = {k: (cast(Annotation, decode(d).record), at) for k, (d, at) in packed.noted.items()}
    return GroupRecords(packed.names, arrived, notes, packed.needed)


def findings_of(results: Sequence[InvariantResult]) -> list[tuple[int, Offender]]:
    """Returns the violations whose places are known (the first few of each invariant), with the
    invariant's number.
    """
    return [(result.number, offender) for result in results for offender in result.offenders]
