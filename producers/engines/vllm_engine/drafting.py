"""Drafts as the rollout's side of vLLM sees them: what its workers are told to guess from, and what
came of it. The guesses are made beside the model (`proposer.py`).

A core in this process guesses from the very history of the rollout, one in a process of its own
from the node's, which it maps by name.
"""

from collections.abc import Iterable
from itertools import count
from pathlib import Path

from producers.engines.base import DraftStats
from producers.engines.drafts.merged import WithRunning
from producers.engines.drafts.source import DraftSource
from producers.engines.drafts.switch import Switch
from producers.engines.vllm_engine.core import Core
from producers.engines.vllm_engine.exchange import EngineCore
from producers.engines.vllm_engine.tally import Marks, new_tally
from streams.errors import EngineRefused


class Drafting:
    """One engine's, with at most so many sequences in vLLM."""

    def __init__(self, core: Core, source: DraftSource, switch: Switch, slots: int) -> None:
        with new_tally(slots) as (self._tally, path):
            core.draft_from(seen_by(core, source), switch.rule.kind, switch.forced, path)

    def stats(self) -> DraftStats:
        return self._tally.stats()

    def marks(self, stay: int, others: Iterable[Marks | None]) -> Marks:
        """Of a new stay, beside these."""
        taken = {other.place for other in others if other is not None}
        return Marks(self._tally, next(place for place in count() if place not in taken), stay)


def drafting_by(
    core: EngineCore, source: DraftSource | None, switch: Switch, slots: int
) -> Drafting | None:
    """None: nothing is guessed. `EngineRefused` where vLLM cannot see the history."""
    if source is None:
        return None
    if not isinstance(core, Core):
        raise EngineRefused(
            "drafts: a vLLM server that others run guesses as they say; rollouts.drafts must be "
            "'off' with rollouts.vllm.url"
        )
    return Drafting(core, source, switch, slots)


def seen_by(core: Core, source: DraftSource) -> DraftSource | str:
    """The source itself, or the name under which another process maps it."""
    if not core.has_process:
        return source
    node = source.node if isinstance(source, WithRunning) else source
    path = getattr(node, "path", None)
    if path is None:
        raise EngineRefused(
            "drafts: vLLM's core is another process, which sees the node's history only, not one "
            "of the rollout's own (rollouts.vllm.process = false guesses from that)"
        )
    return str(Path(path).absolute())
