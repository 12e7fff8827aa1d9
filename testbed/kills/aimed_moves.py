"""`python -m testbed.kills.aimed_moves COMMAND …` is `testbed.kills.aimed_role` with a kind of its
own for each record of a move, so that a test can aim at the middle of one
(docs/explanation/scheduling.md, "A move").
"""

import sys
from collections.abc import Sequence

from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import decode
from rollstream.streams.records import Assignment, Partial, Record
from testbed.kills import aimed_role

ASKED = "append assignments: asked back for a move"
ORDERED = "append assignments: to go on elsewhere"
GIVEN_UP = "append partials: given up"
WENT_ON = "append partials: went on"


def kind_of(record: Record) -> str | None:
    """The part of a move that this record is, in the order above."""
    match record:
        case Assignment(kind="release", onward=onward) if onward:
            return ASKED
        case Assignment(kind="resume", moves=moves) if moves:
            return ORDERED
        case Partial(last=True):
            return GIVEN_UP
        case Partial(attempt=attempt) if attempt > 1:
            return WENT_ON
        case _:
            return None


class AimedMoves(aimed_role.AimedBus):
    """One kind per append: the first one among its records."""

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        kinds = [kind_of(decode(entry.value).record) for entry in entries if entry.value]
        kind = next((kind for kind in kinds if kind), f"append {topic}")
        return self._gate.write(kind, lambda: self._inner.append(topic, entries))


if __name__ == "__main__":
    aimed_role.AimedBus = AimedMoves  # type: ignore[misc]
    aimed_role.MODULE = "testbed.kills.aimed_moves"
    sys.exit(aimed_role.main())
