"""The KV of sequences before their first decode step. The newest token is not prefilled: it is the
input of that step.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollstream.producers.engines.torch.decoder import Decoder, PrefillBatch
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.streams.values import Tokens, Version

PASS_TOKENS = 4096  # of one forward pass, padding included, unless one sequence alone has more


@dataclass(frozen=True, slots=True)
class CacheExtension:
    """`past` is the KV of cached tokens (2 · layers, heads, length, width). `version` is the
    adapter's; None: the newest.
    """

    tokens: Tokens
    past: torch.Tensor | None = None
    version: Version | None = None

    @property
    def past_length(self) -> int:
        return 0 if self.past is None else self.past.shape[2]


def extend_caches(
    decoder: Decoder, extensions: Sequence[CacheExtension]
) -> list[torch.Tensor | None]:
    """Returns the KV of past and new tokens together; None for a sequence without tokens."""
    caches: list[torch.Tensor | None] = [extension.past for extension in extensions]
    waiting = [index for index, extension in enumerate(extensions) if len(extension.tokens)]
    # Sequences with similar numbers of new tokens share a forward pass, with little padding.
    waiting.sort(key=lambda index: len(extensions[index].tokens))
    for part in _passes(extensions, waiting):
        new = decoder.prefill(_pack(decoder, [extensions[index] for index in part]))
        for place, index in enumerate(part):
            new_kv = new[:, place, :, new.shape[3] - len(extensions[index].tokens) :]
            past = extensions[index].past
            caches[index] = new_kv.clone() if past is None else torch.cat((past, new_kv), 2)
    return caches


def _passes(extensions: Sequence[CacheExtension], ascending: list[int]) -> list[list[int]]:
    passes: list[list[int]] = []
    for index in ascending:
        length = len(extensions[index].tokens)
        # Ascending lengths: the newest one decides the padded size of the pass.
        if passes and (len(passes[-1]) + 1) * length <= PASS_TOKENS:
            passes[-1].append(index)
        else:
            passes.append([index])
    return passes


def _pack(decoder: Decoder, extensions: Sequence[CacheExtension]) -> PrefillBatch:
    rows = len(extensions)
    new = max(len(extension.tokens) for extension in extensions)
    before = max(extension.past_length for extension in extensions)
    ids = np.zeros((rows, new), np.int64)
    positions = np.zeros((rows, new), np.int64)
    seen = np.zeros((rows, new, before + new), bool)
    causal = np.tri(new, dtype=bool)
    for row, extension in enumerate(extensions):
        length, past = len(extension.tokens), extension.past_length
        # Padded on the left, so every newest token is in the last column.
        ids[row, new - length :] = extension.tokens
        positions[row, new - length :] = np.arange(past, past + length)
        seen[row, :, before - past : before] = True
        seen[row, :, before + new - length :] = causal[:, new - length :]
    # Padding attends to itself, so that its values stay finite.
    seen[:, :, before:] |= np.eye(new, dtype=bool)
    mask = torch.zeros(seen.shape, dtype=decoder.dtype).masked_fill_(
        torch.from_numpy(~seen),  # pyright: ignore[reportUnknownMemberType]
        -torch.inf,
    )
    return PrefillBatch(
        ids=torch.from_numpy(ids).to(decoder.device),  # pyright: ignore[reportUnknownMemberType]
        positions=torch.from_numpy(positions).to(decoder.device),  # pyright: ignore[reportUnknownMemberType]
        mask=mask.unsqueeze(1).to(decoder.device),
        past=_packed_past(decoder, extensions, before) if before else None,
        routes=decoder.adapters
        and decoder.adapters.routes([extension.version for extension in extensions], new),
    )


def _packed_past(
    decoder: Decoder, extensions: Sequence[CacheExtension], before: int
) -> torch.Tensor:
    shape = decoder.kv
    packed = torch.zeros(
        2 * shape.layers,
        len(extensions),
        shape.heads,
        before,
        shape.width,
        dtype=decoder.dtype,
        device=decoder.device,
    )
    for row, extension in enumerate(extensions):
        if extension.past is not None:
            packed[:, row, :, before - extension.past_length :] = extension.past
    return packed


PrefixKey = tuple[Version | None, bytes]
"""The version that a sequence names (None: the newest), and the bytes of its tokens without the
newest.
"""


def _key(sequence: TorchSequence) -> PrefixKey:
    return sequence.request.version, sequence.prefix.tobytes()


AHEAD_TOKENS = 1024  # most tokens that a miss prefills, unless one prompt alone has more
AHEAD_PROMPTS = 32  # most prompts that a miss prefills


class PrefixCache:
    """The KV of prompts without their newest token: at most `tokens_max` tokens in all, or one
    longer prompt; the least recently used are evicted. The engine drops entries when weights change
    (`clear`) or adapters are dropped (`keep`), so no KV is used under another version.
    """

    def __init__(self, decoder: Decoder, tokens_max: int) -> None:
        self.decoder, self.tokens_max = decoder, tokens_max
        self._entries: OrderedDict[PrefixKey, torch.Tensor] = OrderedDict()
        self._tokens = 0

    def get(self, waiting: Iterable[TorchSequence]) -> torch.Tensor | None:
        """Returns the KV of the first waiting sequence, without its newest token; None if it has no
        other.
        """
        first = _key(next(iter(waiting)))
        if not first[1]:
            return None
        if first not in self._entries:
            # Also for sequences behind it, many per pass, before slots are free for them.
            self._prefill(waiting)
        self._entries.move_to_end(first)
        return self._entries[first]

    def clear(self) -> None:
        self._entries.clear()
        self._tokens = 0

    def keep(self, versions: Collection[Version | None]) -> None:
        for key in [key for key in self._entries if key[0] not in versions]:
            self._tokens -= self._entries.pop(key).shape[2]

    def _prefill(self, waiting: Iterable[TorchSequence]) -> None:
        ahead: dict[PrefixKey, CacheExtension] = {}
        budget = min(AHEAD_TOKENS, self.tokens_max)
        for sequence in waiting:
            prefix = sequence.prefix
            budget -= len(prefix)
            if ahead and (budget < 0 or len(ahead) == AHEAD_PROMPTS):
                break
            key = _key(sequence)
            if key[1] and key not in self._entries:
                ahead[key] = CacheExtension(prefix, version=sequence.request.version)
        for key, kv in zip(ahead, extend_caches(self.decoder, list(ahead.values())), strict=True):
            assert kv is not None
            self._entries[key] = kv
            self._tokens += kv.shape[2]
        first = next(iter(ahead))
        self._entries.move_to_end(first)
        # Never the first one's, which the caller needs.
        while self._tokens > self.tokens_max and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._tokens -= dropped.shape[2]
