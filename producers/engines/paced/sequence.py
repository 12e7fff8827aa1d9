"""One trajectory inside the paced engine: counts only, because its tokens follow from their
positions.

A token is a function of (seed, trajectory, position) and of the vocabulary alone (invariant 10):
uniform over all tokens that are no stop tokens, except for a stop token at the drawn length.
Without stop tokens a turn continues to `tokens_max`.
"""

from math import log
from typing import Literal

import numpy as np

from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.producers.engines.draws import trajectory_key, uniforms
from rollstream.producers.engines.paced.lengths import LengthSampler
from rollstream.streams.records import GENERATED, PROMPT
from rollstream.streams.values import Floats, Tokens, Version


class PacedSequence:
    """`length` counts all tokens so far, `cached` those with KV, `said` those that were emitted or
    were part of the request; `end` is the length at which the turn is over.
    """

    __slots__ = (
        "cached", "context_max", "end", "finish", "generated", "hold", "key", "length", "lengths",
        "prompt", "request", "said", "stop_at", "vocabulary",
    )  # fmt: skip

    def __init__(
        self, request: GenerationRequest, context_max: int, vocabulary: int, lengths: LengthSampler
    ) -> None:
        self.request, self.context_max, self.vocabulary = request, context_max, vocabulary
        self.lengths = lengths
        self.key = np.array([trajectory_key(request.seed, request.trajectory)], np.uint64)
        self.prompt: Tokens = request.tokens[request.sources == PROMPT]
        self.length = self.said = len(request.tokens)
        self.generated = len(request.logprobs)
        self.hold = request.hold
        self.finish: Literal["stop", "length"] | None = None
        self.cached = 0
        given = np.flatnonzero(request.sources != GENERATED)
        self._begin_turn(int(given[-1]) + 1 if len(given) else 0)

    @property
    def trajectory(self) -> str:
        return self.request.trajectory

    @property
    def full(self) -> bool:
        return self.length >= self.end

    @property
    def unsaid(self) -> int:
        """Tokens that were generated and not emitted."""
        return self.length - self.said

    def gain(self, steps: int) -> None:
        """Generate one token per step; each step caches the token before."""
        self.length += steps
        self.generated += steps
        self.cached += steps
        if self.full:
            self.finish = "stop" if self.length == self.stop_at else "length"

    def take(self, tokens: Tokens) -> None:
        """Append the environment's tokens; those beyond the context are dropped."""
        self.length += min(len(tokens), self.context_max - self.length)
        self.said, self.finish = self.length, None
        self._begin_turn(self.length)

    def say(self, version: Version) -> Emission:
        """The emission of all tokens that were not emitted yet."""
        tokens = self._tokens(self.said, self.length)
        self.said = self.length
        logprobs: Floats = np.full(len(tokens), -log(self.vocabulary), np.float32)
        return Emission(self.trajectory, tokens, logprobs, version, self.finish)

    def _begin_turn(self, begin: int) -> None:
        """Draw the length at which the turn that starts at `begin` ends, within the limits."""
        request, sampling = self.request, self.request.sampling
        left = sampling.tokens_max - self.generated
        self.end, self.stop_at = min(self.context_max, self.length + left), -1
        if sampling.stop:
            turn = self.lengths.draw(request.seed, self.prompt, request.trajectory, begin)
            self.stop_at = max(begin + turn, self.length + 1)
            self.end = min(self.end, self.stop_at)

    def _tokens(self, begin: int, end: int) -> Tokens:
        drawn = uniforms(self.key, np.arange(begin, end))
        stops = sorted(set(self.request.sampling.stop))
        tokens = (drawn * (self.vocabulary - len(stops))).astype(np.int64)
        for stop in stops:
            tokens += tokens >= stop
        if self.finish == "stop" and end > begin:
            tokens[-1] = stops[int(drawn[-1] * len(stops))]
        return tokens.astype(np.uint32)
