"""An engine without a model, and rewards without a process: tokens and rewards are functions of
(seed, trajectory, position), so every rollout that resumes a trajectory continues it identically.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from zlib import crc32

import numpy as np
import torch

from rollstream.producers.engines.base import (
    Emission,
    EngineStats,
    GenerationRequest,
    UpdateMode,
    WeightComparison,
    WeightUpdate,
)
from rollstream.producers.rewards.pool import RewardOutcome, RewardVerdict
from rollstream.producers.tasks.base import Turns
from rollstream.streams.values import Tokens, Version

CHUNK = 3  # tokens of each trajectory per emission
ENDS_ONE_IN = 8
TOKENS = 16  # size of its vocabulary
END = 2


class FakeEngine:
    """`Engine` that emits once per moment of the clock; with `is_slow` one token of each
    trajectory, and longer ones.
    """

    def __init__(
        self, version: Version, slots: int, clock: Callable[[], float], is_slow: bool = False
    ) -> None:
        self.version = version
        self._slots, self._clock = slots, clock
        self._chunk, self._one_in = (1, 4 * ENDS_ONE_IN) if is_slow else (CHUNK, ENDS_ONE_IN)
        self._running: dict[str, tuple[GenerationRequest, int, int]] = {}
        self._emitted_s = -1.0
        self._tokens = 0

    def submit(self, request: GenerationRequest) -> None:
        self._running[request.trajectory] = (request, len(request.tokens), len(request.logprobs))

    def poll(self, deadline_s: float) -> list[Emission]:
        if self._emitted_s == self._clock():
            return []
        self._emitted_s = self._clock()
        return [self._step(trajectory) for trajectory in list(self._running)[: self._slots]]

    def append(self, trajectory: str, tokens: Tokens, noise: str = "") -> None:
        raise NotImplementedError("the fake engine has no dialogues")

    def abort(self, trajectory: str) -> Emission | None:
        self._running.pop(trajectory, None)

    def prepare(self, update: WeightUpdate) -> WeightUpdate:
        return update

    def update(self, update: WeightUpdate, mode: UpdateMode) -> None:
        assert mode != "keep_version" or not self._running
        self.version = update.version

    def read_back(
        self, names: Iterable[str], tensors: Mapping[str, torch.Tensor]
    ) -> WeightComparison:
        return WeightComparison(len(list(names)), ())

    @property
    def versions(self) -> Sequence[Version]:
        return [self.version]

    @property
    def is_side_by_side(self) -> bool:
        return False

    def running(self) -> Sequence[str]:
        return list(self._running)

    def stats(self) -> EngineStats:
        running = min(len(self._running), self._slots)
        waiting = len(self._running) - running
        kv = sum(length for _, length, _ in list(self._running.values())[: self._slots])
        return EngineStats(self._slots, running, waiting, kv, 4096, 0, self._tokens, 0.0)

    def _step(self, trajectory: str) -> Emission:
        request, length, generated = self._running[trajectory]
        tokens: list[int] = []
        finish = None
        while finish is None and len(tokens) < self._chunk:
            drawn = crc32(f"{request.seed}/{trajectory}/{length + len(tokens)}".encode())
            tokens.append(END if drawn % self._one_in == 0 else 3 + drawn // 8 % (TOKENS - 3))
            if tokens[-1] == END:
                finish = "stop"
            elif generated + len(tokens) == request.sampling.tokens_max:
                finish = "length"
        if finish is None:
            count = len(tokens)
            self._running[trajectory] = (request, length + count, generated + count)
        else:
            del self._running[trajectory]
        self._tokens += len(tokens)
        logprobs = np.full(len(tokens), -0.5, np.float32)
        return Emission(trajectory, np.array(tokens, np.uint32), logprobs, self.version, finish)


class FakeRewards:
    """`RewardPool` that answers at once."""

    def __init__(self) -> None:
        self._decided: list[tuple[str, RewardOutcome]] = []

    def can_submit(self) -> bool:
        return True

    def submit(self, key: str, reference: str, turns: Turns) -> None:
        self._decided.append((key, RewardVerdict(float(sum(map(sum, turns)) % 3))))

    def poll(self) -> list[tuple[str, RewardOutcome]]:
        decided, self._decided = self._decided, []
        return decided

    def close(self) -> None:
        """Returns whether it is empty."""
