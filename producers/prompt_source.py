"""Keeps the topic `prompts` a bounded number of prompts ahead of admission, in the task's seeded
order (the role `prompts`). A group's number is its position in that order; a new holder reads the
last published one from the topic: no prompt is repeated or skipped.

Reading list: after `storage/leases.py`, before `consumers/dispatch/service.py`.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rollstream.errors import ConfigurationError, PositionLost, RollstreamError
from rollstream.metric_values import MetricValues
from rollstream.producers.tasks.base import TaskPrompt
from rollstream.streams.bus import Bus
from rollstream.streams.foreign_text import clean_text, reason_text
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Prompt
from rollstream.streams.values import Sampling, SettingsSince
from rollstream.streams.writer import FencedWriter

log = logging.getLogger(__name__)

POLL_S = 0.25  # a poll costs a broker a request; the prompts ahead last longer than this pause
REFILL_PARTS = 4  # publish when a quarter of `ahead` was admitted: few appends of many prompts each


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """Each group has `samples` samples and `redundancy` more, of which the first that end count.
    `tokens_max` bounds a prompt (None: no bound).
    """

    task: str
    prompt: Callable[[int, int], TaskPrompt]
    sampling: Sampling
    samples: int
    seed: int
    tokens_max: int | None = None
    redundancy: int = 0
    settings: SettingsSince | None = None

    def at(self, group: int) -> Prompt:
        """Returns a prompt by the seed and the group's number alone. Raises `ConfigurationError`
        for one that is empty, longer than `tokens_max`, or that the task cannot make.
        """
        try:
            prompt = self.prompt(self.seed, group)
            tokens = np.array(prompt.tokens, np.uint32)
        except (ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
            if isinstance(error, RollstreamError):
                raise
            raise ConfigurationError(
                f"task {self.task}, prompt {group} of seed {self.seed} cannot be made: "
                f"{type(error).__name__}: {reason_text(error)}"
            ) from error
        # An engine would refuse all samples of a bad prompt after every restart.
        self._check(group, prompt)
        stop = self.sampling.stop if prompt.stop is None else prompt.stop
        return Prompt(
            group=group,
            task=clean_text(prompt.task or self.task),
            tokens=tokens,
            samples=self.samples + self.redundancy,
            sampling=replace(self.sampling, stop=stop),
            seed=self.seed,
            reference=clean_text(prompt.reference),
            epoch=prompt.epoch,
            needed=self.samples if self.redundancy else 0,
            settings=self.settings,
        )

    def _check(self, group: int, prompt: TaskPrompt) -> None:
        where = f"task {prompt.task or self.task}, prompt {group} of seed {self.seed}"
        if not len(prompt.tokens):
            raise ConfigurationError(f"{where}: it has no tokens")
        if self.tokens_max is not None and len(prompt.tokens) > self.tokens_max:
            raise ConfigurationError(
                f"{where}: {len(prompt.tokens)} tokens are more than the {self.tokens_max} that "
                "rollouts.context_max − sampling.tokens_max leaves for a prompt"
            )


@dataclass(slots=True)
class PromptSource:
    """`ahead` bounds the published prompts that are not admitted; `next_group` is the next one to
    publish, `admitted` the newest admitted one, -1 if none is. A changed configuration, with the
    hash `configuration`, holds from the next prompt on.
    """

    bus: Bus
    order: PromptOrder
    term: int
    ahead: int
    configuration: str = ""
    next_group: int = 0
    admitted: int = -1
    admissions: TopicReader | None = None
    has_gap: bool = False
    """Whether admissions were truncated unread, and none was read since: `admitted` may be too
    low.
    """

    def run(self, stop: threading.Event) -> None:
        writer = FencedWriter(self.bus, "prompts", "prompts", self.term)
        upto = {partition: offset + 1 for partition, offset in writer.open().items()}
        published = self._published(upto)
        newest = max(published, key=lambda prompt: prompt.group, default=None)
        self.next_group = 0 if newest is None else newest.group + 1
        if self.configuration:
            self.order = replace(self.order, settings=self._settings_after(newest))
        begins = from_begin(self.bus, "admissions")
        self.admissions = TopicReader(self.bus, "admissions", begins)
        self.has_gap = any(begin.offset for begin in begins.values())
        log.info("prompt source term %d resumes at prompt %d", self.term, self.next_group)
        while not stop.is_set():
            self._read_admissions(self.admissions)
            target = self.admitted + 1 + self.ahead
            if target - self.next_group > self.ahead // REFILL_PARTS:
                prompts = [self.order.at(group) for group in range(self.next_group, target)]
                writer.append([(str(prompt.group), prompt) for prompt in prompts])
                self.next_group = target
            stop.wait(POLL_S)

    def metric_values(self) -> MetricValues:
        return {
            "prompts_published_total": self.next_group,
            "prompts_ahead": max(0, self.next_group - self.admitted - 1),
            "prompts_ahead_max": self.ahead,
        }

    def readers(self) -> list[TopicReader]:
        return [] if self.admissions is None else [self.admissions]

    def _read_admissions(self, reader: TopicReader) -> None:
        try:
            batch = reader.follow()
        except PositionLost:
            reader.positions = from_begin(self.bus, "admissions")
            # Admissions are truncated once their groups are trained. A source that was stopped for
            # so long finds none and publishes nothing; without new prompts dispatch admits none:
            # both would wait for ever.
            self.has_gap, batch = True, []
        records = [received.record for received in batch]
        admitted = [record.group for record in records if isinstance(record, Admitted)]
        if admitted:
            self.has_gap = False
        elif self.has_gap:
            # Dispatch truncates only admitted prompts, and keeps the newest: all prompts before the
            # first in the topic are admitted.
            try:
                present = self._published(self.bus.end("prompts"))
                oldest = min((prompt.group for prompt in present), default=0)
            except PositionLost:  # truncated just now: the next call finds the new begin
                return
            admitted = [oldest - 1]
        self.admitted = max([self.admitted, *admitted])

    def _settings_after(self, newest: Prompt | None) -> SettingsSince:
        before = None if newest is None else newest.settings
        if before is not None and before.configuration_hash == self.configuration:
            return before
        if newest is not None:
            log.info("from group %d on, prompts follow %s", self.next_group, self.configuration)
        return SettingsSince(self.next_group, self.configuration)

    def _published(self, upto: dict[int, int]) -> list[Prompt]:
        reader = TopicReader(self.bus, "prompts", from_begin(self.bus, "prompts"))
        records = [received.record for received in reader.read_to(upto)]
        return [prompt for prompt in records if isinstance(prompt, Prompt)]
