"""Whether a batch drafts (`DraftGate`), and how many tokens per sequence at most (`WindowRule`). A
plain step decodes one token per row; a verification pass ("pass") drafted tokens too. Nothing here
reads a clock (docs/explanation/drafts.md).
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from rollstream.producers.drafts.planner import StepCost, StepTimes, best_draft_speed
from rollstream.producers.engines.drafting import DraftSwitch


@dataclass(frozen=True, slots=True)
class WindowRule:
    """Limits a draft, in tokens, by the sequence's last one. `additive` is RhymeRL's rule (arXiv
    2508.18588): two more after a full acceptance, back to the `least` after a rejection.
    `multiplicative`, from the code of RhymeRL's authors, doubles or halves. `marginal` keeps one
    window: only the marginal benefit of a token limits the length (`planner.py`).
    """

    kind: Literal["additive", "multiplicative", "marginal"]
    least: int
    most: int

    def after(self, window: int, proposed: int, accepted: int) -> int:
        assert 0 <= accepted <= proposed, "at most the proposed tokens are accepted"
        if not proposed:
            return window
        if self.kind == "marginal":
            return self.most
        all_accepted = accepted == proposed
        if self.kind == "additive":
            return min(window + 2, self.most) if all_accepted else self.least
        return min(2 * window, self.most) if all_accepted else max(window // 2, self.least)


ADDITIVE = WindowRule("additive", 2, 32)
MULTIPLICATIVE = WindowRule("multiplicative", 2, 16)
MARGINAL = WindowRule("marginal", 32, 32)
WINDOW_RULES = {rule.kind: rule for rule in (ADDITIVE, MULTIPLICATIVE, MARGINAL)}


DECIDE_STEPS = 16  # between two decisions while the number of rows stays the same
MARGIN_ON, MARGIN_OFF = 1.05, 1.0  # the gap prevents oscillation: a change copies the KV cache
FORGET_TRIALS = 0.995  # each new observation multiplies the weight of the earlier ones by this
PRIOR_TRIALS = 4.0  # weight of the prior, in observations
TRY_SHARE = 0.05  # least expected share of accepted tokens; below it drafting is not tried
BIAS_LEAST = 0.5  # lower bound of `bias`: an answer without a similar earlier one predicts little
MEASURED = 3  # steps of a kind before its cost is used, plain steps before drafts are tried
JUDGED = 8  # passes before their gain is judged: the gain of one pass varies with its drafts
RECENT_S, RECENT = 0.4, 64  # newest passes that are judged: off within a second of losing
LOADS = 15  # steps whose median is the load
OUTLIER = 4.0  # a step that took this many times its expected time was interrupted
DRIFT = 1.2  # a change of the load after which both costs are compared again
DRIFT_SHORTENS = 0.5  # share of a rest that a drift removes: the load may have caused the loss
PROBE_STEPS = 4  # plain steps of a probe
PROBE_SHARE = 0.01  # share of the time that probes may lose: a rest of 100 times the loss follows
REST_S, REST_S_MAX = 0.5, 60.0
CREDIT_SHARE, CREDIT_S_MAX = 0.03, 0.3  # share of gained time that a later loss uses up first
FRESH_S = 0.5  # age of a comparison that may turn drafts off; an older one is renewed by a probe
CONFIRMED_S_MAX = 8.0  # between two probes: one that confirms the choice doubles the interval


@dataclass(slots=True)
class SuccessRate:
    right: float = 0.0
    tried: float = 0.0

    def add(self, tried: int, right: int) -> None:
        # Drafted tokens after the first failure are not observed.
        trials = right + (right < tried)
        keep = FORGET_TRIALS**trials
        self.right = self.right * keep + right
        self.tried = self.tried * keep + trials

    def rate(self, prior: float) -> float:
        return (self.right + PRIOR_TRIALS * prior) / (self.tried + PRIOR_TRIALS)


@dataclass(frozen=True, slots=True)
class _Pass:
    # `plain_s` is the time of plain steps for as many tokens at no load.
    seconds: float
    plain_s: float


@dataclass(slots=True)
class _Load:
    # How many times longer than at no load a step takes now.
    factor: float = 1.0
    # The first steps after a change of mode (plain or drafting) measure the new mode's cost at the
    # previous load; otherwise the gate would take a wrong cost for a load.
    settles: bool = True
    recent: deque[float] = field(default_factory=lambda: deque[float](maxlen=LOADS))
    """Times of the newest steps over their expected times at no load."""

    def changed_mode(self) -> None:
        self.settles = True
        self.recent.clear()

    def seen(self, times: StepTimes, size: float, seconds: float) -> StepTimes:
        if times.count < MEASURED:
            return times.seen(size, seconds / self.factor)
        self.recent.append(seconds / max(1e-12, times.cost().seconds(size)))
        if self.settles:
            return self.settled(times) if len(self.recent) == LOADS else times
        if len(self.recent) == LOADS:
            self.factor = median(self.recent)
        return times.seen(size, seconds / self.factor)

    def settled(self, times: StepTimes) -> StepTimes:
        # By the steps since the change of mode.
        corrected = times.times(median(self.recent) / self.factor) if self.recent else times
        self.settles = False
        self.recent.clear()
        return corrected


@dataclass(slots=True)
class DraftGate:
    """Decides whether the next steps draft: where passes make more tokens per second than plain
    steps would under the present load (TLT, arXiv 2511.16665; Seer). `now_s` is of the clock that
    measures the steps.

    That a load slows both kinds alike is checked by a probe (a few plain steps) while drafting is
    on, by a trial (some passes) while it is off; after a loss the next one waits.
    """

    rule: WindowRule = MARGINAL
    forced: bool | None = None
    on: bool = False
    is_hopeless: bool = True
    """Whether drafts were too seldom found and accepted, at the last decision, to be tried."""
    plain: StepTimes = field(default_factory=StepTimes)
    passes: StepTimes = field(default_factory=StepTimes)
    hit_rate: SuccessRate = field(default_factory=SuccessRate)
    acceptance_rate: SuccessRate = field(default_factory=SuccessRate)
    bias: float = 1.0
    """Measured gain over expected gain."""
    probing: bool = False
    """Whether a probe of plain steps runs, after which drafting resumes."""
    _load: _Load = field(default_factory=_Load)
    _compared: tuple[float, float] = (1.0, 1.0)
    """Lowest and highest load at which the present choice was measured to be faster."""
    _compared_s: float = 0.0
    _is_trial: bool = False
    """Drafting was turned on to be tried and is not judged yet."""
    _is_unjudged: bool = False
    """Plain steps were just measured and the passes since are not judged yet."""
    _recent: deque[_Pass] = field(default_factory=lambda: deque[_Pass](maxlen=RECENT))
    _probed: int = 0
    _changed_s: float = 0.0
    _rests: dict[int, float] = field(default_factory=dict[int, float])
    """The time until which drafts stay off after a loss, by size of the batch (`_size`)."""
    _probes_at: float = 0.0
    _tried_s: float | None = None
    """The time of the newest trial; with None a trial needs no expected advantage."""
    _judged_s: float = 0.0
    """Time gained since the newest judgement is not yet in `_credit_s`."""
    _credit_s: float = 0.0
    """A share of the time that drafts gained, less the losses that it has offset."""
    _confirmed_s: float = REST_S
    """The interval after which a choice that probes confirm is probed again."""

    @property
    def steps_to_decision(self) -> int:
        """While the number of rows stays the same."""
        if self.probing:
            return PROBE_STEPS
        return JUDGED if self.on and self._is_unjudged else DECIDE_STEPS

    def add_plain_steps(self, rows: float, seconds: float) -> None:
        self._probed += 1
        self.plain = self._load.seen(self.plain, rows, seconds)

    def add_pass(self, rows: int, tokens: int, gained: int, seconds: float) -> None:
        if self.passes.count >= MEASURED:
            seconds_max = OUTLIER * self._load.factor * self.passes.cost().seconds(tokens)
            seconds = min(seconds, seconds_max)
        self.passes = self._load.seen(self.passes, tokens, seconds)
        plain_s = gained / rows * self.plain.cost().seconds(rows)
        self._recent.append(_Pass(seconds, plain_s))

    def decide(self, rows: int, now_s: float) -> bool:
        hit_rate, rate = self.hit_rate.rate(0.0), self.acceptance_rate.rate(0.0)
        self.is_hopeless = hit_rate * rate <= TRY_SHARE
        if self.forced is not None:
            self.on = self.forced
        elif not rows or self.is_hopeless:
            self._turn(False, now_s)
            self._load.changed_mode()
            self.probing = self._is_trial = False
        elif self.probing:
            self._end_probe(now_s)
        elif self.on:
            self._judge(rows, now_s)
        elif self._is_worth_trying(now_s, rows):
            self._tried_s = self._compared_s = now_s
            self._is_trial = self._is_unjudged = True
            self._turn(True, now_s)
            self._load.changed_mode()
        return self.on

    def pass_cost(self, rows: int) -> StepCost:
        if self.passes.count >= MEASURED or self.plain.count < MEASURED:
            return self.passes.cost()
        # Not measured yet: half of a plain step's time is taken as proportional to the rows. Drafts
        # of the first trial then have a length that is likely to pay, so it loses little, and its
        # cost is representative of later passes.
        half_s = self.plain.cost().seconds(rows) / 2
        return StepCost(half_s, half_s / rows)

    def advantage(self, rows: int) -> float:
        """Returns the expected speed with drafts over that without; 0 if no draft pays."""
        hit_rate, rate = self.hit_rate.rate(0.0), self.acceptance_rate.rate(0.0)
        drafted = best_draft_speed(rows, self.rule.most, hit_rate, rate, self.passes.cost())
        return drafted * self.plain.cost().seconds(rows) / rows

    def gain(self) -> float | None:
        """Returns passes' measured speed over plain steps'; None while there are too few passes."""
        newest: list[_Pass] = []
        for verified in reversed(self._recent):
            if len(newest) >= JUDGED and sum(p.seconds for p in newest) >= RECENT_S:
                break
            newest.append(verified)
        if len(newest) < JUDGED:
            return None
        plain_s = self._load.factor * sum(p.plain_s for p in newest)
        return plain_s / max(1e-12, sum(p.seconds for p in newest))

    def _turn(self, on: bool, now_s: float) -> None:
        if on == self.on:
            return
        self.on, self._changed_s = on, now_s
        self._recent.clear()

    def _has_drifted(self) -> bool:
        load_min, load_max = self._compared
        return not load_min / DRIFT < self._load.factor < load_max * DRIFT

    def _note_compared(self) -> None:
        load_min, load_max = self._compared
        self._compared = min(load_min, self._load.factor), max(load_max, self._load.factor)

    def _judge(self, rows: int, now_s: float) -> None:
        gain = self.gain()
        if gain is None:
            return
        expected = self.advantage(rows)
        bias = min(max(gain / expected, BIAS_LEAST), 1.0) if expected else BIAS_LEAST
        self.bias += (bias - self.bias) / 4  # smoothed: the gain of few passes varies
        loses = gain <= MARGIN_OFF
        is_fresh = self._is_unjudged or now_s - self._compared_s < FRESH_S
        self._is_unjudged = False
        gained_s = (now_s - max(self._judged_s, self._changed_s)) * (gain - 1)
        self._credit_s = min(self._credit_s + CREDIT_SHARE * max(gained_s, 0.0), CREDIT_S_MAX)
        self._judged_s = now_s
        if loses and is_fresh:
            self._lose(rows, min(RECENT_S, now_s - self._changed_s) * (1 - gain), now_s)
        elif loses or now_s >= self._probes_at or (self._has_drifted() and not is_fresh):
            self._turn(False, now_s)
            self._load.changed_mode()
            self.probing, self._probed = True, 0
        elif self._is_trial:
            self._is_trial, self._compared = False, (self._load.factor, self._load.factor)

    def _lose(self, rows: int, lost_s: float, now_s: float) -> None:
        # A lost trial widens the range of compared loads.
        if self._is_trial:
            self._note_compared()
        else:
            self._compared = self._load.factor, self._load.factor
        self._is_trial, self._confirmed_s = False, REST_S
        paid_s = min(lost_s, self._credit_s)
        self._credit_s -= paid_s
        rest_s = _rest_s(lost_s - paid_s)
        self._rests[_size(rows)] = self._probes_at = now_s + rest_s
        self._turn(False, now_s)
        self._load.changed_mode()

    def _end_probe(self, now_s: float) -> None:
        if self._probed < PROBE_STEPS:
            return
        self.probing = False
        # Drafting resumes and is judged by the times just measured.
        self.plain = self._load.settled(self.plain)
        self._confirmed_s = min(2 * self._confirmed_s, CONFIRMED_S_MAX)
        cost_s = now_s - self._changed_s
        self._probes_at = now_s + _rest_s(max(cost_s, PROBE_SHARE * self._confirmed_s))
        self._compared_s, self._is_unjudged = now_s, True
        self._note_compared()
        self._turn(True, now_s)

    def _is_worth_trying(self, now_s: float, rows: int) -> bool:
        if self.plain.count < MEASURED:
            return False
        # A drift of the load makes the known costs old, and shortens all rests.
        if self._has_drifted():
            self._note_compared()
            self._tried_s, self.bias = None, 1.0
            for size, until in self._rests.items():
                self._rests[size] = until - max(0.0, until - now_s) * DRIFT_SHORTENS
        if now_s < self._rests.get(_size(rows), 0.0):
            return False
        # The cost of a pass is unknown or old.
        if self._tried_s is None or now_s - self._tried_s > REST_S_MAX:
            return True
        return self.bias * self.advantage(rows) > MARGIN_ON


def measured_gate(switch: DraftSwitch | None) -> DraftGate:
    gate = switch or DraftGate()
    assert isinstance(gate, DraftGate), "a switch that takes no measurements"
    return gate


def _rest_s(lost_s: float) -> float:
    return min(max(lost_s / PROBE_SHARE, REST_S), REST_S_MAX)


def _size(rows: int) -> int:
    # Classes of 1, 2 to 3, 4 to 7, … rows: a loss with the last rows of a batch does not predict a
    # loss with a full batch.
    return rows.bit_length()
