"""Collects draft statistics of one sequence until its next emission, as a `Drafts` record."""

from dataclasses import dataclass, field

from rollstream.streams.draft_runs import extend_runs
from rollstream.streams.values import Drafts


@dataclass(slots=True)
class DraftsBuilder:
    """Counts since the last emission. Tokens must be added in the order of generation."""

    runs: list[int] = field(default_factory=lambda: [0])
    steps: int = 0
    guessed: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def drew(self, count: int) -> None:
        """Add `count` tokens that the model drew, one per step."""
        extend_runs(self.runs, count, guessed=False)
        self.steps += count

    def verified(self, guessed: int, right: int, gained: int) -> None:
        """Add a pass that gave `gained` tokens, the first `right` of them drafted and accepted."""
        extend_runs(self.runs, right, guessed=True)
        extend_runs(self.runs, gained - right, guessed=False)
        self.steps += 1
        self.guessed += guessed

    def looked_up(self, found: bool) -> None:
        """Add a look-up for a draft."""
        self.asked += 1
        self.found += found

    def say(self) -> Drafts:
        """Return the record and reset all counts."""
        said = Drafts(
            tuple(self.runs), self.steps, self.guessed, self.asked, self.found, self.lookup_s
        )
        self.runs = [0]
        self.steps = self.guessed = self.asked = self.found = 0
        self.lookup_s = 0.0
        return said
