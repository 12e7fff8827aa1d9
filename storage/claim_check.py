"""Keeps large records out of the log: the bytes of such a record are put into the object store as a
blob, and a small record that names the blob, a `Claim`, is appended in its place.

`ClaimCheck`, a bus around the log's bus, does this at each append and puts the bytes back at each
read, so its callers see only the records that were appended. `open_log` opens a run's log with it.
`BlobCollector` deletes the blobs that no kept record can name.
"""

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from msgspec.structs import replace

from rollstream.errors import CorruptObject, DecodeError, ObjectMissing
from rollstream.storage.stores.base import KeyRefused, ObjectStore, content_hash
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.streams.bus import AppendEntry, Bus, BusWrapper, GroupReader, Message, check_entries
from rollstream.streams.codec import CLAIM_START, Envelope, decode, encode, envelope_of
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Claim
from rollstream.streams.topics import KEY_BYTES_MAX, RECORD_BYTES_MAX, Topic, catalogue

SETTLED_S = 3600.0  # far longer than an append with all its repetitions takes
_FORM = "%Y-%m-%dT%H"
_KEY = re.compile(r"blobs/([A-Za-z0-9._-]+)/(\d{4}-\d\d-\d\dT\d\d)/([0-9a-f]{32})", re.ASCII)
RUN_KEYS = (RunKeys(_KEY, "claimed", linked=True),)


class BlobKey(NamedTuple):
    """Holds the parts of a blob's key: its topic, the hour of its upload (`upload_hour`), and the
    hash of its content (`found`).
    """

    topic: str
    hour: str
    found: str


def upload_hour(time_s: float) -> str:
    """Returns the UTC hour of a time, given in seconds since 1970, in the form `2026-11-21T13`."""
    return time.strftime(_FORM, time.gmtime(time_s))


def blob_key(topic: str, hour: str, found: str) -> str:
    """Returns the blob's key; `found` is the hash of its content."""
    return f"blobs/{topic}/{hour}/{found}"


def parse_blob_key(key: str) -> BlobKey | None:
    """Returns the parts of a key; None for a key that `blob_key` does not make."""
    match = _KEY.fullmatch(key)
    return None if match is None else BlobKey(*match.groups())


@dataclasses.dataclass(frozen=True, slots=True)
class _BlobHour:
    """Tracks the blobs of one topic and hour. `keys` is one hash of all their keys, the same since
    the time `since_s`. `ends` are the ends of the topic's partitions, read once `keys` had been the
    same for `SETTLED_S`; None before.
    """

    keys: str
    since_s: float
    ends: Mapping[int, int] | None = None


