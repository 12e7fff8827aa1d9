"""The file that KV is handed over in: what it is of, the exact tokens, then the bytes.

    "RSKV0001"  length of the head (u32)  number of tokens (u32)  xxh3-128 of head and tokens
    head: JSON  tokens: u32 each  body: the whole blocks of each layer, one layer after the other

Little-endian. A reader believes nothing that it has not checked: sizes, both hashes, every field. A
file that is torn, short, foreign or nonsense is no file (None), never an error.
"""

import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from storage.objects import Data
from storage.own_files import open_own
from streams.records import Tokens, Version

MAGIC = b"RSKV0001"
HEAD_MAX = 1 << 20  # bytes; a version in it takes some ten
TOKENS_MAX = 1 << 24
_FIXED = struct.Struct("<8sII16s")


@dataclass(frozen=True, slots=True)
class Front:
    """What the body is: the KV of all `tokens`, `block` a block, laid out as `layout` says.

    `identity` is the hash that only this very front has; the body begins at `begin`.
    """

    run: str
    trajectory: str
    versions: frozenset[Version]
    layout: str
    block: int
    tokens: Tokens
    body_bytes: int
    body_hash: str
    identity: str = ""
    begin: int = 0


def encode_front(front: Front) -> bytes:
    head = json.dumps(
        {
            "run": front.run,
            "trajectory": front.trajectory,
            "versions": sorted([v.number, v.term] for v in front.versions),
            "layout": front.layout,
            "block": front.block,
            "body_bytes": front.body_bytes,
            "body_hash": front.body_hash,
        }
    ).encode()
    tokens = front.tokens.astype("<u4").tobytes()
    digest = xxhash.xxh3_128_digest(head + tokens)
    return _FIXED.pack(MAGIC, len(head), len(front.tokens), digest) + head + tokens


def read_front(path: Path) -> Front | None:
    """Of a file whose size is what its front says."""
    try:
        with os.fdopen(open_own(path), "rb") as file:
            return _front(file.fileno())
    except OSError:
        return None


def read_body(path: Path, identity: str) -> tuple[Front, NDArray[np.uint8]] | None:
    """Front and body of the file with this identity, in memory of our own: what happens to the file
    from here on changes nothing.
    """
    try:
        with os.fdopen(open_own(path), "rb") as file:
            front = _front(file.fileno())
            if front is None or front.identity != identity:
                return None
            body = np.empty(front.body_bytes, np.uint8)
            file.seek(front.begin)
            read = file.readinto(body.data)
    except (OSError, MemoryError):
        return None
    if read != len(body) or hash_of([body.data]) != front.body_hash:
        return None
    return front, body


def hash_of(parts: Sequence[Data]) -> str:
    """Of a body."""
    hasher = xxhash.xxh3_128()
    for part in parts:
        hasher.update(part)
    return hasher.hexdigest()


def _front(descriptor: int) -> Front | None:
    fixed = os.pread(descriptor, _FIXED.size, 0)
    if len(fixed) < _FIXED.size:
        return None
    magic, head_bytes, count, digest = _FIXED.unpack(fixed)
    if magic != MAGIC or head_bytes > HEAD_MAX or count > TOKENS_MAX:
        return None
    rest = os.pread(descriptor, head_bytes + 4 * count, _FIXED.size)
    if len(rest) < head_bytes + 4 * count or xxhash.xxh3_128_digest(rest) != digest:
        return None
    front = _decoded(rest[:head_bytes], rest[head_bytes:], digest.hex())
    if front is None or os.fstat(descriptor).st_size != front.begin + front.body_bytes:
        return None
    return front


def _decoded(head: bytes, tokens: bytes, identity: str) -> Front | None:
    try:
        said = json.loads(head)
        return Front(
            run=str(said["run"]),
            trajectory=str(said["trajectory"]),
            versions=frozenset(Version(int(n), int(t)) for n, t in said["versions"]),
            layout=str(said["layout"]),
            block=int(said["block"]),
            tokens=np.frombuffer(tokens, "<u4").astype(np.uint32),
            body_bytes=int(said["body_bytes"]),
            body_hash=str(said["body_hash"]),
            identity=identity,
            begin=_FIXED.size + len(head) + len(tokens),
        )
    except (ValueError, KeyError, TypeError, OverflowError):
        return None
