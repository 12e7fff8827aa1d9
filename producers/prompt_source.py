"""The prompt source: keeps the `prompts` topic a bounded way ahead of admission, in the task's
seeded order.

A group's number is its position in that order, so the only state is the number of the last
published prompt, which a new holder reads from the topic itself: no prompt is repeated and none is
skipped, whoever died when.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from producers.tasks.base import TaskPrompt
from streams.bus import Bus
from streams.reader import TopicReader, from_begin
from streams.records import Admitted, Prompt, Sampling
from streams.writer import FencedWriter

log = logging.getLogger(__name__)

ROUND_S = 0.05


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """What is asked at each position, and how it is to be sampled."""

    task: str
    prompt: Callable[[int, int], TaskPrompt]
    sampling: Sampling
    samples: int
    seed: int

    def at(self, group: int) -> Prompt:
        """The prompt of a group: a pure function of the seed and the group's number."""
        asked = self.prompt(self.seed, group)
        return Prompt(
            group=group,
            task=self.task,
            tokens=np.array(asked.tokens, np.uint32),
            samples=self.samples,
            sampling=self.sampling,
            seed=self.seed,
            reference=asked.reference,
            epoch=asked.epoch,
        )


@dataclass(slots=True)
class PromptSource:
    """One term of the role; `ahead` bounds published prompts that are not admitted."""

    bus: Bus
    order: PromptOrder
    term: int
    ahead: int

    def run(self, stop: threading.Event) -> None:
        """Publish until `stop`."""
        writer = FencedWriter(self.bus, "prompts", "prompts", self.term)
        upto = {partition: offset + 1 for partition, offset in writer.open().items()}
        following = self._published(upto) + 1
        admissions = TopicReader(self.bus, "admissions", from_begin(self.bus, "admissions"))
        admitted = -1
        log.info("prompt source term %d goes on at prompt %d", self.term, following)
        while not stop.is_set():
            for received in admissions.poll(0.0):
                if isinstance(received.record, Admitted):
                    admitted = max(admitted, received.record.group)
            target = admitted + 1 + self.ahead
            if following < target:
                prompts = [self.order.at(group) for group in range(following, target)]
                writer.append([(str(prompt.group), prompt) for prompt in prompts])
                following = target
            stop.wait(ROUND_S)

    def _published(self, upto: dict[int, int]) -> int:
        """Number of the last prompt of all earlier terms, −1 if there is none."""
        reader = TopicReader(self.bus, "prompts", from_begin(self.bus, "prompts"))
        last = -1
        for received in reader.read_to(upto):
            if isinstance(received.record, Prompt):
                last = max(last, received.record.group)
        return last