class BlobCollector:
    """Deletes the blobs that no kept record can name, all blobs of one hour and topic together.
    After a restart it observes all hours again.

    The hour in a blob's key comes from the writer's clock and only groups blobs: it is compared
    with no other clock. A blob is put before its claim is appended. So once an hour has had the
    same blobs for `SETTLED_S` on the collector's own clock, all claims on them are below the ends
    that the topic's partitions have then. Once the topic is truncated up to these ends in every
    partition, no kept record names a blob of the hour. Equal bytes of two hours are two blobs.

    A writer that is suspended between upload and append for longer than `SETTLED_S` may append a
    claim without a blob. The run counts this writer as dead long before, and the claim goes to
    `dead`.
    """

    def __init__(
        self, bus: Bus, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus, self._store, self._monotonic = bus, store, monotonic
        self._known: dict[tuple[str, str], _BlobHour] = {}

    def run(self) -> int:
        """List all blobs, and delete those of the hours that no kept record can name any more.
        Returns the number of deleted blobs. To be called repeatedly: hours are compared with the
        previous call.
        """
        topics = {topic.name for topic in catalogue()}
        listed: dict[tuple[str, str], list[str]] = {}
        for blob in self._store.list("blobs/"):
            named = parse_blob_key(blob.key)
            if named is not None and named.topic in topics:  # other keys are another program's
                listed.setdefault((named.topic, named.hour), []).append(blob.key)
        present = {key: self._observe(key, blobs) for key, blobs in listed.items()}
        unneeded = [key for key, hour in present.items() if self._is_passed(key[0], hour)]
        self._known = {key: hour for key, hour in present.items() if key not in unneeded}
        deleted = [blob for key in unneeded for blob in listed[key]]
        self._store.delete_all(deleted)
        return len(deleted)

    def _observe(self, key: tuple[str, str], blobs: Sequence[str]) -> _BlobHour:
        found, now_s = content_hash("\n".join(sorted(blobs)).encode()), self._monotonic()
        known = self._known.get(key)
        if known is None or known.keys != found:
            return _BlobHour(found, now_s)
        if known.ends is None and now_s - known.since_s >= SETTLED_S:
            return dataclasses.replace(known, ends=self._bus.end(key[0]))
        return known

    def _is_passed(self, topic: str, hour: _BlobHour) -> bool:
        if hour.ends is None:
            return False
        begins = self._bus.begin(topic)
        return all(begins[partition] >= end for partition, end in hour.ends.items())


class ClaimCheck(BusWrapper):
    """Implements `Bus` over `log`, which carries values up to `bytes_max`, and `store`, which holds
    the larger ones.

    A larger value is put under `blobs/<topic>/<hour>/<hash>`, and a `Claim` with the same envelope
    (the writer's role, term and sequence number) is appended in its place. Reading puts the value
    back, so callers see the bytes that were appended. In a compacted topic no value becomes a
    claim; the topic's own limit refuses large ones.
    """

    def __init__(
        self,
        log: Bus,
        store: ObjectStore,
        bytes_max: int = RECORD_BYTES_MAX,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(log)
        self._store, self._bytes_max, self._clock = store, bytes_max, clock
        self._record_bytes_max = {topic.name: topic.record_bytes_max for topic in catalogue()}

    def create(self, topics: Sequence[Topic]) -> None:
        """Create the topics in the log with the limit `bytes_max` for records, so that a broker
        needs no room for large ones.
        """
        super().create([self._log_topic(topic) for topic in topics])
        self._record_bytes_max |= {topic.name: topic.record_bytes_max for topic in topics}

    def settings(self, topic: str) -> Topic:
        """Returns the topic's settings with the limit that callers see: that of complete records,
        whether their bytes are in the log or in the store.
        """
        carried = super().settings(topic)
        whole = max(carried.record_bytes_max, self._record_bytes_max.get(topic, 0))
        return dataclasses.replace(carried, record_bytes_max=whole)

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        if not any(self._is_large(entry) for entry in entries):
            return super().append(topic, entries)
        settings = self.settings(topic)
        check_entries(settings, entries)
        if settings.cleanup == "compact":
            return super().append(topic, entries)
        return super().append(
            topic, [self._check_in(topic, e) if self._is_large(e) else e for e in entries]
        )

    def read(
        self,
        topic: str,
        positions: Mapping[int, int],
        *,
        records_max: int = 512,
        bytes_max: int = 16 << 20,
        wait_s: float = 0.0,
        exact: bool = True,
    ) -> list[Message]:
        messages = super().read(
            topic,
            positions,
            records_max=records_max,
            bytes_max=bytes_max,
            wait_s=wait_s,
            exact=exact,
        )
        return self._redeem_batch(messages, bytes_max)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        return _ClaimCheckGroupReader(self, super().join(group, topic, member))

    def redeem(self, message: Message) -> Message:
        """Returns the message, which is a claim, with the bytes that were appended in its place.
        Raises `StoreError` if the store does not answer: then nothing is decided, and the caller
        repeats the read.

        Any program may append a claim, so it is not trusted. The message is returned unchanged if
        the blob is outside of `blobs/<topic>/`, missing, damaged, of another size, larger than the
        topic's records may be, itself a claim, or a record with another envelope. No reader takes
        such a claim for a record: it goes to `dead` with the reason.
        """
        assert message.value is not None
        try:
            decoded = decode(message.value)
        except DecodeError:
            return message
        claim = decoded.record
        assert isinstance(claim, Claim), "`decode` refuses bytes that start as a claim and are none"
        value = self._blob(message.topic, claim)
        if value is None or content_hash(value) != claim.hash or value.startswith(CLAIM_START, 16):
            return message
        return replace(message, value=value) if _envelope(value) == decoded.envelope else message

    def _blob(self, topic: str, claim: Claim) -> bytes | None:
        """Returns the bytes of the claim's blob; None if they are missing or have another size than
        the claim states. At most one byte more than this size is fetched, so a claim on an object
        of 100 GB costs no more than an honest one.
        """
        named = parse_blob_key(claim.blob)
        if named is None or (named.topic, named.found) != (topic, claim.hash):
            return None
        if not 0 < claim.bytes <= self.settings(topic).record_bytes_max:
            return None
        try:
            value = self._store.get(claim.blob, 0, claim.bytes + 1)
        except (ObjectMissing, CorruptObject, KeyRefused):
            return None
        return value if len(value) == claim.bytes else None

    def _log_topic(self, topic: Topic) -> Topic:
        """Returns the topic with the limit that it has in the log."""
        if topic.cleanup == "compact":
            return topic
        limit = min(topic.record_bytes_max, self._bytes_max + KEY_BYTES_MAX)
        return dataclasses.replace(topic, record_bytes_max=limit)

    def _is_large(self, entry: AppendEntry) -> bool:
        return entry.value is not None and len(entry.value) > self._bytes_max

    def _check_in(self, topic: str, entry: AppendEntry) -> AppendEntry:
        """Returns the claim to append in the record's place.

        1. Put the blob.
        2. Encode the claim, with the record's envelope.
        A crash between 1 and the append leaves a blob that no record names; it is deleted with its
        hour.
        """
        assert entry.value is not None
        found = content_hash(entry.value)
        key = blob_key(topic, upload_hour(self._clock()), found)
        self._store.put(key, entry.value)  # 1
        claim = Claim(blob=key, bytes=len(entry.value), hash=found)
        return replace(entry, value=encode(claim, _envelope(entry.value)))  # 2

    def _redeem_batch(self, messages: list[Message], bytes_max: int) -> list[Message]:
        """Returns the messages with the bytes of their claims put back: as many of the first ones
        as have at most `bytes_max` in all, but at least one.
        """
        if not any(is_claim(message) for message in messages):
            return messages
        redeemed: list[Message] = []
        size = 0
        for message in messages:
            whole = self.redeem(message) if is_claim(message) else message
            size += len(whole.value or b"")
            if redeemed and size > bytes_max:
                break
            redeemed.append(whole)
        return redeemed


class _ClaimCheckGroupReader:
    """Reads as the group member `inner` does, and puts the bytes of claims back."""

    def __init__(self, bus: ClaimCheck, inner: GroupReader) -> None:
        self._bus, self._below = bus, inner

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        messages = self._below.poll(wait_s, records_max)
        return [self._bus.redeem(m) if is_claim(m) else m for m in messages]

    def commit(self, before: Mapping[int, int] | None = None) -> None:
        self._below.commit(before)

    def pass_lost(self) -> dict[int, int]:
        return self._below.pass_lost()

    def close(self) -> None:
        self._below.close()


def _envelope(value: bytes) -> Envelope | None:
    """Returns the envelope of a record; None if it has none or the bytes are not a record: a bus
    carries any bytes.
    """
    try:
        return envelope_of(value)
    except DecodeError:
        return None


def is_claim(message: Message) -> bool:
    """Returns whether the message is a claim, whose record is in the object store."""
    return message.value is not None and message.value.startswith(CLAIM_START, 16)


def open_log(bus_url: str, store_url: str, sync: Literal["normal", "full"] = "normal") -> Bus:
    """Returns the bus at `bus_url` with its large records in the store at `store_url`. With `full`
    acknowledged writes to local folders (SQLite, `file:`) also survive a power loss.
    """
    return ClaimCheck(open_bus(bus_url, sync=sync), open_store(store_url, sync))
