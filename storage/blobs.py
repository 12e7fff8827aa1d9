"""Keys and deletion of large records in the object store: by topic and hour of upload, a whole hour
at once.

A blob is put before its claim is appended. So a claim's own timestamp is never before the hour in
its blob's key, except by clock differences and the duration of an append; `MARGIN_S` is far above
both. Once the oldest kept record of every partition is younger than an hour's end plus the margin,
truncation has passed every record that names the hour. (A writer that was stopped between upload
and append for longer than the margin would append a claim without a blob: its lease expired long
before, and the record goes to `<topic>.dead`.) Blobs are never shared between hours.
"""

import re
import time
from typing import NamedTuple

from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.streams.topics import catalogue

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
    count = 0
    topics = {topic.name for topic in catalogue()}
    needed_from: dict[str, str] = {}  # hours in time order are in text order
    for blob in list(store.list("blobs/")):
        named = parse_blob_key(blob.key)
        if named is None or named.topic not in topics:
            continue  # an object of another program
        if named.topic not in needed_from:
            needed_from[named.topic] = _first_hour_needed(bus, named.topic)
        if named.hour < needed_from[named.topic]:
            store.delete(blob.key)
            count += 1
    return count


def _first_hour_needed(bus: Bus, topic: str) -> str:
    """The first hour that kept records may need; "" (before any hour) if all may be needed."""
    oldest_s = float("inf")
    for partition, offset in bus.begin(topic).items():
        for message in bus.read(topic, {partition: offset}, records_max=1):
            oldest_s = min(oldest_s, message.timestamp_ms / 1000)
    return upload_hour(oldest_s - MARGIN_S) if oldest_s < float("inf") else ""
