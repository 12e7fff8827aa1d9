"""One trajectory in the vLLM engine: its tokens so far, and those that were not emitted yet.

A stay is one request to vLLM: it starts when the trajectory is submitted and ends when vLLM
finishes or drops the request. A trajectory that is resumed, or that continues after an
environment's reply, has several stays.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import xxhash

from rollstream.producers.drafts.history import prompt_key
from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.producers.engines.randomness import trajectory_key
from rollstream.producers.engines.vllm.proposer_speculation import StayDrafts
from rollstream.streams.values import Tokens, Version

Finish = Literal["stop", "length"]


@dataclass(slots=True)
class VllmSequence:
    """`key` is the request id of the present stay in vLLM; "" before the first stay."""

    request: GenerationRequest
    context_max: int
    key: str = ""
    stay_tokens: int = 0
    """Tokens generated in the present stay."""
    emitted_versions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Versions that generated the stay's tokens, each with the index of its first token."""
    finish: Finish | None = None
    stay_drafts: StayDrafts | None = None
    """Draft statistics of the present stay; None without drafts."""
    generated: int = field(init=False)
    """Tokens generated in all stays."""
    tokens: list[int] = field(init=False)
    pending: list[int] = field(default_factory=list[int])
    """Generated tokens that were not emitted yet."""
    logprobs: list[float] = field(default_factory=list[float])
    """Log-probabilities of the pending tokens."""

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens.tolist()
        self.generated = len(self.request.logprobs)

    @property
    def room(self) -> int:
        """How many tokens it may still generate, limited by `tokens_max` and the context."""
        left = self.request.sampling.tokens_max - self.generated
        return max(0, min(left, self.context_max - len(self.tokens)))

    @property
    def all_tokens(self) -> Tokens:
        return np.array(self.tokens, np.uint32)

    @property
    def prompt(self) -> int:
        """The key of its prompt in a history."""
        return prompt_key(self.request.tokens, self.request.sources)

    @property
    def seed(self) -> int:
        """The seed of the next stay. It depends on all tokens so far: vLLM's random sequence
        restarts with every stay and must not repeat the numbers of an earlier one.
        """
        key = trajectory_key(self.request.seed, self.request.trajectory)
        so_far = self.all_tokens.tobytes()
        return xxhash.xxh3_64_intdigest(so_far, seed=key) >> 1  # fits int64

    def gain(self, tokens: list[int], logprobs: list[float], ended: bool = False) -> None:
        """Add the tokens of one step; `ended` marks the last step of the stay."""
        if self.stay_drafts is not None and tokens:
            self.stay_drafts.gained(len(tokens), ended)
        self.tokens += tokens
        self.pending += tokens
        self.logprobs += logprobs
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

    def append(self, tokens: Tokens) -> None:
        """Append the environment's tokens; those beyond the context are dropped."""
        room = max(0, self.context_max - len(self.tokens))
        self.tokens += tokens[:room].tolist()
        self.finish = None

    def emit(self, version: Version) -> Emission:
        """The emission of all tokens that were not emitted yet."""
        self.stamps(version)
        drafts = self.stay_drafts.take() if self.stay_drafts is not None and self.pending else None
        emission = Emission(
            self.request.trajectory,
            np.array(self.pending, np.uint32),
            np.array(self.logprobs, np.float32),
            version,
            self.finish,
            drafts,
        )
        self.pending, self.logprobs = [], []
        return emission
