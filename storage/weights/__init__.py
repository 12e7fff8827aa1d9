"""Weight versions: immutable, checksummed sets of objects, published by the trainer and fetched by
rollouts.

`publish` writes a version, as an anchor or as a delta (`delta/`), in files (`shards`) that a
`manifest` completes; `pointer` makes it the believed one. `anchors` decides when an anchor is due,
`retention` which versions are deleted. A reader plans the cheapest path to each tensor
(`fetch_plan`) and executes it (`fetch_execution`); `fetch` returns tensors once, or writes a
version as a folder; `resident` keeps them in memory and updates them, `mapped` in a file;
`streamed` decodes them from an engine's own memory, without a copy. `tensors` converts tensors to
bytes, also those that several processes hold. `adapters` publishes and reads LoRA versions.
`verify` checks and compares versions.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.storage.weights.fetch import (
        export_version as export_version,
        fetch_model_file as fetch_model_file,
        fetch_tensors as fetch_tensors,
    )
    from rollstream.storage.weights.manifest import (
        Manifest as Manifest,
        read_manifest as read_manifest,
    )
    from rollstream.storage.weights.pointer import (
        Pointer as Pointer,
        advance_pointer as advance_pointer,
        read_pointer as read_pointer,
        take_pointer as take_pointer,
    )
    from rollstream.storage.weights.publish import (
        announcement as announcement,
        publish_version as publish_version,
    )
    from rollstream.storage.weights.resident import (
        ResidentUpdate as ResidentUpdate,
        ResidentWeights as ResidentWeights,
    )
    from rollstream.storage.weights.retention import (
        delete_versions as delete_versions,
        plan_retention as plan_retention,
        stored_versions as stored_versions,
    )
    from rollstream.storage.weights.verify import (
        compare_versions as compare_versions,
        verify_version as verify_version,
    )

__getattr__ = lazy_exports(__name__)
