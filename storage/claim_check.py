"""Keeps large records out of the log: their bytes are a blob in the object store, which a `Claim`
in the log names.
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
from rollstream.streams.bus import AppendEntry, Bus, GroupReader, Message
from rollstream.streams.bus_checks import check_entries
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.codec import CLAIM_START, Envelope, decode, encode, envelope_of
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Claim
from rollstream.streams.topics import KEY_BYTES_MAX, RECORD_BYTES_MAX, Topic, catalogue

SETTLED_S = 3600.0  # far longer than an append with all its repetitions takes
_FORM = "%Y-%m-%dT%H"
_KEY = re.compile(r"blobs/([A-Za-z0-9._-]+)/(\d{4}-\d\d-\d\dT\d\d)/([0-9a-f]{32})", re.ASCII)
RUN_KEYS = (RunKeys(_KEY, "claimed", linked=True),)


class BlobKey(NamedTuple):
    """A blob's topic, the hour of its upload (`upload_hour`), and its content's hash."""

    topic: str
    hour: str
    found: str


def upload_hour(time_s: float) -> str:
    """Returns the UTC hour of a time, in seconds since 1970, in the form `2026-11-21T13`."""
    return time.strftime(_FORM, time.gmtime(time_s))


def blob_key(topic: str, hour: str, digest: str) -> str:
    return f"blobs/{topic}/{hour}/{digest}"


def parse_blob_key(key: str) -> BlobKey | None:
    match = _KEY.fullmatch(key)
    return None if match is None else BlobKey(*match.groups())


@dataclasses.dataclass(frozen=True, slots=True)
class _BlobHour:
    """The blobs of one topic and hour. `keys` is one hash of all their keys, unchanged since
    `since_s`; `ends` are the topic's ends, read once that had lasted `SETTLED_S`.
    """

    keys: str
    since_s: float
    ends: Mapping[int, int] | None = None


class BlobCollector:
    """Deletes the blobs that no kept record can name, all blobs of one hour and topic together.

    A writer that is suspended between upload and append for longer than `SETTLED_S` may append a
    claim without a blob: the run counts it as dead long before, and the claim goes to `dead`.
    """

    def __init__(
        self, bus: Bus, store: ObjectStore, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._bus, self._store, self._monotonic = bus, store, monotonic
        self._known: dict[tuple[str, str], _BlobHour] = {}

    def run(self) -> int:
        """Returns the number of deleted blobs. To be called repeatedly: hours are compared with the
        previous call.
        """
        topics = {topic.name for topic in catalogue()}
        listed: dict[tuple[str, str], list[str]] = {}
        for blob in self._store.list("blobs/"):
            parts = parse_blob_key(blob.key)
            if parts is not None and parts.topic in topics:  # other keys are another program's
                listed.setdefault((parts.topic, parts.hour), []).append(blob.key)
        present = {key: self._observe(key, blobs) for key, blobs in listed.items()}
        unneeded = [key for key, hour in present.items() if self._is_passed(key[0], hour)]
        self._known = {key: hour for key, hour in present.items() if key not in unneeded}
        deleted = [blob for key in unneeded for blob in listed[key]]
        self._store.delete_all(deleted)
        return len(deleted)

    def _observe(self, key: tuple[str, str], blobs: Sequence[str]) -> _BlobHour:
        keys_hash, now_s = content_hash("\n".join(sorted(blobs)).encode()), self._monotonic()
        observed = self._known.get(key)
        if observed is None or observed.keys != keys_hash:
            return _BlobHour(keys_hash, now_s)
        # A blob is put before its claim is appended: all claims on blobs that have been the same
        # for `SETTLED_S` are below these ends. Once every partition is truncated up to them, no
        # kept record names one. Equal bytes of two hours are two blobs.
        if observed.ends is None and now_s - observed.since_s >= SETTLED_S:
            return dataclasses.replace(observed, ends=self._bus.end(key[0]))
        return observed

    def _is_passed(self, topic: str, hour: _BlobHour) -> bool:
        if hour.ends is None:
            return False
        begins = self._bus.begin(topic)
        return all(begins[partition] >= end for partition, end in hour.ends.items())


class ClaimCheck(BusWrapper):
    """`log` carries values up to `bytes_max`, `store` holds the larger ones under
    `blobs/<topic>/<hour>/<hash>`. In a compacted topic no value becomes a claim; the topic's own
    limit refuses large ones.
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
        """Creates the topics with the limit `bytes_max`, so that a broker needs no room for large
        records.
        """
        super().create([self._log_topic(topic) for topic in topics])
        self._record_bytes_max |= {topic.name: topic.record_bytes_max for topic in topics}

    def settings(self, topic: str) -> Topic:
        """Returns the topic's settings with the limit of complete records, in the log or in the
        store.
        """
        carried = self._below.settings(topic)
        record_bytes_max = max(carried.record_bytes_max, self._record_bytes_max.get(topic, 0))
        return dataclasses.replace(carried, record_bytes_max=record_bytes_max)

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        if not any(self._is_large(entry) for entry in entries):
            return self._below.append(topic, entries)
        settings = self.settings(topic)
        check_entries(settings, entries)
        if settings.cleanup == "compact":
            return self._below.append(topic, entries)
        return self._below.append(
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
        messages = self._below.read(
            topic,
            positions,
            records_max=records_max,
            bytes_max=bytes_max,
            wait_s=wait_s,
            exact=exact,
        )
        return self._redeem_batch(messages, bytes_max)

    def join(self, group: str, topic: str, member: str) -> GroupReader:
        return _ClaimCheckGroupReader(self, self._below.join(group, topic, member))

    def redeem(self, message: Message) -> Message:
        """Returns the bytes that were appended in the claim's place. Raises `StoreError` if the
        store does not answer: the caller repeats the read.

        Any program may append a claim: it is returned unchanged, and goes to `dead`, if the blob is
        outside of `blobs/<topic>/`, missing, damaged, of another size, larger than the topic's
        records may be, itself a claim, or a record with another envelope.
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
        parts = parse_blob_key(claim.blob)
        if parts is None or (parts.topic, parts.found) != (topic, claim.hash):
            return None
        if not 0 < claim.bytes <= self.settings(topic).record_bytes_max:
            return None
        try:
            # One byte more than stated: a claim on an object of 100 GB costs no more than an honest
            # one.
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
        """1. Put the blob.
        2. Encode the claim, with the record's envelope. A crash between 1 and the append leaves a
        blob that no record names, deleted with its hour.
        """
        assert entry.value is not None
        digest = content_hash(entry.value)
        key = blob_key(topic, upload_hour(self._clock()), digest)
        self._store.put(key, entry.value)  # 1
        claim = Claim(blob=key, bytes=len(entry.value), hash=digest)
        return replace(entry, value=encode(claim, _envelope(entry.value)))  # 2

    def _redeem_batch(self, messages: list[Message], bytes_max: int) -> list[Message]:
        if not any(is_claim(message) for message in messages):
            return messages
        redeemed: list[Message] = []
        size = 0
        for message in messages:
            redeemed_message = self.redeem(message) if is_claim(message) else message
            size += len(redeemed_message.value or b"")
            if redeemed and size > bytes_max:
                break
            redeemed.append(redeemed_message)
        return redeemed


class _ClaimCheckGroupReader:
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
    try:
        return envelope_of(value)
    except DecodeError:
        # A bus carries any bytes.
        return None


def is_claim(message: Message) -> bool:
    return message.value is not None and message.value.startswith(CLAIM_START, 16)


def open_log(bus_url: str, store_url: str, sync: Literal["normal", "full"] = "normal") -> Bus:
    """Returns the bus with its large records in the store. With `full` acknowledged writes to local
    folders (SQLite, `file:`) also survive a power loss.
    """
    return ClaimCheck(open_bus(bus_url, sync=sync), open_store(store_url, sync))
