"""Predicted answer lengths: the rule of the service's `Lengths`, updated with finished answers.

The history starts with one full pass over the prompts, as in a run's second epoch. Prompts are
identified by number, so nothing is hashed. There is no history by task.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from rollstream.consumers.dispatch.lengths import PROMPTS_MAX, ExpectedLength, with_sample
from rollstream.simulator.workload import Workload


@dataclass(slots=True, eq=False)
class LengthForecast:
    """Length histories, looked up by group number."""

    workload: Workload
    _known: OrderedDict[int, ExpectedLength] = field(default_factory=OrderedDict[int, ExpectedLength])

    def mean(self, number: int) -> float:
        """Predicted tokens of one answer, 0 without history."""
        found = self.length_of(number)
        return 0.0 if found is None else found.mean

    def length_of(self, number: int) -> ExpectedLength | None:
        prompt = self.workload.prompt_of(number)
        if prompt not in self._known:
            for tokens in self.workload.earlier(prompt):
                self._add(prompt, tokens)
        return self._known.get(prompt)

    def add(self, number: int, tokens: int) -> None:
        """Add one finished answer."""
        self._add(self.workload.prompt_of(number), tokens)

    def _add(self, prompt: int, tokens: int) -> None:
        """Like `Lengths.note`: the least recently used history is evicted."""
        known = self._known
        known[prompt] = with_sample(known.get(prompt), tokens)
        known.move_to_end(prompt)
        if len(known) > PROMPTS_MAX:
            known.popitem(last=False)
