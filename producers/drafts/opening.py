"""Opens what a rollout drafts with (`open_drafts`)."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rollstream.producers.drafts.feed import DraftFeed
from rollstream.producers.drafts.gate import WINDOW_RULES, DraftGate
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.node import CombinedSource, NodeHistory, running_tokens
from rollstream.producers.engines.drafting import DraftSource
from rollstream.producers.settings import RolloutSettings
from rollstream.streams.bus import Bus


@dataclass(frozen=True, slots=True)
class RolloutDrafts:
    source: DraftSource
    gate: DraftGate
    feed: DraftFeed


def open_drafts(
    bus: Bus, earlier: Callable[[], Bus], folder: Path, rollouts: RolloutSettings
) -> RolloutDrafts:
    """Join the node's history in the shared memory `folder`; `earlier` opens the log below `bus`'s
    begin.
    """
    node = NodeHistory(folder, rollouts.drafts_tokens, rollouts.drafts_choice)
    feed = DraftFeed(bus, earlier, node)
    feed.poll()  # clears what a killed run left in the history, before the engine reads it
    # What runs in this engine is in a history of its own.
    running_max = running_tokens(rollouts.slots, rollouts.context_max, rollouts.drafts_tokens)
    source = CombinedSource(node, AnswerHistory(running_max, choice=rollouts.drafts_choice))
    return RolloutDrafts(source, DraftGate(WINDOW_RULES[rollouts.drafts_window]), feed)
