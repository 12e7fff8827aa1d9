"""Reads an object or a range of it, in parallel if it is large; all returned bytes are of one
moment.

The first request returns size, etag and hash; the others require that etag, so a read during which
the object is replaced starts again instead of mixing two objects. Missing bytes are requested
again, and a complete object is checked against its hash. Nothing else is ever returned.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from io import BytesIO

from storage.hashing import content_hash
from storage.s3.client import Found, S3Client
from storage.s3.failures import Kind, S3Failure
from storage.s3.ranges import FIRST_BYTES, RANGE_BYTES, Range, split
from storage.s3.retries import Attempts, Limits, allowance_s
from storage.s3.threads import all_of
from streams.deadline import Deadline
from streams.errors import CorruptObject

HASH = "xxh3"
NONCE = "nonce"
HASH_READS = 2  # a second read repairs damage in transit, but not damage in the store


@dataclass(frozen=True, slots=True)
class Content:
    """Bytes of an object, and its head."""

    data: bytes
    found: Found


class Reader:
    """Reads of one bucket; `pool` bounds the requests in flight of all reads together."""

    def __init__(self, client: S3Client, pool: Executor, limits: Limits) -> None:
        self._client, self._pool, self._limits = client, pool, limits

    def read(self, name: str, start: int = 0, end: int | None = None) -> Content:
        """Bytes `[start, end)`, cut off at the object's end. Raises `CorruptObject` if a complete
        object is damaged.
        """
        for _ in range(HASH_READS):
            content = self._read_consistent(name, start, end)
            expected = content.found.metadata.get(HASH)
            whole = len(content.data) == content.found.size
            if not whole or expected is None or content_hash(content.data) == expected:
                return content
        raise CorruptObject(
            f"object {name} differs from the hash that was stored with it; "
            "its writer must write it again"
        )

    def head(self, name: str, deadline: Deadline | None = None) -> Found:
        """Size, etag and metadata. Uses GET, because responses to HEAD carry no error code: a wrong
        access key would look like a missing object.
        """
        attempts = Attempts(deadline or Deadline(self._limits.begin_s))
        return self._read_first(name, Range(0, 1), attempts).found

    def _read_consistent(self, name: str, start: int, end: int | None) -> Content:
        """The range, read again from its beginning if the object was replaced meanwhile."""
        attempts = Attempts(Deadline(self._limits.begin_s))
        while True:
            try:
                return self._read_once(name, start, end, attempts)
            except S3Failure as failure:
                if failure.kind is not Kind.PRECONDITION:
                    raise
                attempts.wait(S3Failure(Kind.CONFLICT, "Replaced", "while it was read", False))

    def _read_once(self, name: str, start: int, end: int | None, attempts: Attempts) -> Content:
        first_end = start + FIRST_BYTES if end is None else min(end, start + FIRST_BYTES)
        first = self._read_first(name, Range(start, first_end), attempts)
        size = first.found.size
        stop = size if end is None else min(end, size)
        if stop <= first_end:
            return first
        deadline = Deadline(allowance_s(self._limits.begin_s, stop - first_end))
        # BytesIO gives its buffer for writing and later returns it as bytes without a copy.
        buffer = BytesIO(bytes(stop - start))
        with buffer.getbuffer() as view:
            view[: len(first.data)] = first.data

            def fetch(wanted: Range) -> None:
                with view[wanted.start - start : wanted.end - start] as room:
                    self._read_into(name, wanted, first.found.etag, room, Attempts(deadline))

            all_of(self._pool, fetch, split(first_end, stop, RANGE_BYTES))
        return Content(buffer.getvalue(), first.found)

    def _read_first(self, name: str, wanted: Range, attempts: Attempts) -> Content:
        """The first bytes of a range that may be empty, which S3 cannot express."""
        if wanted.start == wanted.end:
            return Content(b"", self._read_first(name, Range(0, 1), attempts).found)
        try:
            return self._read_beginning(name, wanted, attempts)
        except S3Failure as failure:
            if failure.kind is not Kind.RANGE:
                raise
        if wanted.start == 0:
            return Content(b"", attempts.run(lambda: self._client.get_empty(name)))
        return Content(b"", self._read_first(name, Range(0, 1), attempts).found)

    def _read_beginning(self, name: str, wanted: Range, attempts: Attempts) -> Content:
        def step() -> Content:
            chunks: list[bytes] = []

            def take(chunk: bytes) -> None:
                _in_time(attempts.deadline)
                chunks.append(chunk)

            found = self._client.get(name, wanted, None, take)
            return Content(b"".join(chunks), found)

        return attempts.run(step)

    def _read_into(
        self, name: str, wanted: Range, etag: str, room: memoryview, attempts: Attempts
    ) -> None:
        def step() -> Found:
            at = 0

            def take(chunk: bytes) -> None:
                nonlocal at
                _in_time(attempts.deadline)
                if len(chunk) > len(room) - at:
                    raise S3Failure(Kind.TRANSIENT, "BadAnswer", f"above {wanted}", False)
                room[at : at + len(chunk)] = chunk
                at += len(chunk)

            return self._client.get(name, wanted, etag, take)

        attempts.run(step)


def _in_time(deadline: Deadline) -> None:
    if deadline.passed():
        raise S3Failure(Kind.TRANSIENT, "TooSlow", "the body did not come in time", False)
