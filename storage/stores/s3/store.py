"""Object store over a bucket (`s3://bucket/prefix?endpoint=…`), for any number of machines.

An object appears when its one PUT, or the completion of its parts, is acknowledged, so a reader
sees the complete object or none. `create` uses If-None-Match and `swap` uses If-Match; the server
decides who wins. Every operation ends before its deadline: in success, or in a typed error with
advice. `docs/reference/s3.md` has the interleavings.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from rollstream.deadline import Deadline
from rollstream.errors import ObjectExists, StoreError, SwapLost
from rollstream.storage.stores.base import (
    KEY_BYTES_MAX,
    Data,
    KeyRefused,
    ListedObject,
    ObjectStat,
    check_key,
    check_prefix,
    is_key,
)
from rollstream.storage.stores.s3.address import S3Address
from rollstream.storage.stores.s3.client import S3Client
from rollstream.storage.stores.s3.errors import (
    Attempts,
    FailureKind,
    S3Failure,
    time_limits,
    translate_s3_errors,
)
from rollstream.storage.stores.s3.read import S3Reader
from rollstream.storage.stores.s3.write import S3Writer

IN_FLIGHT_MAX = 8  # requests for parts of large objects, of all threads together


class S3Store:
    """Safe to share between threads; processes and machines open their own.

    The etag is the server's. Raises `StoreTimeout` if the server did not answer in time: that
    request is in doubt, but nothing acknowledged is.
    """

    def __init__(self, place: S3Address) -> None:
        self._place = place
        self._folder = f"{place.prefix}/" if place.prefix else ""
        self._limits = time_limits(place.deadline_s)
        self._client = S3Client(place, self._limits)
        pool = ThreadPoolExecutor(IN_FLIGHT_MAX, "s3")
        self._reader = S3Reader(self._client, pool, self._limits)
        self._writer = S3Writer(self._client, self._reader, pool, self._limits)

    def put(self, key: str, data: Data) -> str:
        name = self._name(key)
        with translate_s3_errors("write", self._where(key)):
            return self._writer.put(name, data)

    def create(self, key: str, data: Data) -> str:
        name = self._name(key)
        with translate_s3_errors("create", self._where(key)):
            try:
                return self._writer.create(name, data)
            except S3Failure as failure:
                if failure.kind is not FailureKind.PRECONDITION:
                    raise
        raise ObjectExists(f"object {self._where(key)} already exists")

    def swap(self, key: str, data: Data, etag: str) -> str:
        name = self._name(key)
        with translate_s3_errors("swap", self._where(key)):
            try:
                return self._writer.swap(name, data, etag)
            except S3Failure as failure:
                if failure.kind not in (FailureKind.PRECONDITION, FailureKind.MISSING):
                    raise
        raise SwapLost(f"object {self._where(key)} no longer has etag {etag}")

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        assert 0 <= start <= (start if end is None else end), (key, start, end)
        name = self._name(key)
        with translate_s3_errors("read", self._where(key)):
            return self._reader.read(name, start, end).data

    def stat(self, key: str) -> ObjectStat:
        name = self._name(key)
        with translate_s3_errors("read", self._where(key)):
            found = self._reader.head(name)
        return ObjectStat(key, found.size, found.etag)

    def read(self, key: str) -> tuple[bytes, str]:
        name = self._name(key)
        with translate_s3_errors("read", self._where(key)):
            content = self._reader.read(name)
        return content.data, content.found.etag

    def list(self, prefix: str = "") -> Iterator[ListedObject]:
        return self._listed(self._folder + check_prefix(prefix), self._where(prefix))

    def delete(self, key: str) -> None:
        name = self._name(key)
        with translate_s3_errors("delete", self._where(key)):
            self._attempts().run(lambda: self._client.delete(name))

    def _listed(self, prefix: str, where: str) -> Iterator[ListedObject]:
        more: str | None = None
        last = ""
        while True:
            with translate_s3_errors("list", where):
                page = self._attempts().run(
                    lambda token=more: self._client.list_page(prefix, token)
                )
            for name, size in page.entries:
                if name <= last:
                    raise StoreError(
                        f"cannot list {where}: {name} came after {last}; use a general "
                        "purpose bucket (directory buckets are not in order)"
                    )
                last, key = name, name[len(self._folder) :]
                if is_key(key):
                    yield ListedObject(key, size)
            if page.more is None:
                return
            more = page.more

    def _attempts(self) -> Attempts:
        return Attempts(Deadline(self._limits.begin_s))

    def _name(self, key: str) -> str:
        name = self._folder + check_key(key)
        if len(name) > KEY_BYTES_MAX:
            raise KeyRefused(
                f"object key {key[:80]!r}: with the prefix of {self._place} it is "
                f"above {KEY_BYTES_MAX} bytes"
            )
        return name

    def _where(self, key: str) -> str:
        place = self._place
        at = f" at {place.endpoint}" if place.endpoint else ""
        return f"s3://{place.bucket}/{self._folder}{key}{at}"
