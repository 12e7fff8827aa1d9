"""The weight streams of a run: the policy's versions, and under names those of other models.

Each stream has its own part of the store, topic and terms.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rollstream.errors import ConfigurationError
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.part import StorePart
from rollstream.storage.stores.run_keys import RunKeys
from rollstream.storage.weights import manifest, pointer, retention
from rollstream.streams.topics import STREAM_NAME, Topic, announcement_topic

STREAMS_MAX = 64
_FOLDER = "streams"
_KEY = re.compile(rf"{_FOLDER}/({STREAM_NAME.pattern})/(.+)")


def _in_streams(keys: RunKeys) -> RunKeys:
    pattern = rf"{_FOLDER}/{STREAM_NAME.pattern}/{keys.pattern.pattern}"
    return replace(keys, pattern=re.compile(pattern))


RUN_KEYS = tuple(
    _in_streams(keys) for keys in (*manifest.RUN_KEYS, *pointer.RUN_KEYS, *retention.RUN_KEYS)
)


@dataclass(frozen=True, slots=True, order=True)
class WeightStream:
    """The policy's stream (`POLICY`) has no name. Raises `ConfigurationError` for a name that keys
    and topics cannot have.
    """

    name: str = ""

    def __post_init__(self) -> None:
        if self.name and not STREAM_NAME.fullmatch(self.name):
            raise ConfigurationError(
                f"weight stream {self.name[:80]!r}: use a letter or digit, then up to 63 letters, "
                "digits and '-'"
            )

    @property
    def prefix(self) -> str:
        return f"{_FOLDER}/{self.name}/" if self.name else ""

    @property
    def topic(self) -> Topic:
        return announcement_topic(self.name)

    def part(self, store: ObjectStore) -> ObjectStore:
        """Returns its part of the run's `store`, with the keys that the policy's objects have:
        `weights/…`, `pins/…`.
        """
        return StorePart(store, self.prefix) if self.name else store


POLICY = WeightStream()


def split_key(key: str) -> tuple[WeightStream, str]:
    """Returns the stream in whose part the object is, and its key there; the policy's for an object
    of no named stream.
    """
    match = _KEY.fullmatch(key)
    return (WeightStream(match[1]), match[2]) if match else (POLICY, key)


def named_streams(store: ObjectStore) -> tuple[WeightStream, ...]:
    """Returns the streams by name; reads a listing: readers of one stream follow its topic
    instead.
    """
    return tuple(sorted(set(_streams_of_objects(store))))


def _streams_of_objects(store: ObjectStore) -> Iterator[WeightStream]:
    for entry in store.list(f"{_FOLDER}/"):
        if any(keys.owns(entry.key) for keys in RUN_KEYS):
            yield split_key(entry.key)[0]


def run_streams(store: ObjectStore) -> tuple[WeightStream, ...]:
    """Returns the policy's stream, then the named ones of the store (`named_streams`)."""
    return (POLICY, *named_streams(store))
