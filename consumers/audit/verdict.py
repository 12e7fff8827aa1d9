"""Stores the verdict of an audit as one object of the run's store: how far each topic was judged,
the state of the folds there, and the violations found. The next audit continues from it.

A record is judged once its outcome is final. Records of open groups, and bytes about which nothing
can be decided yet, are judged for the report only: their offsets are kept, and the next audit reads
them again. So the state is the one that the rules would have if those records were still to come.

A verdict is used only by the same release, rules and settings, and only on the log that it rests
on: no partition may be shorter, and the last record that was judged in each must have the same hash
(one that was truncated since proves nothing, but the ledger's must be there). Violations are kept
with the verdict and reported by every later audit.

The state is the fields of the folds as MessagePack, typed by their annotations. It grows with the
run as the folds do: about 30 bytes for each trajectory, compressed (docs/reference/audit.md).
"""

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
from rollstream.consumers.audit.source import TrajectoryRows
from rollstream.consumers.audit.trainer_reads import GroupRecords
from rollstream.errors import CorruptObject, ObjectMissing, StoreError
from rollstream.storage.archive.segments import Hole
from rollstream.storage.stores.base import ObjectStore, content_hash
from rollstream.streams.bus import Message
from rollstream.streams.codec import decode, encode, record_hash
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.release import RELEASE
from rollstream.streams.values import Address

VERDICT_KEY = "audit/verdict"
FORMAT = 1
_HASH_BYTES = 32


class VerdictRefused(Exception):
    """The verdict does not rest on this log: the audit starts at the first record."""


