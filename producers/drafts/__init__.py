"""Speculative decoding with drafts from earlier answers to the same prompt
(docs/explanation/drafts.md).

`history` keeps answers in a ring with an n-gram `index`, in private or shared memory
(`shared_memory`); `index` also has the contract of a draft source. `node` shares one history
between the rollouts of a node, and `feed` fills it from the log. `speculation` makes and verifies
the drafts of an engine: `planner` estimates acceptance probabilities and chooses draft lengths, and
`gate` turns drafting on and off.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.producers.drafts.gate import DraftGate as DraftGate
    from rollstream.producers.drafts.history import (
        AnswerHistory as AnswerHistory,
        HistoryAnswer as HistoryAnswer,
        prompt_key as prompt_key,
    )
    from rollstream.producers.drafts.index import (
        Draft as Draft,
        DraftSource as DraftSource,
    )
    from rollstream.producers.drafts.node import (
        CombinedSource as CombinedSource,
        NodeHistory as NodeHistory,
    )
    from rollstream.producers.drafts.speculation import Speculation as Speculation

__getattr__ = lazy_exports(__name__)
