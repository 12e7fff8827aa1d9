"""`ObjectStore` in an S3 bucket (docs/reference/s3.md has the interleavings). Every operation ends
by its deadline.
"""

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from rollstream.deadline import Deadline
from rollstream.errors import ObjectExists, StoreError, SwapLost
from rollstream.metric_values import MetricValues
from rollstream.storage.stores.base import (
    KEY_BYTES_MAX,
    Data,
    KeyRefused,
    ListedObject,
    ObjectStat,
    check_key,
    check_prefix,
    content_hash,
    is_key,
)
from rollstream.storage.stores.s3.address import S3Address
from rollstream.storage.stores.s3.client import (
    DELETE_KEYS_MAX,
    PART_BYTES,
    ByteRange,
    S3Client,
    WriteCondition,
    plan_parts,
)
from rollstream.storage.stores.s3.errors import (
    RETRIED_KINDS,
    Attempts,
    FailureKind,
    S3Failure,
    TimeLimits,
    allowance_s,
    time_limits,
    translate_s3_errors,
)
from rollstream.storage.stores.s3.read import HASH, NONCE, S3Reader, run_in_parallel

UPLOADS = 3  # most uploads of one object: S3 requires a new one after a conflicting completion
_log = logging.getLogger(__name__)
# Answers to a write that another writer has overtaken, or that repeats one which took effect.
_LOST = (FailureKind.PRECONDITION, FailureKind.MISSING, FailureKind.NO_UPLOAD)


class S3Writer:
    """`pool` bounds how many parts are in flight."""

    def __init__(
        self, client: S3Client, reader: S3Reader, pool: Executor, limits: TimeLimits
    ) -> None:
        self._client, self._reader, self._pool, self._limits = client, reader, pool, limits

    def put(self, name: str, data: Data) -> str:
        if len(_view(data)) > PART_BYTES:
            return self._put_multipart(name, data, WriteCondition())
        return self._put_single(name, data, WriteCondition())

    def create(self, name: str, data: Data) -> str:
        """Returns the etag. Raises `S3Failure` of kind `PRECONDITION` if another writer's object
        exists.
        """
        condition = WriteCondition(if_absent=True)
        if len(_view(data)) <= PART_BYTES:
            return self._put_single(name, data, condition)
        if self._exists(name):  # only saves an upload: the condition of the write decides
            raise S3Failure(FailureKind.PRECONDITION, "PreconditionFailed", "it exists", False)
        return self._put_multipart(name, data, condition)

    def swap(self, name: str, data: Data, etag: str) -> str:
        """Returns the new etag. Raises `S3Failure` of kind `PRECONDITION` or `MISSING` if the
        object does not have `etag`.
        """
        # Never in parts: some servers ignore If-Match when parts are completed.
        return self._put_single(name, data, WriteCondition(if_etag=etag))

    def _put_single(self, name: str, data: Data, condition: WriteCondition) -> str:
        body = data if isinstance(data, bytes | bytearray) else bytes(data)
        metadata = {HASH: content_hash(body), NONCE: uuid.uuid4().hex}
        attempts = Attempts(Deadline(allowance_s(self._limits.begin_s, len(body))))
        write = lambda: self._client.put(name, body, metadata, condition)  # noqa: E731
        return self._resolve_doubt(name, metadata[NONCE], attempts, write)

    def _put_multipart(self, name: str, data: Data, condition: WriteCondition) -> str:
        metadata = {HASH: content_hash(data), NONCE: uuid.uuid4().hex}
        view = _view(data)
        attempts = Attempts(Deadline(allowance_s(self._limits.begin_s, len(view))))
        for upload in range(1, UPLOADS + 1):
            try:
                return self._upload(name, view, metadata, condition, attempts)
            except S3Failure as failure:
                if failure.kind is not FailureKind.CONFLICT or upload == UPLOADS:
                    raise
                attempts.wait(failure)
        raise AssertionError(UPLOADS)

    def _upload(
        self,
        name: str,
        view: memoryview,
        metadata: dict[str, str],
        condition: WriteCondition,
        attempts: Attempts,
    ) -> str:
        """Open the upload (1), send the parts (2), complete it (3); a failure aborts it."""
        upload = attempts.run(lambda: self._client.create_upload(name, metadata))  # 1

        def send(piece: tuple[int, ByteRange]) -> str:
            number, part = piece
            body = bytes(view[part.start : part.end])
            part_attempts = Attempts(attempts.deadline)
            return part_attempts.run(lambda: self._client.upload_part(name, upload, number, body))

        def complete() -> str:
            return self._client.complete_upload(name, upload, etags, condition)

        try:
            pieces = list(enumerate(plan_parts(len(view)), start=1))
            etags = run_in_parallel(self._pool, send, pieces)  # 2
            nonce = metadata[NONCE]
            return self._resolve_doubt(
                name, nonce, attempts, complete, frozenset({FailureKind.TRANSIENT})
            )  # 3
        except BaseException:
            self._abort(name, upload)
            raise

    def _resolve_doubt(
        self,
        name: str,
        nonce: str,
        attempts: Attempts,
        write: Callable[[], str],
        retried: Collection[FailureKind] = RETRIED_KINDS,
    ) -> str:
        """Calls `write` until it succeeds, again after failures of a kind in `retried`; returns the
        etag.
        """
        try:
            return attempts.run(write, retried)
        except S3Failure as failure:
            if failure.kind not in _LOST or not attempts.in_doubt:
                raise
            # A request in doubt took effect, and its repetition failed because of this write's own
            # object, if that has the nonce drawn for this write alone.
            etag = self._own_etag(name, nonce, attempts.deadline)
            if etag is None:
                raise
            return etag

    def _own_etag(self, name: str, nonce: str, deadline: Deadline) -> str | None:
        try:
            head = self._reader.head(name, deadline)
        except S3Failure as failure:
            if failure.kind is FailureKind.MISSING:
                return None
            raise
        return head.etag if head.metadata.get(NONCE) == nonce else None

    def _exists(self, name: str) -> bool:
        try:
            self._reader.head(name)
        except S3Failure as failure:
            if failure.kind is FailureKind.MISSING:
                return False
            raise
        return True

    def _abort(self, name: str, upload: str) -> None:
        try:
            self._client.abort_upload(name, upload)
        except S3Failure as failure:
            # The parts stay until the bucket's lifecycle rule removes them.
            if failure.kind is not FailureKind.NO_UPLOAD:
                _log.warning("object store: upload of %s was not aborted: %s", name, failure)


