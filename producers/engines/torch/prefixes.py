"""The prefix cache: a prompt is prefilled once for its group, and the KV is copied to each row.

Entries are keyed by the tokens and dropped when the weights change, so no KV is reused across
versions. The prompts of waiting sequences are prefilled ahead, many per pass, before slots are free
for them.
"""

from collections import OrderedDict
from collections.abc import Iterable

import torch

from rollstream.producers.engines.torch.decoder import Decoder
from rollstream.producers.engines.torch.prefill import CacheExtension, extend_caches
from rollstream.producers.engines.torch.sequence import TorchSequence

AHEAD_TOKENS = 1024  # most tokens prefilled at once, unless one prompt alone is longer
AHEAD_PROMPTS = 32


class PrefixCache:
    """At most `tokens_max` cached tokens (or one longer prompt); least recently used are
    evicted.
    """

    def __init__(self, decoder: Decoder, tokens_max: int) -> None:
        self.decoder, self.tokens_max = decoder, tokens_max
        self._entries: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._tokens = 0

    def get(self, waiting: Iterable[TorchSequence]) -> torch.Tensor | None:
        """KV of all tokens but the newest of the first waiting sequence; None if it has only
        one.
        """
        first = next(iter(waiting)).prefix.tobytes()
        if not first:
            return None
        if first not in self._entries:
            self._prefill(waiting)
        self._entries.move_to_end(first)
        return self._entries[first]

    def clear(self) -> None:
        """Drop all entries, because the weights change."""
        self._entries.clear()
        self._tokens = 0

    def _prefill(self, waiting: Iterable[TorchSequence]) -> None:
        ahead: dict[bytes, CacheExtension] = {}
        budget = min(AHEAD_TOKENS, self.tokens_max)
        for sequence in waiting:
            prefix = sequence.prefix
            budget -= len(prefix)
            if ahead and (budget < 0 or len(ahead) == AHEAD_PROMPTS):
                break
            key = prefix.tobytes()
            if key and key not in self._entries:
                ahead[key] = CacheExtension(prefix)
        for key, kv in zip(ahead, extend_caches(self.decoder, list(ahead.values())), strict=True):
            assert kv is not None
            self._entries[key] = kv
            self._tokens += kv.shape[2]
        first = next(iter(ahead))
        self._entries.move_to_end(first)
        while self._tokens > self.tokens_max and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._tokens -= dropped.shape[2]
