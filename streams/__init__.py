"""Streams: the records of a run, and the log that carries them.

`records` (with `ledger_records` and `status_records`) and `values` define every record, `codec` its
bytes, `topics` the catalogue of topics. `bus` is the contract of the log; `sqlite/` and `kafka/`
implement it, and `connect` opens one from its URL. Roles write with `writer` and read with
`reader`, which applies the `fence` of single-holder roles and writes `dead_letters`; consumer
groups spread partitions over members. `fence` also removes the old end of a topic, `removal` a
whole run. `foreign_text` makes text and JSON of other programs clean where they enter, `admissible`
decides which trajectories and partials are valid, `branches` reads the paths of episodes,
`failures` gives the causes of failures, `tails` is the rule for short answers beside long ones;
`release` decides which releases can work together.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.streams.admissible import (
        BelievedVersions as BelievedVersions,
        Refusal as Refusal,
        TrainingBounds as TrainingBounds,
        refusal as refusal,
    )
    from rollstream.streams.bus import (
        AppendEntry as AppendEntry,
        Bus as Bus,
        BusWrapper as BusWrapper,
        GroupReader as GroupReader,
        Message as Message,
    )
    from rollstream.streams.codec import (
        Decoded as Decoded,
        Envelope as Envelope,
        decode as decode,
        encode as encode,
        record_hash as record_hash,
    )
    from rollstream.streams.connect import (
        check_reachable as check_reachable,
        open_bus as open_bus,
    )
    from rollstream.streams.dead_letters import DeadLetterWriter as DeadLetterWriter
    from rollstream.streams.fence import truncate as truncate
    from rollstream.streams.reader import (
        Received as Received,
        TopicReader as TopicReader,
        classify_message as classify_message,
        from_begin as from_begin,
        from_end as from_end,
        read_at as read_at,
    )
    from rollstream.streams.release import RELEASE as RELEASE
    from rollstream.streams.topics import (
        Topic as Topic,
        catalogue as catalogue,
        partition_of as partition_of,
    )
    from rollstream.streams.writer import (
        FencedWriter as FencedWriter,
        publish as publish,
        publish_all as publish_all,
    )

__getattr__ = lazy_exports(__name__)

if __name__ == "streams":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.streams", name="streams")
