"""What drafting came to over some trajectories: sums of what their records say, and the shares that
are read of them. Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from streams.drafted import right_of
from streams.records import Trajectory


@dataclass(frozen=True, slots=True)
class Guesses:
    """`tokens` were generated in `steps` passes of the model over their rows; of `asked` look-ups,
    which took `lookup_s`, `found` gave a draft, `guessed` tokens in all, of which `right` were
    right.
    """

    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    right: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def __add__(self, other: "Guesses") -> "Guesses":
        return Guesses(
            self.tokens + other.tokens,
            self.steps + other.steps,
            self.guessed + other.guessed,
            self.right + other.right,
            self.asked + other.asked,
            self.found + other.found,
            self.lookup_s + other.lookup_s,
        )

    @property
    def acceptance(self) -> float | None:
        """Of the guessed tokens, those that were right; None where none was guessed."""
        return self.right / self.guessed if self.guessed else None

    @property
    def per_step(self) -> float:
        """Tokens that a step gave a row; 1 without drafts."""
        return self.tokens / max(1, self.steps)

    @property
    def hit_rate(self) -> float | None:
        """Of the look-ups, those that gave a draft."""
        return self.found / self.asked if self.asked else None

    @property
    def wrong_per_token(self) -> float:
        """What drafts cost the model: tokens verified for nothing, per token generated."""
        return (self.guessed - self.right) / max(1, self.tokens)

    @property
    def lookup_us(self) -> float | None:
        """Of one look-up."""
        return 1e6 * self.lookup_s / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class PassDrafts:
    """Of one task in one pass over the prompts; `number` counts passes from 1, None: not known."""

    number: int | None
    task: str
    guesses: Guesses


def guesses_of(record: Trajectory) -> Guesses | None:
    """None where the record tells of no drafts."""
    if record.drafts is None:
        return None
    of, tokens = record.drafts, len(record.logprobs)
    return Guesses(tokens, of.steps, of.guessed, right_of(of), of.asked, of.found, of.lookup_s)


def in_order(found: Mapping[tuple[int | None, str], Guesses]) -> tuple[PassDrafts, ...]:
    """By (pass, task): the newest pass first, those of unknown number last."""
    ordered = sorted(found, key=lambda one: (-(one[0] or 0), one[1]))
    return tuple(PassDrafts(number, task, found[number, task]) for number, task in ordered)
