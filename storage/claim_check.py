"""Stores large records in the object store and appends their address to the log in their place (a
claim check). `ClaimCheck` is a bus around a bus; `open_log` opens a run's log with it.

Readers get the bytes that were appended, and never take a claim for a record. `BlobCollector`
deletes the blobs that no kept record can name.
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
from rollstream.streams.bus import AppendEntry, Bus, BusWrapper, GroupReader, Message, check_entries
from rollstream.streams.codec import CLAIM_START, Envelope, decode, encode, envelope_of
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Claim
from rollstream.streams.topics import KEY_BYTES_MAX, RECORD_BYTES_MAX, Topic, catalogue

SETTLED_S = 3600.0  # far above the duration of an append and its repetitions
_FORM = "%Y-%m-%dT%H"
_KEY = re.compile(r"blobs/([A-Za-z0-9._-]+)/(\d{4}-\d\d-\d\dT\d\d)/([0-9a-f]{32})", re.ASCII)


class BlobKey(NamedTuple):
    """Holds the parts of a blob's key; `found` is the hash of its content."""

    topic: str
    hour: str
    found: str


def upload_hour(time_s: float) -> str:
    """Returns the hour of a time in seconds since 1970, in UTC, as `2026-11-21T13`."""
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
    """Tracks one hour of a topic's blobs: the hash of their keys, the time since which it is
    unchanged, and the topic's ends once it has been unchanged for `SETTLED_S`.
    """

    keys: str
    since_s: float
    ends: Mapping[int, int] | None = None


class BlobCollector:
    """Deletes the hours of blobs that no kept record can name. After a restart it observes all
    hours again.

    Blobs are deleted together by the hour in their key, and are never shared between hours. The
    hour comes from the writer's clock and only groups blobs: it is compared with no other clock. A
    blob is put before its claim is appended, so once an hour has had the same blobs for `SETTLED_S`
    on the collector's own clock, its claims are below the ends that the topic has then. Once
    truncation has passed these ends in every partition, no kept record names the hour.

    A writer that is suspended between upload and append for longer than `SETTLED_S` may append a
    claim without a blob. The run counts this writer as dead long before, and the record goes to
    `dead`.
    """

    def __init__(
        self, bus: Bus, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus, self._store, self._monotonic = bus, store, monotonic
        self._known: dict[tuple[str, str], _BlobHour] = {}

    def run(self) -> int:
        """Delete the hours that are due; returns the number of deleted blobs."""
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
    """A `Bus` of which `log` carries records up to `bytes_max`, and `store` the larger ones.

    A larger value is put under `blobs/<topic>/<hour>/<hash>`, and a `Claim` with the same envelope
    is appended in its place. Reading puts the value back, so callers see the bytes that were
    appended, and their hash. Compacted topics refuse larger values themselves.
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
        """Create the topics in the log with its own limit: a broker needs no room for large
        records.
        """
        super().create([self._log_topic(topic) for topic in topics])
        self._record_bytes_max |= {topic.name: topic.record_bytes_max for topic in topics}

    def settings(self, topic: str) -> Topic:
        """Returns the topic's settings with the size limit of complete records, in the log or in
        the store.
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
        """Returns the message of a claim with the bytes that were appended, or the claim itself if
        these bytes are missing or cannot be trusted. Raises `StoreError` if the store does not
        answer: then nothing is decided, and the caller repeats the read.

        A claim comes from another program and is not trusted. The claim itself is returned if its
        blob is outside of `blobs/<topic>/`, missing, damaged, of another size, larger than the
        topic's records may be, itself a claim, or a record with another envelope. No reader takes a
        claim for a record: the claim goes to `dead` with the reason.
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
        """Returns the bytes of the claim's blob; None if they are missing or cannot be trusted. At
        most one byte more than the claim states is fetched, so a claim on an object of 100 GB costs
        no more than an honest one.
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
        if topic.cleanup == "compact":
            return topic
        limit = min(topic.record_bytes_max, self._bytes_max + KEY_BYTES_MAX)
        return dataclasses.replace(topic, record_bytes_max=limit)

    def _is_large(self, entry: AppendEntry) -> bool:
        return entry.value is not None and len(entry.value) > self._bytes_max

    def _check_in(self, topic: str, entry: AppendEntry) -> AppendEntry:
        """Returns the claim to append in the record's place. 1. Put the blob. 2. Encode the claim
        with the record's envelope. A crash between this call and the append leaves a blob that no
        record names; it is deleted with its hour.
        """
        assert entry.value is not None
        found = content_hash(entry.value)
        key = blob_key(topic, upload_hour(self._clock()), found)
        self._store.put(key, entry.value)  # 1
        claim = Claim(blob=key, bytes=len(entry.value), hash=found)
        return replace(entry, value=encode(claim, _envelope(entry.value)))  # 2

    def _redeem_batch(self, messages: list[Message], bytes_max: int) -> list[Message]:
        """Returns a prefix of the messages with the values of their claims. It stays within
        `bytes_max` in all, but has at least one message.
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
    """Reads as a group member, with the values of claims in their place."""

    def __init__(self, bus: ClaimCheck, inner: GroupReader) -> None:
        self._bus, self._below = bus, inner

    def poll(self, wait_s: float, records_max: int = 512) -> list[Message]:
        messages = self._below.poll(wait_s, records_max)
        return [self._bus.redeem(m) if is_claim(m) else m for m in messages]

    def commit(self) -> None:
        self._below.commit()

    def pass_lost(self) -> dict[int, int]:
        return self._below.pass_lost()

    def close(self) -> None:
        self._below.close()


def _envelope(value: bytes) -> Envelope | None:
    """Returns the envelope if the value is a record, else None, because a bus carries any bytes."""
    try:
        return envelope_of(value)
    except DecodeError:
        return None


def is_claim(message: Message) -> bool:
    """Returns whether the message is a claim, so that its value is in the object store."""
    return message.value is not None and message.value.startswith(CLAIM_START, 16)


def open_log(bus_url: str, store_url: str, sync: Literal["normal", "full"] = "normal") -> Bus:
    """Returns the bus at `bus_url`, with its large records in the store at `store_url`."""
    return ClaimCheck(open_bus(bus_url, sync=sync), open_store(store_url, sync))