def _view(data: Data) -> memoryview:
    return memoryview(data).cast("B")


IN_FLIGHT_MAX = 8  # requests for parts of large objects, of all threads together


class S3Store:
    """Threads may share a store; each process opens its own. After `StoreTimeout` a write may have
    taken effect; writes acknowledged before are safe.
    """

    def __init__(self, place: S3Address) -> None:
        self._place = place
        self._folder = f"{place.prefix}/" if place.prefix else ""
        self._limits = time_limits(place.deadline_s)
        self._client = S3Client(place, self._limits)
        pool = ThreadPoolExecutor(IN_FLIGHT_MAX, "s3")
        self._reader = S3Reader(self._client, pool, self._limits)
        self._writer = S3Writer(self._client, self._reader, pool, self._limits)
        self._has_batches = True

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
            head = self._reader.head(name)
        return ObjectStat(key, head.size, head.etag)

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

    def delete_all(self, keys: Iterable[str]) -> None:
        """Deletes by one request per `DELETE_KEYS_MAX` keys, or per key after a server has refused
        such a request.
        """
        every = [self._name(key) for key in keys]
        for start in range(0, len(every), DELETE_KEYS_MAX):
            names = every[start : start + DELETE_KEYS_MAX]
            where = f"{len(names)} objects, the first {self._where(names[0][len(self._folder) :])}"
            with translate_s3_errors("delete", where):
                for name in self._delete_batch(names) if self._has_batches else names:
                    self._attempts().run(lambda name=name: self._client.delete(name))

    def metric_values(self) -> MetricValues:
        return {
            "store_retries_total": self._client.retries,
            "store_in_doubt_total": self._client.in_doubt,
        }

    def _delete_batch(self, names: Sequence[str]) -> Sequence[str]:
        """Returns the remaining names: all if the server refuses such requests, else those that it
        refused, which the caller deletes one by one, so that each raises its own error.
        """
        remaining = names

        def request() -> None:
            nonlocal remaining
            failures = self._client.delete_objects(remaining)
            remaining = [name for name in remaining if name in failures]
            if remaining:
                raise next(iter(failures.values()))

        try:
            self._attempts().run(request)
        except S3Failure as failure:
            if failure.kind is not FailureKind.REFUSED:
                raise
            if remaining is names:
                self._has_batches = False
                _log.info("object store: one request per deleted key, as batches fail: %s", failure)
        return remaining

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
                # Other names no store could have written.
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
