"""A coordinate search for the most predicted trained tokens per second, from the present choice,
once for each policy. The same inputs give the same proposal.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from rollstream.plan.tuning.choices import SPLITS_MAX, ChoiceSpace, TuningChoice
from rollstream.simulator.experiment import Prediction

# A choice, not a measurement: it decides between settings that are nearly as fast.
LAG_PRICE = 0.005
"""Of the speed, per step of mean lag."""
TOLERANCE = 0.01  # of the speed: two seeds of one simulated run differ by about as much
ROUNDS_MAX = 4  # rounds over all coordinates from one start

Evaluate = Callable[[TuningChoice], Prediction | None]


@dataclass(frozen=True, slots=True)
class PredictedChoice:
    choice: TuningChoice
    predicted: Prediction

    @property
    def worth(self) -> float:
        """Returns trained tokens per second, less the price of their lag."""
        return self.predicted.tokens_per_s * (1 - LAG_PRICE * self.predicted.lag_mean)


@dataclass(frozen=True, slots=True)
class TuningProposal:
    """The proposal with all other simulated choices, best first. `present` is None if it cannot
    run; `present_fits` is False if it may not be proposed, for its GPUs or its lag.
    """

    best: PredictedChoice
    present: PredictedChoice | None
    present_fits: bool
    others: tuple[PredictedChoice, ...]

    @property
    def gain(self) -> float | None:
        """Returns the relative gain in tokens per second over the present choice."""
        if self.present is None or not self.present.predicted.tokens_per_s:
            return None
        return self.best.predicted.tokens_per_s / self.present.predicted.tokens_per_s - 1

    def rows(self, rows_max: int) -> list[PredictedChoice]:
        """The proposal, the best choice of each other policy, then others."""
        shown, policies = [self.best], {self.best.choice.on_update}
        for candidate in self.others:
            if candidate.choice.on_update not in policies:
                policies.add(candidate.choice.on_update)
                shown.append(candidate)
        shown += [candidate for candidate in self.others if candidate not in shown][
            : max(0, rows_max - len(shown))
        ]
        return [shown[0], *sorted(shown[1:], key=lambda candidate: -candidate.worth)]


@dataclass(slots=True)
class _Search:
    space: ChoiceSpace
    evaluate: Evaluate
    progress: Callable[[int], None]
    found: dict[TuningChoice, Prediction | None] = field(
        default_factory=dict[TuningChoice, Prediction | None]
    )

    def worth(self, choice: TuningChoice) -> float:
        # Each choice is simulated once; -1 cannot run.
        if choice not in self.found:
            self.found[choice] = self.evaluate(choice)
            self.progress(len(self.found))
        predicted = self.found[choice]
        return -1.0 if predicted is None else PredictedChoice(choice, predicted).worth

    def climb(self, start: TuningChoice) -> None:
        best = start
        for _ in range(ROUNDS_MAX):
            before = best
            best = self._best_split(best)
            for values in (_slots, _lags, _repacks, _drafts):
                best = max([best, *values(self.space, best)], key=self.worth)
            if best == before:
                return

    def _best_split(self, at: TuningChoice) -> TuningChoice:
        splits = self.space.splits
        step = max(1, -(-len(splits) // SPLITS_MAX))
        tried = sorted({*range(0, len(splits), step), len(splits) - 1})
        # First over the whole range, then around the best one, closer each time.
        while True:
            choices = {index: _with_split(at, splits[index]) for index in tried}
            best = max(tried, key=lambda index: self.worth(choices[index]))
            if step == 1:
                return max([at, choices[best]], key=self.worth)
            step = -(-step // 2)
            tried = [n for n in (best - step, best, best + step) if 0 <= n < len(splits)]


def propose(
    space: ChoiceSpace,
    present: TuningChoice,
    present_fits: bool,
    evaluate: Evaluate,
    progress: Callable[[int], None] = lambda count: None,
    tolerance: float = TOLERANCE,
) -> TuningProposal | None:
    """Returns None if no choice can run. `present_fits`: the present choice takes no more GPUs than
    the space has. `evaluate` simulates a choice (None: it cannot run). Of choices whose worth
    differs by less than the share `tolerance`, the one with the fewest changes is proposed.
    """
    present_fits = present_fits and space.permits(present)
    search = _Search(space, evaluate, progress)
    search.worth(present)
    for start in _starts(space, present):
        search.climb(start)
    now = search.found[present]
    candidates = [PredictedChoice(c, p) for c, p in search.found.items() if p is not None]
    mine = None if now is None else PredictedChoice(present, now)
    usable = [candidate for candidate in candidates if present_fits or candidate.choice != present]
    if mine is not None and present_fits:
        # A proposal is never predicted slower than the present choice.
        usable = [o for o in usable if o.predicted.tokens_per_s >= mine.predicted.tokens_per_s]
    if not usable:
        return None
    worth_max = max(candidate.worth for candidate in usable)
    close = [candidate for candidate in usable if candidate.worth >= (1 - tolerance) * worth_max]
    best = min(
        close, key=lambda candidate: (candidate.choice.differences(present), -candidate.worth)
    )
    others = sorted(
        (candidate for candidate in candidates if candidate.choice not in (best.choice, present)),
        key=lambda candidate: -candidate.worth,
    )
    return TuningProposal(best, mine, present_fits, tuple(others))


def _starts(space: ChoiceSpace, present: TuningChoice) -> Iterator[TuningChoice]:
    near = min(space.splits, key=lambda split: abs(split[0] - present.rollouts))
    # Each start has a split and a lag bound of the space.
    if not space.permits(present):
        lag, waves = max(space.lags, key=lambda bound: bound[1])
        present = replace(present, max_lag=lag, waves=waves)
    for on_update in sorted(space.policies, key=lambda policy: policy != present.on_update):
        every_s = present.repack_every_s
        if on_update != "keep_version":
            every_s = None
        elif present.on_update != "keep_version":
            every_s = space.repacks[len(space.repacks) // 2]
        start = replace(present, on_update=on_update, repack_every_s=every_s)
        is_own = (present.rollouts, present.trainer_gpus) in space.splits
        yield start if is_own else _with_split(start, near)


def _with_split(choice: TuningChoice, split: tuple[int, int]) -> TuningChoice:
    return replace(choice, rollouts=split[0], trainer_gpus=split[1])


def _slots(space: ChoiceSpace, at: TuningChoice) -> Sequence[TuningChoice]:
    return [replace(at, slots=slots) for slots in space.slots]


def _lags(space: ChoiceSpace, at: TuningChoice) -> Sequence[TuningChoice]:
    return [replace(at, max_lag=lag, waves=waves) for lag, waves in space.lags]


def _repacks(space: ChoiceSpace, at: TuningChoice) -> Sequence[TuningChoice]:
    if at.on_update != "keep_version":
        return ()
    return [replace(at, repack_every_s=every_s) for every_s in space.repacks]


def _drafts(space: ChoiceSpace, at: TuningChoice) -> Sequence[TuningChoice]:
    return [replace(at, drafts=drafts) for drafts in space.drafts]
