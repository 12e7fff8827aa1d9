"""Delta codec: encodes one tensor's bytes as the difference from the parent version's, and applies
it.
"""

from storage.delta.apply import apply_tensor
from storage.delta.coded import Changes, CodedTensor, Coding, ValueCoding, squash
from storage.delta.encode import encode_tensor, encode_whole

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
