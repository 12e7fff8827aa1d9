"""Speculative decoding with drafts from earlier answers to the same prompt (docs/histospec.md)."""

from rollstream.producers.drafts.history import AnswerHistory, HistoryAnswer, prompt_key
from rollstream.producers.drafts.source import Draft, DraftSource

__all__ = ["AnswerHistory", "Draft", "DraftSource", "HistoryAnswer", "prompt_key"]
