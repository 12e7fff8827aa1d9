"""Speculative decoding with drafts from earlier answers to the same prompt (docs/histospec.md)."""

from rollstream.producers.drafts.history import HistoryAnswer, AnswerHistory, prompt_key
from rollstream.producers.drafts.source_part import Draft, DraftSource

__all__ = ["HistoryAnswer", "Draft", "DraftSource", "AnswerHistory", "prompt_key"]
