"""Where large records lie, and when they go: by topic and hour of upload, a whole hour at once.

A blob is put before its claim is appended, so a claim's own timestamp is never before the hour that
it names, but for what clocks differ by and for how long an append may take; `MARGIN_S` is far above
both. So once the oldest record kept of every partition is younger than an hour's end plus the
margin, truncation has passed every record that names the hour. (A writer that was stopped for
longer than the margin between upload and append would append a claim without a blob: its lease is
long gone, and the record goes to `<topic>.dead`.) Blobs are never shared between hours.
"""

import time

from storage.objects import ObjectStore
from streams.bus import Bus

HOUR_S = 3600
MARGIN_S = 24 * HOUR_S
_FORM = "%Y-%m-%dT%H"


def hour_of(time_s: float) -> str:
    """`2026-11-21T13`, UTC."""
    return time.strftime(_FORM, time.gmtime(time_s))


def key_of(topic: str, hour: str, found: str) -> str:
    """The blob's key; `found` is the hash of its content."""
    return f"blobs/{topic}/{hour}/{found}"


def collect_blobs(bus: Bus, store: ObjectStore) -> int:
    """Delete the hours that no record kept can name; returns how many blobs went."""
    count = 0
    needed_from: dict[str, str] = {}  # hours sort as texts
    for blob in list(store.list("blobs/")):
        _, topic, hour, _ = blob.key.split("/")
        if topic not in needed_from:
            needed_from[topic] = _last_hour_unneeded(bus, topic)
        if hour < needed_from[topic]:
            store.delete(blob.key)
            count += 1
    return count


def _last_hour_unneeded(bus: Bus, topic: str) -> str:
    """Hours before it are unneeded; "" before the first hour when all may be needed."""
    oldest_s = float("inf")
    for partition, offset in bus.begin(topic).items():
        for message in bus.read(topic, {partition: offset}, records_max=1):
            oldest_s = min(oldest_s, message.timestamp_ms / 1000)
    return hour_of(oldest_s - MARGIN_S) if oldest_s < float("inf") else ""
