"""Whether the batch drafts now: on where verification passes make more tokens per second than plain
steps (TLT's and Seer's rule).

While drafting is on, its speed is measured. While it is off, it is expected from what passes cost
and from what would have been right: the history is asked for the past and compared with what came,
so that drafting comes back on without trying. What was measured corrects what is expected. Nothing
here computes or keeps time; the engine tells it both.
"""

from dataclasses import dataclass, field

from producers.engines.drafts.plan import StepTimes, best_draft
from producers.engines.drafts.windows import MARGINAL, WindowRule

DECIDE_STEPS = 16  # between two looks at the switch while as many rows run
MARGIN_ON, MARGIN_OFF = 1.05, 0.98  # the gap keeps it from flapping: a change copies the cache
FORGET_TRIALS, FORGET_PASSES = 0.995, 0.98
PRIOR_TRIALS = 4.0
TRY_SHARE = 0.05  # of tokens guessed right; below it nothing is tried
BIAS_LEAST = 0.5  # a bad stretch, an answer like no other, says little about the next one
MEASURED = 3  # steps or passes before they are judged
# Per look at the switch (`DECIDE_STEPS`): passes are tried again after some 4 000 plain steps,
# plain steps after some 6 000 passes, for 16 of them.
FADING_PASSES, FADING_PLAIN = 0.985, 0.99


@dataclass(slots=True)
class Share:
    """How many of the newest some hundred trials succeeded."""

    right: float = 0.0
    tried: float = 0.0

    def add(self, tried: int, right: int) -> None:
        """A draft is tried up to its first mistake: `tried` of its tokens, `right` of these."""
        trials = right + (right < tried)
        keep = FORGET_TRIALS**trials
        self.right = self.right * keep + right
        self.tried = self.tried * keep + trials

    def rate(self, prior: float) -> float:
        """Probability that the next one succeeds, as far as is known."""
        return (self.right + PRIOR_TRIALS * prior) / (self.tried + PRIOR_TRIALS)


@dataclass(slots=True)
class Switch:
    """One engine's; `forced` sets it for good (tests, measurements)."""

    rule: WindowRule = MARGINAL
    forced: bool | None = None
    on: bool = False
    plain: StepTimes = field(default_factory=StepTimes)
    passes: StepTimes = field(default_factory=StepTimes)
    found: Share = field(default_factory=Share)
    """Of the drafts that were asked for, those that the history had."""
    right: Share = field(default_factory=Share)
    """Of their tokens."""
    bias: float = 1.0
    """What drafting gave, over what was expected of it."""
    _gained: float = 0.0
    _seconds: float = 0.0

    def plain_steps(self, rows: float, seconds: float) -> None:
        """A plain step of so many rows took this long, on average."""
        self.plain = self.plain.seen(rows, seconds)

    def verified(self, tokens: int, gained: int, seconds: float) -> None:
        """A verification pass over so many tokens gave so many and took this long, its drafts
        included.
        """
        self.passes = self.passes.seen(tokens, seconds)
        self._gained = self._gained * FORGET_PASSES + gained
        self._seconds = self._seconds * FORGET_PASSES + seconds

    def decide(self, rows: int) -> bool:
        """Whether the next passes over this many rows draft.

        What is not used fades, until it is measured again for a moment: a machine changes, and a
        first measurement may be a bad one.
        """
        if self.forced is not None:
            self.on = self.forced
        elif not rows or self.found.rate(0.0) * self.right.rate(0.0) <= TRY_SHARE:
            self.on = False
        elif self.on:
            self.on = self._stays_on(rows)
        else:
            self.on = self._comes_on(rows)
        return self.on

    def advantage(self, rows: int) -> float:
        """Expected tokens per second with drafts over those without; 0 where drafts of no length
        are worth their time.
        """
        found, rate = self.found.rate(0.0), self.right.rate(0.0)
        drafted = best_draft(rows, self.rule.most, found, rate, self.passes.cost())
        return drafted * self.plain.cost().seconds(rows) / rows

    def _stays_on(self, rows: int) -> bool:
        self.plain = self.plain.fading(FADING_PLAIN)
        if self.passes.count < MEASURED or not self._seconds:
            return True
        if self.plain.count < 1:
            return False
        given = self._gained / self._seconds * self.plain.cost().seconds(rows) / rows
        expected = self.advantage(rows)
        now = min(max(given / expected, BIAS_LEAST), 1.0) if expected else BIAS_LEAST
        self.bias += (now - self.bias) / 4
        return given > MARGIN_OFF

    def _comes_on(self, rows: int) -> bool:
        self.passes = self.passes.fading(FADING_PASSES)
        self.bias += (1 - self.bias) * (1 - FADING_PASSES)
        if self.plain.count < MEASURED:
            return False
        if self.passes.count >= 1 and self.bias * self.advantage(rows) <= MARGIN_ON:
            return False
        self._gained = self._seconds = 0.0
        return True
