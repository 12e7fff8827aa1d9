"""Drafts as the rollout's side of vLLM sees them: what its workers are told to guess from, and what
came of it. The guesses are made beside the model (`proposer.py`).

A core in this process guesses from the very history of the rollout, one in a process of its own
from the node's, which it maps by name.
"""

import time
from collections.abc import Callable
from pathlib import Path

from producers.engines.base import DraftStats
from producers.engines.drafts.merged import WithRunning
from producers.engines.drafts.source import DraftSource
from producers.engines.drafts.switch import Switch
from producers.engines.vllm_engine.core import Core
from producers.engines.vllm_engine.exchange import EngineCore
from streams.errors import EngineRefused

ASK_S = 1.0  # between two questions to a core in another process: each waits for the end of a step


class Drafting:
    """One engine's."""

    def __init__(
        self,
        core: Core,
        source: DraftSource,
        switch: Switch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._clock = core, clock
        self._stats, self._asked_s, self._asked_tokens = DraftStats(), -ASK_S, 0
        core.draft_from(seen_by(core, source), switch.rule.kind, switch.forced)

    def stats(self, tokens: int, idle: bool) -> DraftStats:
        """After `tokens` were generated; they may be a second old while vLLM is at work."""
        now = self._clock()
        if tokens != self._asked_tokens and (idle or now - self._asked_s >= ASK_S):
            self._stats, self._asked_s, self._asked_tokens = self._core.drafted(), now, tokens
        return self._stats


def drafting_by(core: EngineCore, source: DraftSource | None, switch: Switch) -> Drafting | None:
    """None: nothing is guessed. `EngineRefused` where vLLM cannot see the history."""
    if source is None:
        return None
    if not isinstance(core, Core):
        raise EngineRefused(
            "drafts: a vLLM server that others run guesses as they say; rollouts.drafts must be "
            "'off' with rollouts.vllm.url"
        )
    return Drafting(core, source, switch)


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
