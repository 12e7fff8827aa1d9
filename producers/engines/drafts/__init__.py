"""Speculative decoding with drafts from earlier answers to the same prompt (docs/histospec.md)."""

from producers.engines.drafts.history import HistoryAnswer, AnswerHistory, prompt_key
from producers.engines.drafts.source import Draft, DraftSource

__all__ = ["HistoryAnswer", "Draft", "DraftSource", "AnswerHistory", "prompt_key"]
