"""Speculative decoding in vLLM, on the rollout's side: which history the workers draft from, and
the statistics that they write. The drafts are made beside the model (`proposer.py`).

A core in this process drafts from the rollout's own history, one in a process of its own from the
node's history, which it maps by name.
"""

from collections.abc import Iterable
from itertools import count
from pathlib import Path

from rollstream.errors import EngineRefused
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.node import CombinedSource
from rollstream.producers.drafts.source import DraftSource
from rollstream.producers.engines.base import DraftStats
from rollstream.producers.engines.vllm.core import LocalCore
from rollstream.producers.engines.vllm.proposer_speculation import StayDrafts, open_draft_counters
from rollstream.producers.engines.vllm.protocol import EngineCore


class WorkerDrafts:
    """Draft statistics of one engine with at most `slots` sequences in vLLM."""

    def __init__(self, core: LocalCore, source: DraftSource, gate: DraftGate, slots: int) -> None:
        with open_draft_counters(slots) as (self._tally, path):
            core.draft_from(worker_source(core, source), gate.rule.kind, gate.forced, path)

    def stats(self) -> DraftStats:
        return self._tally.stats()

    def marks(self, stay: int, others: Iterable[StayDrafts | None]) -> StayDrafts:
        """Counters for a new stay, at a place that none of the `others` uses."""
        taken = {other.place for other in others if other is not None}
        return StayDrafts(self._tally, next(place for place in count() if place not in taken), stay)


def open_drafts(
    core: EngineCore, source: DraftSource | None, gate: DraftGate, slots: int
) -> WorkerDrafts | None:
    """Turn drafting on; None without a source. Raises `EngineRefused` where vLLM cannot read the
    history.
    """
    if source is None:
        return None
    if not isinstance(core, LocalCore):
        raise EngineRefused(
            "drafts: a vLLM server by URL drafts as it was started; rollouts.drafts must be "
            "'off' with rollouts.vllm.url"
        )
    return WorkerDrafts(core, source, gate, slots)


def worker_source(core: LocalCore, source: DraftSource) -> DraftSource | str:
    """The source itself, or the path at which another process maps it."""
    if not core.has_process:
        return source
    node = source.node if isinstance(source, CombinedSource) else source
    path = getattr(node, "path", None)
    if path is None:
        raise EngineRefused(
            "drafts: vLLM's core is another process, which can read the node's history only, not "
            "the rollout's own (rollouts.vllm.process = false drafts from that)"
        )
    return str(Path(path).absolute())