class JudgedTopic(msgspec.Struct):
    """States how far one topic was judged. By partition, `ends` is the first offset that was not
    judged, `last` the offset and hash of the last judged record, and `left` the offsets to be
    judged again.
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
    """Names the facts that two audits must have in common: `rules` is a hash of the rules and of
    the settings.
    """

    run: str
    release: str
    rules: str


class Verdict(msgspec.Struct):
    """Holds all that the next audit needs (see the module). `former` are findings of earlier audits
    that a later one, which started at the first record, did not find again.
    """

    basis: VerdictBasis
    topics: dict[str, JudgedTopic]
    state: bytes
    found: list[tuple[int, Offender]] = []
    former: list[tuple[int, Offender]] = []
    format: int = FORMAT


def basis_of(run: str, policy: object) -> VerdictBasis:
    """Returns the basis of an audit by this program."""
    return VerdictBasis(run, RELEASE, content_hash(f"{_rules_hash()} {policy!r}".encode()))


@cache
def _rules_hash() -> str:
    """Returns the hash of the sources of the audit and of the trainer's rules that it applies."""
    folders = Path(__file__).parent, Path(__file__).parents[1] / "trainer" / "data"
    found = xxhash.xxh3_128()
    for path in sorted(path for folder in folders for path in folder.glob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


def read_verdict(store: ObjectStore) -> Verdict | None:
    """Returns the last verdict; None if there is none. Raises `CorruptObject` if it cannot be read,
    also if its format is newer.
    """
    try:
        data = store.get(VERDICT_KEY)
    except ObjectMissing:
        return None
    body = data[_HASH_BYTES:]
    try:
        if content_hash(body).encode() != data[:_HASH_BYTES]:
            raise CorruptObject(f"object {VERDICT_KEY} differs from the hash in it")
        found = msgspec.msgpack.decode(zlib.decompress(body), type=Verdict)
    except (msgspec.DecodeError, zlib.error) as error:
        raise CorruptObject(f"object {VERDICT_KEY} is no verdict: {error}") from error
    if found.format > FORMAT:
        raise CorruptObject(f"object {VERDICT_KEY} has the newer format {found.format}")
    return found


def write_verdict(store: ObjectStore, verdict: Verdict) -> str:
    """Replace the last verdict; returns why it could not be stored, "" if it was."""
    body = zlib.compress(msgspec.msgpack.encode(verdict), 1)
    try:
        store.put(VERDICT_KEY, content_hash(body).encode() + body)
    except StoreError as error:
        return str(error)
    return ""


class TopicCursor:
    """Selects the messages of a topic that `before` does not cover, and records the judged ends."""

    def __init__(self, before: JudgedTopic, is_compacted: bool) -> None:
        self._before, self._ends = before, dict(before.ends)
        self._again = {p: set(offsets) for p, offsets in before.left.items()}
        self._proven = set[int]()
        self._excused = set(before.last) if is_compacted else set[int]()
        self._newest: dict[int, tuple[int, bytes | str | None]] = {}
        self.left: dict[int, list[int]] = {}
        self.count, self.gone = before.count, before.gone

    def start(self, partition: int) -> int:
        """Returns the first offset to read: the last one that was judged, to compare its hash."""
        last, _ = self._before.last.get(partition, (self._before.end(partition), ""))
        return min([last, *self._before.left.get(partition, ())])

    def is_due(self, message: Message) -> bool:
        """Whether the message is to be judged. Raises `VerdictRefused` if the verdict rests on
        another message of this offset.
        """
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
        """Returns the indices of rows to be judged again, and the new rows."""
        end, again = self._before.end(rows.partition), self._again.get(rows.partition, set[int]())
        old = max(0, min(len(rows), end - rows.first))
        for index in range(old):
            self._compare(rows.partition, rows.first + index, lambda i=index: rows.hashes[i])
        found = [index for index in range(old) if rows.first + index in again] if again else []
        if old == len(rows):
            return found, None
        self._newest[rows.partition] = rows.first + len(rows) - 1, rows.hashes[-1]
        self._ends[rows.partition] = rows.first + len(rows)
        self.count += len(rows) - old
        return found, rows.since(old)

    def is_new(self, hole: Hole) -> bool:
        """Whether the hole reaches beyond what was judged; counts its offsets."""
        end, partition = self._before.end(hole.partition), hole.partition
        last, _ = self._before.last.get(partition, (-1, ""))
        self._ends[partition] = max(hole.end, self._ends.get(partition, 0))
        again = self._again.get(partition, ())
        self.gone += max(0, hole.end - max(hole.start, end))
        self.gone += sum(hole.start <= offset < min(hole.end, end) for offset in again)
        if hole.start <= last < hole.end:
            self._excused.add(partition)
        return hole.end > end or hole.start == hole.end

    def leave(self, at: Address) -> None:
        """Let the next audit judge this record again."""
        self.left.setdefault(at.partition, []).append(at.offset)

    def judged(self, *, must_prove: bool) -> JudgedTopic:
        """Returns how far the topic is judged now. Raises `VerdictRefused` if the last record that
        was judged is missing, unless it may have been truncated or compacted (not `must_prove`).
        """
        if self._before.last.keys() - self._proven - (set() if must_prove else self._excused):
            raise VerdictRefused
        newest = {
            partition: (offset, value if isinstance(value, str) else _hash_of(value))
            for partition, (offset, value) in self._newest.items()
        }
        return JudgedTopic(self._ends, self._before.last | newest, self.left, self.count, self.gone)

    def _compare(self, partition: int, offset: int, found: Callable[[], str]) -> None:
        at, wanted = self._before.last.get(partition, (-1, ""))
        if offset == at:
            if found() != wanted:
                raise VerdictRefused
            self._proven.add(partition)


def _hash_of(value: bytes | None) -> str:
    return "" if value is None else record_hash(value)


class _HeldGroup(msgspec.Struct):
    """Holds a `GroupRecords` with its records as bytes."""

    names: tuple[str, ...]
    arrived: dict[str, tuple[bytes, Address]]
    noted: dict[tuple[str, str], tuple[bytes, Address]]


_HELD = dict[int, GroupRecords]


def encode_state(folds: Sequence[object]) -> bytes | None:
    """Encode those fields of these dataclasses that have defaults; a field without one refers to
    another object, and a fold among `folds` is encoded on its own. Returns None if a field holds a
    number beyond 64 bits, as hostile records may have: it cannot be encoded.
    """
    known = {id(fold) for fold in folds}
    try:
        parts = [
            {
                name: msgspec.msgpack.encode(_packed(value) if hint == _HELD else value)
                for name, hint, value in _state_fields(fold)
                if id(value) not in known
            }
            for fold in folds
        ]
    except OverflowError:
        return None
    return msgspec.msgpack.encode(parts)


def restore_state(folds: Sequence[object], state: bytes) -> None:
    """Fill the same folds in place from `state`; inverse of `encode_state`."""
    parts = msgspec.msgpack.decode(state, type=list[dict[str, bytes]])
    for fold, part in zip(folds, parts, strict=True):
        for name, hint, present in _state_fields(fold):
            if name in part:
                _fill(fold, name, present, _decoded(part[name], hint))


def _state_fields(fold: object) -> Iterator[tuple[str, Any, object]]:
    """Yields name, type and value of each field with a default that is not derived from others."""
    hints = get_type_hints(type(fold))
    for field in fields(cast(Any, fold)):
        is_state = field.default is not MISSING or field.default_factory is not MISSING
        if is_state and not field.metadata.get(DERIVED):
            yield field.name, hints[field.name], getattr(fold, field.name)


def _decoded(data: bytes, hint: Any) -> object:
    if hint == _HELD:
        held = msgspec.msgpack.decode(data, type=dict[int, _HeldGroup])
        return {group: _unpacked(records) for group, records in held.items()}
    if get_origin(hint) is Counter:
        hint = dict[get_args(hint)[0], int]
    return msgspec.msgpack.decode(data, type=hint)


def _fill(fold: object, name: str, present: object, value: object) -> None:
    """Set a field of the fold. Folds share some containers, so these keep their identity."""
    if isinstance(present, MutableMapping | MutableSet):
        container = cast(Any, present)
        container.clear()
        container |= cast(Any, value)
    elif isinstance(present, list):
        present[:] = cast(list[Any], value)
    else:
        setattr(fold, name, value)


def _packed(value: object) -> dict[int, _HeldGroup]:
    """Convert records to bytes, without the groups of which no record was read: the next audit
    selects them again.
    """
    held = cast(dict[int, GroupRecords], value)
    return {
        group: _HeldGroup(
            records.names,
            {name: (encode(record), at) for name, (record, at) in records.arrived.items()},
            {key: (encode(note), at) for key, (note, at) in records.noted.items()},
        )
        for group, records in held.items()
        if records.arrived or records.noted
    }


def _unpacked(held: _HeldGroup) -> GroupRecords:
    arrived = {n: (cast(Trajectory, decode(d).record), at) for n, (d, at) in held.arrived.items()}
    noted = {k: (cast(Annotation, decode(d).record), at) for k, (d, at) in held.noted.items()}
    return GroupRecords(held.names, arrived, noted)


def findings_of(results: Sequence[InvariantResult]) -> list[tuple[int, Offender]]:
    """Returns the named violations of each invariant."""
    return [(result.number, offender) for result in results for offender in result.offenders]
