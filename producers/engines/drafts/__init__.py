"""Speculative decoding with drafts from earlier answers to the same prompt (docs/histospec.md)."""

from producers.engines.drafts.history import Answer, History, prompt_key
from producers.engines.drafts.source import Draft, DraftSource

__all__ = ["Answer", "Draft", "DraftSource", "History", "prompt_key"]
