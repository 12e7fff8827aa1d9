"""Plans repacks: which rollouts (sources) move their last requests to others (destinations), so
that the sources become empty, pull the newest weights and take new prompts
(docs/explanation/scheduling.md). Pure (invariant 9).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from rollstream.consumers.dispatch.lengths import ExpectedLength
from rollstream.streams.values import Version

# Destinations examined for one source, the fullest first: in KV, or in requests where these are
# scarcer. One without room in the other measure is passed over.
DESTINATIONS_TRIED_MAX = 64


@dataclass(frozen=True, slots=True)
class RolloutLoad:
    """The load of one rollout. `kv_…` are tokens of its KV cache; `kv_previous` above `kv_used`
    means that its requests end and no others arrive. `batch_max` is the largest decode batch that
    one more request hardly slows down. `gains`: once empty, it would take work that it cannot take
    now. `ready` is False while it pulls, is not verified, or is in a move.
    """

    rollout: str
    version: Version
    running: int
    waiting: int
    kv_used: int
    kv_previous: int
    kv_capacity: int
    batch_max: int
    ready: bool = True
    gains: bool = True
    kind: int = 0


@dataclass(frozen=True, slots=True)
class RepackMove:
    """All requests of `source` continue at `destination`."""

    source: str
    destination: str
    requests: int
    kv: int


def is_candidate(load: RolloutLoad) -> bool:
    """Whether the rollout is at the end of its KV life cycle: use below capacity and falling, no
    request waiting, room in its decode batch.
    """
    return (
        load.ready
        and load.waiting == 0
        and 0 < load.running < load.batch_max
        and load.kv_used < min(load.kv_capacity, load.kv_previous)
    )


def plan_repack(loads: Iterable[RolloutLoad], keep_version: bool = True) -> tuple[RepackMove, ...]:
    """Returns the moves; no request moves twice. With `keep_version` requests move only between
    rollouts of one version (invariant 4). No destination is filled above its KV capacity or decode
    batch bound; equal inputs give equal plans. The plan is Laminar's (arXiv 2510.12633, section 5,
    Algorithm 1), as best-fit decreasing.
    """
    alike: dict[Version | None, list[RolloutLoad]] = {}
    for load in loads:
        if is_candidate(load):
            alike.setdefault(load.version if keep_version else None, []).append(load)
    return tuple(move for group in alike.values() for move in _pack(group))


def _pack(candidates: Sequence[RolloutLoad]) -> Iterator[RepackMove]:
    if len(candidates) < 2 or not any(load.gains for load in candidates):
        return
    kv = sum(c.kv_used for c in candidates) / sum(c.kv_capacity for c in candidates)
    requests = sum(c.running for c in candidates) / sum(c.batch_max for c in candidates)
    by_kv = kv >= requests
    # slack in the scarcer dimension, name, slack in the other, kind
    bins: list[tuple[int, str, int, int]] = []
    # The largest candidates stay, and each smaller one goes whole into the fullest destination that
    # still takes it. So no destination becomes a source, and as little as possible is moved, in n
    # log n.
    for load in sorted(candidates, key=lambda c: _packing_key(c, by_kv)):
        first, second = _scarcer_first(load.kv_used, load.running, by_kv)
        at = _fullest_destination(bins, first, second, load.kind) if load.gains else None
        if at is None:
            slack = load.kv_capacity - load.kv_used, load.batch_max - load.running
            mine = _scarcer_first(*slack, by_kv)
            insort(bins, (mine[0], load.rollout, mine[1], load.kind))
            continue
        slack_first, name, slack_second, kind = bins.pop(at)
        insort(bins, (slack_first - first, name, slack_second - second, kind))
        yield RepackMove(load.rollout, name, load.running, load.kv_used)


def _packing_key(load: RolloutLoad, by_kv: bool) -> tuple[bool, int, int, int, str]:
    first, second = _scarcer_first(load.kv_used, load.running, by_kv)
    # Rollouts that would not gain can only be destinations. Of unlike machines the fastest stay.
    return load.gains, -load.kind, -first, -second, load.rollout


def _scarcer_first(kv: int, requests: int, by_kv: bool) -> tuple[int, int]:
    return (kv, requests) if by_kv else (requests, kv)


def _fullest_destination(
    bins: Sequence[tuple[int, str, int, int]], first: int, second: int, kind: int
) -> int | None:
    begin = bisect_left(bins, (first, "", 0, 0))
    for at in range(begin, min(begin + DESTINATIONS_TRIED_MAX, len(bins))):
        if bins[at][2] >= second and bins[at][3] >= kind:
            return at
    return None


STEPS_SMOOTHED = 4  # steps over which the measured time of a step is smoothed
WAITING_STEPS = 1  # steps that a finished answer waits to be trained


@dataclass(slots=True)
class StepDuration:
    """Smoothed; `lasts_s` is None until two new versions were observed."""

    lasts_s: float | None = None
    _number: int | None = None
    _since_s: float | None = None

    def observe(self, number: int, now_s: float) -> None:
        """Observes the newest version; to be called often."""
        if self._number is not None and number > self._number:
            if self._since_s is not None:
                new_s = (now_s - self._since_s) / (number - self._number)
                old_s = new_s if self.lasts_s is None else self.lasts_s
                self.lasts_s = old_s + (new_s - old_s) / STEPS_SMOOTHED
            self._since_s = now_s
        self._number = number


@dataclass(frozen=True, slots=True)
class LagBudget:
    """An answer that starts on the newest version is trained if it ends within `max_lag` −
    `WAITING_STEPS` steps of `step_s` seconds; a token takes `token_s` seconds.
    """

    max_lag: int
    step_s: float
    token_s: float

    def covers(self, tokens: float) -> bool:
        return tokens * self.token_s <= (self.max_lag - WAITING_STEPS) * self.step_s


def lag_budget(
    max_lag: int | None, step_s: float | None, tokens_per_s: Sequence[float]
) -> LagBudget | None:
    """Returns None while a quantity is not measured, or without a lag bound. `tokens_per_s` is the
    speed of one request by rollout, 0 if unknown.
    """
    speeds = [speed for speed in tokens_per_s if speed > 0]
    if max_lag is None or not step_s or not speeds:
        return None
    return LagBudget(max_lag, step_s, 1 / median(speeds))


UNFINISHED_MAX = 0.1  # largest unfinished share of an outlier's wave: RhymeRL's figure
DEVIATIONS = 2.0  # standard deviations above the mean; the paper names no threshold
MEAN_FACTOR_MIN = 1.5  # times the mean at least, where the spread is small
TAIL_FACTOR = 2.0  # a long answer is expected to generate as many tokens again


@dataclass(frozen=True, slots=True)
class RunningRequest:
    """`unfinished` is the unfinished share of its wave; `lag_left` the further versions before its
    tokens are too old, None without a bound; `longest` the limit of its answer in tokens;
    `all_members_open`: no trajectory of its group has ended.
    """

    trajectory: str
    rollout: str
    version: Version
    generated: int
    kv: int
    expected: ExpectedLength | None
    unfinished: float
    lag_left: int | None = None
    longest: int | None = None
    all_members_open: bool = True


def is_outlier(running: RunningRequest) -> bool:
    """Whether it is one of the last 10 % of its wave and longer than a threshold from history, so
    that it delays newer weights on its rollout.
    """
    expected = running.expected
    if expected is None or running.unfinished > UNFINISHED_MAX:
        return False
    return running.generated > max(_usual_length_max(expected), MEAN_FACTOR_MIN * expected.mean)


def is_too_old(running: RunningRequest) -> bool:
    # Invariant 5 drops the answer in any case.
    return running.lag_left is not None and running.lag_left < 0


def is_worth_restarting(running: RunningRequest, budget: LagBudget | None) -> bool:
    """Whether the answer is dropped as it is but would be trained if restarted on the newest
    version: its whole expected length must fit the lag budget.
    """
    expected = running.expected
    if (
        budget is None
        or expected is None
        # Ended members of its group are as old, and would be dropped while they wait.
        or not running.all_members_open
        or not is_too_old(running)
    ):
        return False
    # If it were too late again, its tokens would be generated twice for no gain.
    tokens = max(_usual_length_max(expected), TAIL_FACTOR * running.generated)
    return budget.covers(tokens if running.longest is None else min(tokens, running.longest))


def plan_outliers(
    running: Sequence[RunningRequest], loads: Sequence[RolloutLoad], budget: LagBudget | None = None
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns the destination of each moved trajectory, and the trajectories to restart: outliers
    are gathered on as few rollouts of their version as can take them, so that the others become
    empty (RhymeRL's tail migration, arXiv 2508.18588). A rollout that gives requests takes none,
    none is filled above its KV capacity or decode batch bound, and no request moves to a slower
    kind. `loads` are the rollouts that may take part. Outliers above the lag bound (invariant 5)
    are restarted where `is_worth_restarting`.
    """
    bins = {load.rollout: load for load in loads if load.ready and not load.waiting}
    outliers = [r for r in running if r.rollout in bins and is_outlier(r)]
    restarts = tuple(sorted(r.trajectory for r in outliers if is_worth_restarting(r, budget)))
    by_rollout: dict[str, list[RunningRequest]] = {}
    for request in outliers:
        if not is_too_old(request) and request.version == bins[request.rollout].version:
            by_rollout.setdefault(request.rollout, []).append(request)
    slack = {
        name: [load.kv_capacity - load.kv_used, load.batch_max - load.running]
        for name, load in bins.items()
    }
    moves: dict[str, str] = {}
    destinations: list[str] = []
    for name in sorted(by_rollout, key=lambda n: (-bins[n].kind, -len(by_rollout[n]), n)):
        mine = {
            request.trajectory: _reserve_destination(request, destinations, bins, slack)
            for request in sorted(by_rollout[name], key=lambda r: (-r.kv, r.trajectory))
        }
        if not bins[name].gains or not all(mine.values()):
            destinations.append(name)  # no gain, or not all fit elsewhere
            _return_reservations(by_rollout[name], mine, slack)
            continue
        moves.update({t: to for t, to in mine.items() if to is not None})
    return moves, restarts


def _usual_length_max(expected: ExpectedLength) -> float:
    return expected.mean + DEVIATIONS * expected.spread


def _reserve_destination(
    outlier: RunningRequest,
    destinations: Sequence[str],
    bins: dict[str, RolloutLoad],
    slack: dict[str, list[int]],
) -> str | None:
    for name in destinations:
        if bins[name].version != outlier.version:
            continue
        if slack[name][0] >= outlier.kv and slack[name][1] >= 1:
            slack[name][0] -= outlier.kv
            slack[name][1] -= 1
            return name
    return None


def _return_reservations(
    outliers: Sequence[RunningRequest], taken: dict[str, str | None], slack: dict[str, list[int]]
) -> None:
    for request in outliers:
        if (name := taken[request.trajectory]) is not None:
            slack[name][0] += request.kv
            slack[name][1] += 1
