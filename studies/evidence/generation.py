"""Generates the groups of a run of the evidence in this process, with the product's engine `torch`
and without a clock. What is decoded next depends on tokens alone, so a seed gives the same
trajectories on a busy machine as on an idle one.

`LaggedBatches` gives a step groups of exactly one version; `RunningBatch` decodes on while versions
change, as rollouts do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from rollstream.consumers.trainer.data.selection import GroupCandidate, oldest
from rollstream.producers.engines.base import (
    Emission,
    Engine,
    GenerationRequest,
    UpdateMode,
    WeightUpdate,
)
from rollstream.producers.prompt_source import PromptOrder
from rollstream.producers.rollout.chain import extend_spans
from rollstream.producers.tasks.base import Task, turns_of
from rollstream.streams.records import GENERATED, PROMPT, Prompt, Trajectory
from rollstream.streams.values import Span, Version

POLL_S = 1e9  # no time ends a poll: it decodes until there are tokens
TERM = 1

Group = Sequence[Trajectory]
Weights = Mapping[str, Tensor]


class GroupSource(Protocol):
    """Gives a step its groups. `published` is called with version 0, and after each step with the
    version that it made.
    """

    def published(self, version: int, weights: Weights) -> None: ...

    def groups(self, step: int) -> list[Group]: ...


@dataclass(slots=True)
class _Answer:
    prompt: Prompt
    index: int
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[Span] = field(default_factory=list[Span])


@dataclass(slots=True)
class Generator:
    """Decodes whole groups and judges their answers. `complete` has the groups of which every
    answer has ended, in the order in which they ended.
    """

    task: Task
    order: PromptOrder
    engine: Engine
    complete: dict[int, Group] = field(default_factory=dict[int, Group])
    _running: dict[str, _Answer] = field(default_factory=dict[str, _Answer])
    _ended: dict[int, list[Trajectory]] = field(default_factory=dict[int, list[Trajectory]])

    def submit(self, group: int) -> None:
        """Queue all answers of a group."""
        prompt = self.order.at(group)
        sources = np.full(len(prompt.tokens), PROMPT, np.uint8)
        empty = np.zeros(0, np.float32)
        for index in range(prompt.samples):
            name = f"{group}.{index}"
            self._running[name] = _Answer(prompt, index)
            request = (name, group, prompt.tokens, sources, prompt.sampling, prompt.seed, empty)
            self.engine.submit(GenerationRequest(*request))

    @property
    def is_idle(self) -> bool:
        return not self._running

    def decode(self) -> None:
        """Decode until there are new tokens, and add those."""
        for emission in self.engine.poll(POLL_S):
            self._add(emission)

    def load(self, version: int, weights: Weights, mode: UpdateMode) -> None:
        """Serve these weights from now on; tokens decoded before keep their version."""
        if self.engine.version.number != version:
            self.engine.update(WeightUpdate(Version(version, TERM), weights), mode)

    def _add(self, emission: Emission) -> None:
        answer = self._running[emission.trajectory]
        begin = len(answer.tokens)
        answer.tokens += emission.tokens.tolist()
        answer.logprobs += emission.logprobs.tolist()
        if len(answer.tokens) > begin:
            extend_spans(answer.spans, Span(begin, len(answer.tokens), emission.version))
        if emission.finish is None:
            return
        del self._running[emission.trajectory]
        prompt = answer.prompt
        ended = self._ended.setdefault(prompt.group, [])
        ended.append(self._trajectory(answer, emission.finish))
        if len(ended) == prompt.samples:
            del self._ended[prompt.group]
            self.complete[prompt.group] = sorted(ended, key=lambda one: one.index)

    def _trajectory(self, answer: _Answer, finish: str) -> Trajectory:
        prompt = answer.prompt
        tokens = np.array([*prompt.tokens.tolist(), *answer.tokens], np.uint32)
        sources = np.full(len(tokens), PROMPT, np.uint8)
        sources[len(prompt.tokens) :] = GENERATED
        score = self.task.judge(prompt.reference, turns_of(tokens, sources))
        return Trajectory(
            trajectory=f"{prompt.group}.{answer.index}",
            group=prompt.group,
            index=answer.index,
            attempt=0,
            task=prompt.task,
            rollout="evidence",
            rollout_term=TERM,
            tokens=tokens,
            sources=sources,
            logprobs=np.array(answer.logprobs, np.float32),
            spans=tuple(answer.spans),
            finish="stop" if finish == "stop" else "length",
            reward=float(score.reward),
            trainer_version=self.engine.version,
            started_s=0.0,
            finished_s=0.0,
            temperature=prompt.sampling.temperature,
            reference=prompt.reference,
        )


@dataclass(slots=True)
class LaggedBatches:
    """Every token of a step is of the version that is `lag` steps older than the one trained from;
    of version 0 while there is none so old. Groups are taken in their order.
    """

    generator: Generator
    groups_per_step: int
    lag: int
    _kept: dict[int, Weights] = field(default_factory=dict[int, Weights])

    def published(self, version: int, weights: Weights) -> None:
        self._kept[version] = weights
        self._kept.pop(version - self.lag - 1, None)

    def groups(self, step: int) -> list[Group]:
        behind = max(0, step - 1 - self.lag)
        self.generator.load(behind, self._kept[behind], "keep_version")
        numbers = range((step - 1) * self.groups_per_step, step * self.groups_per_step)
        for number in numbers:
            self.generator.submit(number)
        while not self.generator.is_idle:
            self.generator.decode()
        return [self.generator.complete.pop(number) for number in numbers]


@dataclass(slots=True)
class RunningBatch:
    """Keeps the engine's slots full, and trains the oldest complete groups as long as `behind`
    steps' worth of complete ones stay. A new version is loaded as `mode` asks; under `keep_version`
    no group is started until the engine is empty.
    """

    generator: Generator
    groups_per_step: int
    behind: int
    mode: UpdateMode
    _admitted: int = 0
    _trained: int = 0

    def published(self, version: int, weights: Weights) -> None:
        while self.mode == "keep_version" and not self.generator.is_idle:
            self.generator.decode()
        self.generator.load(version, weights, self.mode)

    def groups(self, step: int) -> list[Group]:
        complete = self.generator.complete
        while len(complete) < (self.behind + 1) * self.groups_per_step:
            # One step's worth runs beyond what must be complete.
            while self._admitted - self._trained < (self.behind + 2) * self.groups_per_step:
                self.generator.submit(self._admitted)
                self._admitted += 1
            self.generator.decode()
        found = [
            GroupCandidate(number, _oldest_version(group)) for number, group in complete.items()
        ]
        chosen = oldest(found, self.groups_per_step)
        self._trained += len(chosen)
        return [complete.pop(number) for number in chosen]


@dataclass(slots=True)
class RecordedBatches:
    """Gives each step the groups that another run trained in it."""

    steps: Sequence[Sequence[Group]]

    def published(self, version: int, weights: Weights) -> None:
        """Nothing is generated."""

    def groups(self, step: int) -> list[Group]:
        return list(self.steps[step - 1])


def _oldest_version(group: Group) -> int:
    return min(span.version.number for one in group for span in one.spans)
