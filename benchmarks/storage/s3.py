"""The S3 store against boto3 itself, moving the same shards to and from the same VersityGW server
on this machine.

The reference for reading is boto3 with 8 threads of ranged GETs into one buffer per shard, for
writing `upload_file` (multipart, its own 10 threads) of a file in the page cache. The store also
hashes what it writes and checks what it reads. Both take turns, shard by shard, in alternating
order.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config  # pyright: ignore[reportMissingTypeStubs]

from benchmarks.case import Case, paired
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.s3.address import S3Address, parse_s3_url
from testbed.servers import versity

THREADS = 8
RANGE_BYTES = 8 << 20


def cases(quick: bool) -> Iterator[Case]:
    """Puts and gets 1 GiB in shards of 256 MiB (quick: 128 MiB in shards of 64)."""
    shards, shard_bytes, pairs = (2, 64 << 20, 3) if quick else (4, 256 << 20, 5)
    url = versity.new_url()
    place, store = parse_s3_url(url), open_store(url)
    reference = _Boto(place)
    data = os.urandom(shard_bytes)
    note = f"{shards} × {shard_bytes >> 20} MiB, VersityGW on the same cores"
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()

        def put(shard: int) -> None:
            store.put(f"ours-{shard}", data)

        def put_plain(shard: int) -> None:
            reference.upload(Path(file.name), f"plain-{shard}")

        values, plain = _pairs(put, put_plain, shards, shard_bytes, pairs)
    yield paired("s3_put", values, "MB/s", "boto3 upload_file", plain, 0.9, note)

    def get(shard: int) -> None:
        assert len(store.get(f"ours-{shard}")) == shard_bytes

    def get_plain(shard: int) -> None:
        assert len(reference.download(f"plain-{shard}", shard_bytes)) == shard_bytes

    values, plain = _pairs(get, get_plain, shards, shard_bytes, pairs)
    yield paired("s3_get", values, "MB/s", "boto3, 8 threads of ranges", plain, 0.9, note)
    for entry in list(store.list()):
        store.delete(entry.key)


class _Boto:
    """The same with boto3 alone."""

    def __init__(self, place: S3Address) -> None:
        self._place = place
        config = Config(max_pool_connections=2 * THREADS, s3={"addressing_style": "path"})
        self._client: Any = boto3.client(
            "s3", endpoint_url=place.endpoint, region_name="us-east-1", config=config
        )
        self._pool = ThreadPoolExecutor(THREADS)

    def upload(self, path: Path, key: str) -> None:
        self._client.upload_file(str(path), self._place.bucket, f"{self._place.prefix}/{key}")

    def download(self, key: str, size: int) -> bytearray:
        buffer = bytearray(size)
        view = memoryview(buffer)

        def fetch(start: int) -> None:
            end = min(size, start + RANGE_BYTES)
            answer = self._client.get_object(
                Bucket=self._place.bucket,
                Key=f"{self._place.prefix}/{key}",
                Range=f"bytes={start}-{end - 1}",
            )
            view[start:end] = answer["Body"].read()

        list(self._pool.map(fetch, range(0, size, RANGE_BYTES)))
        return buffer


def _pairs(
    ours: Callable[[int], None],
    plain: Callable[[int], None],
    shards: int,
    shard_bytes: int,
    pairs: int,
) -> tuple[list[float], list[float]]:
    """MB/s of each side in each pair; the first pair only warms connections and the server."""
    speeds: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        seconds = [0.0, 0.0]
        for shard in range(shards):
            for side in (0, 1) if (pair + shard) % 2 else (1, 0):
                started = time.perf_counter()
                (ours, plain)[side](shard)
                seconds[side] += time.perf_counter() - started
        if pair:
            for side in (0, 1):
                speeds[side].append(shards * shard_bytes / 1e6 / seconds[side])
    return speeds
