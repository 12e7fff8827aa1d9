"""Small JSON objects of the store as typed values, and creating objects that may be there already.

Encoding is canonical (sorted keys), so equal values are equal bytes and a hash of one is a hash of
the other. Decoding ignores unknown fields; anything else that does not fit is a `CorruptObject`
that names the key.

Every such object may carry the number of its form under `format`; one without it has form 1. A
higher number than this release reads is `NewerRelease` (invariant 14). What this stops: a newer
checkpoint counts as damaged, and an older one is trained again.
"""

from typing import Any, TypeVar

import msgspec

from storage.hashing import content_hash
from storage.objects import Data, ObjectStore
from streams.errors import CorruptObject, NewerRelease, ObjectExists, StoreError
from streams.release import advice

FORMAT = 1
"""The highest form that this release reads, and the one that it writes."""

_T = TypeVar("_T")


class _Numbered(msgspec.Struct):
    format: int = 1


def encode(value: Any) -> bytes:
    """The value's one JSON form, indented for people."""
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=1)


def decode(data: bytes, type_: type[_T], key: str) -> _T:
    """The value in `data`, which was read from `key`; `CorruptObject` if it is not one,
    `NewerRelease` if it has a form that this release does not read.
    """
    try:
        number = msgspec.json.decode(data, type=_Numbered).format
    except msgspec.DecodeError:  # no object, or damaged: see below
        number = FORMAT
    if number > FORMAT:
        raise NewerRelease(
            f"object {key} has format {number}, and formats up to {FORMAT} are known; {advice('')}"
        )
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.DecodeError as error:
        raise CorruptObject(f"object {key} is not a {type_.__name__}: {error}") from error


class _Sealed(msgspec.Struct):
    body: msgspec.Raw
    hash: str


def seal(value: Any) -> bytes:
    """The value's JSON together with its hash, for objects whose hash is kept nowhere else."""
    body = msgspec.json.encode(value, order="sorted")
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), content_hash(body)))


def unseal(data: bytes, type_: type[_T], key: str) -> _T:
    """The value that was sealed; `CorruptObject` if a single bit of it changed."""
    sealed = decode(data, _Sealed, key)
    if content_hash(bytes(sealed.body)) != sealed.hash:
        raise CorruptObject(f"object {key} differs from the hash in it")
    return decode(bytes(sealed.body), type_, key)


def create_same(store: ObjectStore, key: str, data: Data) -> str:
    """Create the object, or find it there with this very content; returns its hash.

    What a writer that was killed half-way calls again. Other content under the key is a
    `StoreError`: what was created never changes (invariant 6).
    """
    wanted = content_hash(data)
    try:
        store.create(key, data)
    except ObjectExists:
        present = content_hash(store.get(key))
        if present != wanted:
            raise StoreError(
                f"object {key} exists with other content (hash {present}, not {wanted}): "
                "two writers used the same number and term"
            ) from None
    return wanted
