"""One trajectory in the vLLM engine: its tokens so far, and those that were not emitted yet.

A stay is one request to vLLM: it starts when the trajectory is submitted and ends when vLLM
finishes or drops the request. A trajectory that is resumed, or that continues after an
environment's reply, has several stays.
"""

import numpy as np
import xxhash

from rollstream.producers.drafts.history import prompt_key
from rollstream.producers.engines.base import GenerationRequest
from rollstream.producers.engines.queue import QueuedSequence
from rollstream.producers.engines.randomness import trajectory_key
from rollstream.producers.engines.vllm.proposer_speculation import StayDrafts
from rollstream.streams.values import Drafts, Floats, Tokens, Version


class VllmSequence(QueuedSequence):
    """`key` is the request id of the present stay in vLLM; "" before the first stay."""

    def __init__(self, request: GenerationRequest, context_max: int) -> None:
        super().__init__(request, context_max)
        self.tokens: list[int] = request.tokens.tolist()
        self.key = ""
        self.stay_tokens = 0
        """Tokens generated in the present stay."""
        self.stay_drafts: StayDrafts | None = None
        """Draft statistics of the present stay; None without drafts."""
        self.emitted_versions: list[tuple[str, int]] = []
        """Versions that generated the stay's tokens, each with the index of its first token."""
        self.pending: list[int] = []
        """Generated tokens that were not emitted yet."""
        self.logprobs: list[float] = []
        """Log-probabilities of the pending tokens."""

    @property
    def prompt(self) -> int:
        """The key of its prompt in a history."""
        return prompt_key(self.request.tokens, self.request.sources)

    @property
    def seed(self) -> int:
        """The seed of the next stay. It depends on all tokens so far: vLLM's random sequence
        restarts with every stay and must not repeat the numbers of an earlier one.
        """
        key = trajectory_key(self.request.seed, self.trajectory)
        so_far = np.array(self.tokens, np.uint32).tobytes()
        return xxhash.xxh3_64_intdigest(so_far, seed=key) >> 1  # fits int64

    def gain(self, tokens: list[int], logprobs: list[float], ended: bool = False) -> None:
        """Add the tokens of one step; `ended` marks the last step of the stay."""
        if self.stay_drafts is not None and tokens:
            self.stay_drafts.gained(len(tokens), ended)
        self.tokens += tokens
        self.pending += tokens
        self.logprobs += logprobs
        self.length += len(tokens)
        self.generated += len(tokens)
        self.stay_tokens += len(tokens)

    def enter(self, key: str) -> None:
        """Start a new stay in vLLM."""
        self.key, self.stay_tokens, self.emitted_versions = key, 0, []

    def stamps(self, version: Version) -> tuple[tuple[str, int], ...]:
        """Return `emitted_versions` after the pending tokens were added under `version`."""
        stamp = str(version)
        if self.pending and (not self.emitted_versions or self.emitted_versions[-1][0] != stamp):
            self.emitted_versions.append((stamp, self.stay_tokens - len(self.pending)))
        return tuple(self.emitted_versions)

    def append(self, tokens: Tokens) -> Tokens:
        kept = super().append(tokens)
        self.tokens += kept.tolist()
        return kept

    def take(self, version: Version) -> tuple[Tokens, Floats, Drafts | None]:
        """The tokens that were not emitted yet, with their log-probabilities and drafts; they are
        stamped with `version`.
        """
        self.stamps(version)
        drafts = self.stay_drafts.take() if self.stay_drafts is not None and self.pending else None
        tokens, logprobs = np.array(self.pending, np.uint32), np.array(self.logprobs, np.float32)
        self.pending, self.logprobs = [], []
        return tokens, logprobs, drafts
