"""What dispatch may expect of answers: the rule of the service's `Lengths`, fed with what finished.

The pass before the first counts as known, as in a run's second epoch. Prompts are known by their
numbers, so nothing is hashed, and tasks by nothing: only histories of prompts are asked for.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from consumers.dispatch.lengths import PROMPTS_MAX, Length, updated
from simulator.workload import Workload


@dataclass(slots=True, eq=False)
class Foresight:
    """By number of the group."""

    workload: Workload
    _known: OrderedDict[int, Length] = field(default_factory=OrderedDict[int, Length])

    def mean(self, number: int) -> float:
        """Tokens of one answer, 0 where nothing is known."""
        found = self.of(number)
        return 0.0 if found is None else found.mean

    def of(self, number: int) -> Length | None:
        prompt = self.workload.prompt_of(number)
        if prompt not in self._known:
            for tokens in self.workload.earlier(prompt):
                self._note(prompt, tokens)
        return self._known.get(prompt)

    def note(self, number: int, tokens: int) -> None:
        """One more finished answer."""
        self._note(self.workload.prompt_of(number), tokens)

    def _note(self, prompt: int, tokens: int) -> None:
        """As `Lengths.note`: what was asked longest ago is forgotten."""
        known = self._known
        known[prompt] = updated(known.get(prompt), tokens)
        known.move_to_end(prompt)
        if len(known) > PROMPTS_MAX:
            known.popitem(last=False)
