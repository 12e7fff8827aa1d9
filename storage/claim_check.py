"""Claim check: large records are in the object store and the log carries their address. A bus
around a bus; `open_log` opens a run's log with it.

A value above `RECORD_BYTES_MAX` is put under `blobs/<topic>/<hour>/<hash>`, and a `Claim` with the
same envelope is appended in its place. Reading puts the value back, so callers see the bytes that
were appended, and their hash. Compacted topics refuse such values themselves.

1. The blob is put.
2. The claim is appended. A crash in between leaves a blob that no record names; it is deleted with
   its hour.

A claim comes from another program and is not trusted. The record is read as its claim if its blob
is outside of `blobs/<topic>/`, missing, damaged, of another size, larger than the topic's records
may be, itself a claim, or a record with another envelope. No reader takes a claim for a record: it
goes to `dead` with the reason. If the store does not answer, nothing is decided: the read
fails and is repeated.

`collect_blobs` deletes blobs by hour of upload. A blob is put before its claim is appended, so a
claim's own timestamp is never before the hour in its blob's key, except by clock differences and
the duration of an append; `MARGIN_S` is far above both. Once the oldest kept record of every
partition is younger than an hour's end plus the margin, truncation has passed every record that
names the hour. (A writer that was stopped between upload and append for longer than the margin
would append a claim without a blob: its lease expired long before, and the record goes to
`dead`.) Blobs are never shared between hours.
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

HOUR_S = 3600
MARGIN_S = 24 * HOUR_S
_FORM = "%Y-%m-%dT%H"
_KEY = re.compile(r"blobs/([A-Za-z0-9._-]+)/(\d{4}-\d\d-\d\dT\d\d)/([0-9a-f]{32})", re.ASCII)


class BlobKey(NamedTuple):
    """The parts of a blob's key; `found` is the hash of its content."""

    topic: str
    hour: str
    found: str


def upload_hour(time_s: float) -> str:
    """`2026-11-21T13`, UTC."""
    return time.strftime(_FORM, time.gmtime(time_s))


def blob_key(topic: str, hour: str, found: str) -> str:
    """The blob's key; `found` is the hash of its content."""
    return f"blobs/{topic}/{hour}/{found}"


def parse_blob_key(key: str) -> BlobKey | None:
    """The parts of a key; None for a key that `blob_key` does not make."""
    match = _KEY.fullmatch(key)
    return None if match is None else BlobKey(*match.groups())


def collect_blobs(bus: Bus, store: ObjectStore) -> int:
    """Delete the hours that no kept record can name. Returns the number of deleted blobs."""
    unneeded: list[str] = []
    topics = {topic.name for topic in catalogue()}
    needed_from: dict[str, str] = {}  # hours in time order are in text order
    for blob in store.list("blobs/"):
        named = parse_blob_key(blob.key)
        if named is None or named.topic not in topics:
            continue  # an object of another program
        if named.topic not in needed_from:
            needed_from[named.topic] = _first_hour_needed(bus, named.topic)
        if named.hour < needed_from[named.topic]:
            unneeded.append(blob.key)
    store.delete_all(unneeded)
    return len(unneeded)


def _first_hour_needed(bus: Bus, topic: str) -> str:
    """The first hour that kept records may need; "" (before any hour) if all may be needed."""
    oldest_s = float("inf")
    for partition, offset in bus.begin(topic).items():
        for message in bus.read(topic, {partition: offset}, records_max=1):
            oldest_s = min(oldest_s, message.timestamp_ms / 1000)
    return upload_hour(oldest_s - MARGIN_S) if oldest_s < float("inf") else ""


class ClaimCheck(BusWrapper):
    """A `Bus`: `log` carries records up to `bytes_max`, `store` the larger ones."""

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
        """The topic's settings with the size limit of complete records, in the log or in the
        store.
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
        """The message with the bytes that were appended, or unchanged if they cannot be read or
        trusted.
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
        """The bytes of the claim's blob. At most one byte more than the claim states is fetched, so
        a claim on an object of 100 GB costs no more than an honest one.
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
        assert entry.value is not None
        found = content_hash(entry.value)
        key = blob_key(topic, upload_hour(self._clock()), found)
        self._store.put(key, entry.value)  # 1
        claim = Claim(blob=key, bytes=len(entry.value), hash=found)
        return replace(entry, value=encode(claim, _envelope(entry.value)))  # 2

    def _redeem_batch(self, messages: list[Message], bytes_max: int) -> list[Message]:
        """A prefix of the messages, redeemed, whose values together stay within `bytes_max`; at
        least one message.
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
    """A group member whose messages are redeemed."""

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
    """The envelope, if the value is a record: a bus carries any bytes."""
    try:
        return envelope_of(value)
    except DecodeError:
        return None


def is_claim(message: Message) -> bool:
    """Whether the message's value is in the object store."""
    return message.value is not None and message.value.startswith(CLAIM_START, 16)


def open_log(bus_url: str, store_url: str, sync: Literal["normal", "full"] = "normal") -> Bus:
    """The bus at `bus_url`, with its large records in the store at `store_url`."""
    return ClaimCheck(open_bus(bus_url, sync=sync), open_store(store_url, sync))
