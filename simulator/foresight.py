"""What dispatch may expect of answers: the service's `Lengths`, fed with what finished.

The pass before the first counts as known, as in a run's second epoch.
"""

from dataclasses import dataclass, field

import numpy as np

from consumers.dispatch.lengths import Length, Lengths
from simulator.workload import Workload
from streams.records import Prompt, Sampling


@dataclass(slots=True, eq=False)
class Foresight:
    """By number of the group."""

    workload: Workload
    lengths: Lengths = field(default_factory=Lengths)
    _prompts: dict[int, Prompt] = field(default_factory=dict[int, Prompt])

    def mean(self, number: int) -> float:
        """Tokens of one answer, 0 where nothing is known."""
        found = self.of(number)
        return 0.0 if found is None else found.mean

    def of(self, number: int) -> Length | None:
        prompt = self._prompt(number)
        if self.lengths.of_prompt(prompt) is None:
            for tokens in self.workload.earlier(self.workload.prompt_of(number)):
                self.lengths.note(prompt, tokens)
        return self.lengths.of_prompt(prompt)

    def note(self, number: int, tokens: int) -> None:
        """One more finished answer."""
        self.lengths.note(self._prompt(number), tokens)

    def _prompt(self, number: int) -> Prompt:
        key = self.workload.prompt_of(number)
        if key not in self._prompts:
            tokens, samples = np.array([key], np.uint32), self.workload.samples
            self._prompts[key] = Prompt(key, "simulated", tokens, samples, Sampling(), 0)
        return self._prompts[key]
