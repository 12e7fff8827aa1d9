"""How the tokens that a sequence gained came of drafts, until it is said: what a `Drafts` is made
of while it grows.
"""

from dataclasses import dataclass, field

from streams.drafted import extend
from streams.records import Drafts


@dataclass(slots=True)
class Unsaid:
    """Tokens are told of in the order in which they were gained."""

    runs: list[int] = field(default_factory=lambda: [0])
    steps: int = 0
    guessed: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def drew(self, count: int) -> None:
        """The model drew so many tokens, one a step."""
        extend(self.runs, count, guessed=False)
        self.steps += count

    def verified(self, guessed: int, right: int, gained: int) -> None:
        """One pass gave `gained` tokens, the first `right` of which had been guessed."""
        extend(self.runs, right, guessed=True)
        extend(self.runs, gained - right, guessed=False)
        self.steps += 1
        self.guessed += guessed

    def looked_up(self, found: bool) -> None:
        """The history was asked for a draft."""
        self.asked += 1
        self.found += found

    def say(self) -> Drafts:
        """All of it; what comes next begins anew."""
        said = Drafts(
            tuple(self.runs), self.steps, self.guessed, self.asked, self.found, self.lookup_s
        )
        self.runs = [0]
        self.steps = self.guessed = self.asked = self.found = 0
        self.lookup_s = 0.0
        return said
