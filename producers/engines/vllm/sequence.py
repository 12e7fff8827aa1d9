"""One trajectory inside the engine: its tokens so far, and those that were not emitted yet."""

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
    """`key` is its request id in vLLM, a new one for each stay; empty before its first stay."""

    request: GenerationRequest
    context_max: int
    key: str = ""
    stay: int = 0
    """Tokens generated in this stay."""
    emitted_versions: list[tuple[str, int]] = field(default_factory=list[tuple[str, int]])
    """Versions of these, each with the index of its first token."""
    finish: Finish | None = None
    marks: StayDrafts | None = None
    """Draft statistics of this stay; None without drafts."""
    generated: int = field(init=False)
    tokens: list[int] = field(init=False)
    pending: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])

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
        """The seed of this stay: vLLM's random sequence restarts with every stay, and must not
        repeat the numbers of the stay before.
        """
        key = trajectory_key(self.request.seed, self.request.trajectory)
        so_far = self.all_tokens.tobytes()
        return xxhash.xxh3_64_intdigest(so_far, seed=key) >> 1  # fits int64

    def gain(self, tokens: list[int], logprobs: list[float], ended: bool = False) -> None:
        """Add the tokens of one step; `ended` marks the last step of the stay."""
        if self.marks is not None and tokens:
            self.marks.gained(len(tokens), ended)
        self.tokens += tokens
        self.pending += tokens
        self.logprobs += logprobs
        self.generated += len(tokens)
        self.stay += len(tokens)

    def enter(self, key: str) -> None:
        """Start a new stay in vLLM."""
        self.key, self.stay, self.emitted_versions = key, 0, []

    def stamps(self, version: Version) -> tuple[tuple[str, int], ...]:
        """The versions of this stay's tokens; those not emitted yet are of `version`."""
        stamp = str(version)
        if self.pending and (not self.emitted_versions or self.emitted_versions[-1][0] != stamp):
            self.emitted_versions.append((stamp, self.stay - len(self.pending)))
        return tuple(self.emitted_versions)

    def append(self, tokens: Tokens) -> None:
        """Append the environment's tokens; those beyond the context are dropped."""
        room = max(0, self.context_max - len(self.tokens))
        self.tokens += tokens[:room].tolist()
        self.finish = None

    def emit(self, version: Version) -> Emission:
        """The emission of all tokens that were not emitted yet."""
        self.stamps(version)
        drafts = self.marks.take() if self.marks is not None and self.pending else None
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
