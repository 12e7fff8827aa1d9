"""Reads S3 objects, never mixed from two of one name: further requests require the etag of the
first.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from dataclasses import dataclass
from io import BytesIO
from typing import TypeVar

from rollstream.deadline import Deadline
from rollstream.errors import CorruptObject
from rollstream.storage.stores.base import content_hash
from rollstream.storage.stores.s3.client import (
    FIRST_BYTES,
    RANGE_BYTES,
    ByteRange,
    ObjectHead,
    S3Client,
    split_range,
)
from rollstream.storage.stores.s3.errors import (
    Attempts,
    FailureKind,
    S3Failure,
    TimeLimits,
    allowance_s,
)

_P = TypeVar("_P")
_T = TypeVar("_T")


def run_in_parallel(pool: Executor, work: Callable[[_P], _T], pieces: Sequence[_P]) -> list[_T]:
    """Returns results in the order of the pieces, or raises the error of one; then no piece is
    still running.
    """
    futures = [pool.submit(work, piece) for piece in pieces]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)
    for future in futures:
        if not future.cancelled() and (error := future.exception()) is not None:
            raise error
    return [future.result() for future in futures]


HASH = "xxh3"  # metadata key of the object's hash
NONCE = "nonce"  # metadata key by which a writer recognises its own object after a lost response
HASH_READS = 2  # reads before an error: a second one repairs damage in transit, not in the store


@dataclass(frozen=True, slots=True)
class ObjectContent:
    data: bytes
    found: ObjectHead


class S3Reader:
    """Threads may share it. `pool` runs the parallel requests of all reads, and so bounds how many
    are in flight. A request that keeps failing raises `S3Failure`.
    """

    def __init__(self, client: S3Client, pool: Executor, limits: TimeLimits) -> None:
        self._client, self._pool, self._limits = client, pool, limits

    def read(self, name: str, start: int = 0, end: int | None = None) -> ObjectContent:
        """Returns `[start, end)`, cut off at the object's end. Raises `CorruptObject` if a complete
        object differs from its hash twice.
        """
        for _ in range(HASH_READS):
            content = self._read_consistent(name, start, end)
            expected = content.found.metadata.get(HASH)
            is_whole = len(content.data) == content.found.size
            if not is_whole or expected is None or content_hash(content.data) == expected:
                return content
        raise CorruptObject(
            f"object {name} differs from the hash that was stored with it; "
            "its writer must write it again"
        )

    def head(self, name: str, deadline: Deadline | None = None) -> ObjectHead:
        attempts = Attempts(deadline or Deadline(self._limits.begin_s))
        # GET, because a failed HEAD has no error code in its response: a wrong access key would
        # look like a missing object.
        return self._read_first(name, ByteRange(0, 1), attempts).found

    def _read_consistent(self, name: str, start: int, end: int | None) -> ObjectContent:
        attempts = Attempts(Deadline(self._limits.begin_s))
        while True:
            try:
                return self._read_once(name, start, end, attempts)
            except S3Failure as failure:
                if failure.kind is not FailureKind.PRECONDITION:
                    raise
                # The whole range is read again, so that it is of one object.
                attempts.wait(
                    S3Failure(FailureKind.CONFLICT, "Replaced", "while it was read", False)
                )

    def _read_once(
        self, name: str, start: int, end: int | None, attempts: Attempts
    ) -> ObjectContent:
        """Raises an `S3Failure` of kind `PRECONDITION` if the object was replaced in between."""
        first_end = start + FIRST_BYTES if end is None else min(end, start + FIRST_BYTES)
        first = self._read_first(name, ByteRange(start, first_end), attempts)
        size = first.found.size
        stop = size if end is None else min(end, size)
        if stop <= first_end:
            return first
        deadline = Deadline(allowance_s(self._limits.begin_s, stop - first_end))
        # BytesIO gives its buffer for writing and later returns it as bytes without a copy.
        buffer = BytesIO(bytes(stop - start))
        with buffer.getbuffer() as view:
            view[: len(first.data)] = first.data

            def fetch(part: ByteRange) -> None:
                with view[part.start - start : part.end - start] as target:
                    self._read_into(name, part, first.found.etag, target, Attempts(deadline))

            run_in_parallel(self._pool, fetch, split_range(first_end, stop, RANGE_BYTES))
        return ObjectContent(buffer.getvalue(), first.found)

    def _read_first(self, name: str, requested: ByteRange, attempts: Attempts) -> ObjectContent:
        # S3 rejects an empty range and one beyond the object's end; these have no bytes, only the
        # head.
        if requested.start == requested.end:
            return ObjectContent(b"", self._read_first(name, ByteRange(0, 1), attempts).found)
        try:
            return self._read_beginning(name, requested, attempts)
        except S3Failure as failure:
            if failure.kind is not FailureKind.RANGE:
                raise
        if requested.start == 0:
            return ObjectContent(b"", attempts.run(lambda: self._client.get_empty(name)))
        return ObjectContent(b"", self._read_first(name, ByteRange(0, 1), attempts).found)

    def _read_beginning(self, name: str, requested: ByteRange, attempts: Attempts) -> ObjectContent:

        def step() -> ObjectContent:
            chunks: list[bytes] = []

            def take(chunk: bytes) -> None:
                _check_deadline(attempts.deadline)
                chunks.append(chunk)

            head = self._client.get(name, requested, None, take)
            return ObjectContent(b"".join(chunks), head)

        return attempts.run(step)

    def _read_into(
        self, name: str, requested: ByteRange, etag: str, target: memoryview, attempts: Attempts
    ) -> None:

        def step() -> ObjectHead:
            filled = 0

            def take(chunk: bytes) -> None:
                nonlocal filled
                _check_deadline(attempts.deadline)
                if len(chunk) > len(target) - filled:
                    raise S3Failure(FailureKind.TRANSIENT, "BadAnswer", f"above {requested}", False)
                target[filled : filled + len(chunk)] = chunk
                filled += len(chunk)

            return self._client.get(name, requested, etag, take)

        attempts.run(step)


def _check_deadline(deadline: Deadline) -> None:
    # A response may arrive steadily, but for ever.
    if deadline.passed():
        raise S3Failure(FailureKind.TRANSIENT, "TooSlow", "the body did not come in time", False)
