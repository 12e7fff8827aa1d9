"""Speculative decoding with drafts from earlier answers to the same prompt (docs/histospec.md).

`source` is the contract of a draft source. `history` keeps answers in a ring with an n-gram
`index`, in private or shared memory (`shared_memory`); `node` shares one history between the
rollouts of a node, and `feed` fills it from the log. `speculation` makes and verifies the drafts of
an engine: `acceptance` estimates acceptance probabilities, `planner` chooses draft lengths, and
`gate` turns drafting on and off.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollstream.producers.drafts.gate import DraftGate
    from rollstream.producers.drafts.history import AnswerHistory, HistoryAnswer, prompt_key
    from rollstream.producers.drafts.node import CombinedSource, NodeHistory
    from rollstream.producers.drafts.source import Draft, DraftSource
    from rollstream.producers.drafts.speculation import Speculation

__all__ = [
    "AnswerHistory",
    "CombinedSource",
    "Draft",
    "DraftGate",
    "DraftSource",
    "HistoryAnswer",
    "NodeHistory",
    "Speculation",
    "prompt_key",
]

_MODULES = {
    "AnswerHistory": "history",
    "HistoryAnswer": "history",
    "prompt_key": "history",
    "DraftGate": "gate",
    "CombinedSource": "node",
    "NodeHistory": "node",
    "Draft": "source",
    "DraftSource": "source",
    "Speculation": "speculation",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
