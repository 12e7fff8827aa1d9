"""Speculative-decoding totals over trajectories, and the ratios derived from them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from rollstream.streams.draft_runs import accepted_tokens
from rollstream.streams.records import Trajectory


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """`tokens` tokens were generated in `steps` forward passes over their rows.

    Of `asked` look-ups, which took `lookup_s` seconds, `found` returned a draft. The drafts held
    `guessed` tokens, of which `right` were accepted.
    """

    tokens: int = 0
    steps: int = 0
    guessed: int = 0
    right: int = 0
    asked: int = 0
    found: int = 0
    lookup_s: float = 0.0

    def __add__(self, other: "DraftTotals") -> "DraftTotals":
        return DraftTotals(
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
        """Accepted share of the draft tokens; None without draft tokens."""
        return self.right / self.guessed if self.guessed else None

    @property
    def per_step(self) -> float:
        """Tokens per row and step; 1 without drafts."""
        return self.tokens / max(1, self.steps)

    @property
    def hit_rate(self) -> float | None:
        """Share of the look-ups that returned a draft; None without look-ups."""
        return self.found / self.asked if self.asked else None

    @property
    def wrong_per_token(self) -> float:
        """The cost of drafting: rejected draft tokens per generated token."""
        return (self.guessed - self.right) / max(1, self.tokens)

    @property
    def lookup_us(self) -> float | None:
        """Mean microseconds per look-up; None without look-ups."""
        return 1e6 * self.lookup_s / self.asked if self.asked else None


@dataclass(frozen=True, slots=True)
class PassDrafts:
    """Totals of one task in pass `number` (from 1; None: unknown) over the prompts."""

    number: int | None
    task: str
    guesses: DraftTotals


def draft_totals_of(record: Trajectory) -> DraftTotals | None:
    """Returns the record's draft totals, or None without draft statistics."""
    if record.drafts is None:
        return None
    of, tokens = record.drafts, len(record.logprobs)
    return DraftTotals(tokens, of.steps, of.guessed, accepted_tokens(of), of.asked, of.found, of.lookup_s)


def passes_newest_first(found: Mapping[tuple[int | None, str], DraftTotals]) -> tuple[PassDrafts, ...]:
    """Sorts (pass, task) → totals: the newest pass first, passes of unknown number last."""
    ordered = sorted(found, key=lambda one: (-(one[0] or 0), one[1]))
    return tuple(PassDrafts(number, task, found[number, task]) for number, task in ordered)
