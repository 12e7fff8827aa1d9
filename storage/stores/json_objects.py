"""Small JSON objects as typed values, or with their own hash. Encoding is canonical (sorted keys):
equal values are equal bytes.
"""

from typing import Any, TypeVar

import msgspec

from rollstream.errors import CorruptObject, NewerRelease, ObjectExists, StoreError
from rollstream.foreign_json import parse_json
from rollstream.storage.stores.base import Data, ObjectStore, content_hash
from rollstream.streams.release import upgrade_advice

FORMAT = 1
"""What this release writes, and the highest that it reads unless `format_max` is given; objects
without a number have 1. A higher number raises `NewerRelease` (invariant 14): otherwise a
checkpoint of a newer release would count as damaged, and training would resume from an older one.
"""

_T = TypeVar("_T")


class _Numbered(msgspec.Struct):
    format: int = 1


def encode_json(value: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(value, order="sorted"), indent=1)


def decode_json(data: bytes, type_: type[_T], key: str, format_max: int = FORMAT) -> _T:
    """Raises `CorruptObject`, which names the key, if the data is not a value of `type_`, and
    `NewerRelease` if its format is above `format_max`.
    """
    try:
        number = parse_json(data, _Numbered).format
    except ValueError:  # no JSON object, or a damaged one: the decode below raises
        number = FORMAT
    if number > format_max:
        raise NewerRelease(
            f"object {key} has format {number}, and formats up to {format_max} are known; "
            f"{upgrade_advice('')}"
        )
    try:
        return parse_json(data, type_)
    except ValueError as error:
        raise CorruptObject(f"object {key} is not a {type_.__name__}: {error}") from error


class _Sealed(msgspec.Struct):
    body: msgspec.Raw
    hash: str


def seal(value: Any) -> bytes:
    """Returns the value and its hash, for objects whose hash is stored nowhere else."""
    body = msgspec.json.encode(value, order="sorted")
    return msgspec.json.encode(_Sealed(msgspec.Raw(body), content_hash(body)))


def unseal(data: bytes, type_: type[_T], key: str, format_max: int = FORMAT) -> _T:
    """Raises `CorruptObject` if the value's hash is not the one in the object, and the errors of
    `decode_json`.
    """
    sealed = decode_json(data, _Sealed, key)
    if content_hash(bytes(sealed.body)) != sealed.hash:
        raise CorruptObject(f"object {key} differs from the hash in it")
    return decode_json(bytes(sealed.body), type_, key, format_max)


def create_idempotent(store: ObjectStore, key: str, data: Data) -> str:
    """Creates an object, or does nothing if it exists with exactly this content; returns its hash.
    Raises `StoreError` if the key has other content, because a created object never changes
    (invariant 6).
    """
    expected = content_hash(data)
    try:
        store.create(key, data)
    except ObjectExists:
        present = content_hash(store.get(key))
        if present != expected:
            raise StoreError(
                f"object {key} exists with other content (hash {present}, not {expected}): "
                "two writers used the same number and term"
            ) from None
    return expected
