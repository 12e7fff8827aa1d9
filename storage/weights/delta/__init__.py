"""Delta codec: encodes one tensor's bytes as the difference from the parent version's, and applies
it.
"""

from rollstream.storage.weights.delta.codec import apply_tensor, encode_tensor, encode_whole
from rollstream.storage.weights.delta.coding import (
    Changes,
    CodedTensor,
    Coding,
    ValueCoding,
    squash,
)

__all__ = [
    "Changes",
    "CodedTensor",
    "Coding",
    "ValueCoding",
    "apply_tensor",
    "encode_tensor",
    "encode_whole",
    "squash",
]
