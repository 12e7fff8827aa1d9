"""Delta codec: encodes one tensor's bytes as the difference from the parent version's, and applies
it.

`codec` chooses the smallest coding and applies it. `coding` has the types and the byte streams,
`sparse` the payload of changed elements.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.storage.weights.delta.codec import (
        apply_tensor as apply_tensor,
        encode_tensor as encode_tensor,
        encode_whole as encode_whole,
    )
    from rollstream.storage.weights.delta.coding import (
        Changes as Changes,
        CodedTensor as CodedTensor,
        Coding as Coding,
        ValueCoding as ValueCoding,
        squash as squash,
    )

__getattr__ = lazy_exports(__name__)
