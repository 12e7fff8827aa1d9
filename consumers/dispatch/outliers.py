"""Outliers: the few answers of a wave that run on beyond their expected length and delay the
rollout that must finish them under its version. Pure (invariant 9).

RhymeRL's tail migration (arXiv 2508.18588): an outlier is one of the last 10 % unfinished of its
wave and longer than a threshold from history. Outliers are gathered on as few rollouts of their
version as can take them, so that the other rollouts become empty. An answer that invariant 5 drops
in any case is restarted on the newest version, if its whole expected length fits the lag budget
there. Otherwise it would be too late again and everything generated twice; it is then left to
finish, and dropped.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from consumers.dispatch.lengths import Length
from consumers.dispatch.repack import Load
from consumers.dispatch.tempo import Budget
from streams.records import Version

UNFINISHED_MAX = 0.1  # share of its wave: the paper's figure
SPREADS = 2.0  # standard deviations above the mean; the paper names no threshold
GROWTH = 1.5  # times the mean at least, where the spread is small
AGAIN = 2.0  # the expected rest of a long tail equals the tokens that it has generated


@dataclass(frozen=True, slots=True)
class Running:
    """A request in progress. `unfinished` is the unfinished share of its wave; `lag_left` the
    number of further versions before its tokens are too old to train, None without a bound;
    `longest` the limit of its answer in tokens; `whole`: no other trajectory of its group has
    ended.
    """

    trajectory: str
    rollout: str
    version: Version
    generated: int
    kv: int
    expected: Length | None
    unfinished: float
    lag_left: int | None = None
    longest: int | None = None
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Gathering:
    """Trajectory → destination of each move, and the trajectories to restart."""

    moves: dict[str, str]
    deferred: tuple[str, ...]


def is_outlier(running: Running) -> bool:
    """Whether the request is much longer than expected in an almost finished wave. Without length
    history nothing is an outlier.
    """
    expected = running.expected
    if expected is None or running.unfinished > UNFINISHED_MAX:
        return False
    return running.generated > max(_usual_most(expected), GROWTH * expected.mean)


def is_hopeless(running: Running) -> bool:
    """Whether invariant 5 drops it in any case."""
    return running.lag_left is not None and running.lag_left < 0


def is_worth_again(running: Running, budget: Budget | None) -> bool:
    """Whether it is dropped as it is but would be trained if restarted on the newest version. Its
    length is taken to be the longer of the usual maximum and twice its present length. If others of
    its group ended before it, they are as old and would be dropped while they wait, so a restart is
    useless. Without length history nothing is restarted.
    """
    expected = running.expected
    if budget is None or expected is None or not running.whole or not is_hopeless(running):
        return False
    tokens = max(_usual_most(expected), AGAIN * running.generated)
    return budget.covers(tokens if running.longest is None else min(tokens, running.longest))


def plan_outliers(
    running: Sequence[Running], loads: Sequence[Load], budget: Budget | None = None
) -> Gathering:
    """Gather outliers where most of their version already are, never above KV capacity or B_max; a
    rollout that gives requests takes none. `loads` are the rollouts that may take part; without a
    `budget` nothing is restarted.
    """
    bins = {load.rollout: load for load in loads if load.ready and not load.waiting}
    found = [r for r in running if r.rollout in bins and is_outlier(r)]
    deferred = tuple(sorted(r.trajectory for r in found if is_worth_again(r, budget)))
    by: dict[str, list[Running]] = {}
    for one in found:
        if not is_hopeless(one) and one.version == bins[one.rollout].version:
            by.setdefault(one.rollout, []).append(one)
    slack = {
        name: [load.kv_capacity - load.kv_used, load.batch_max - load.running]
        for name, load in bins.items()
    }
    moves: dict[str, str] = {}
    takers: list[str] = []
    for name in sorted(by, key=lambda n: (-len(by[n]), n)):
        mine = {one.trajectory: _taker(one, takers, bins, slack) for one in _longest(by[name])}
        if not bins[name].gains or not all(mine.values()):
            takers.append(name)  # the moves would not empty it: it becomes a destination
            _undo(by[name], mine, slack)
            continue
        moves.update({t: taker for t, taker in mine.items() if taker is not None})
    return Gathering(moves, deferred)


def _usual_most(expected: Length) -> float:
    return expected.mean + SPREADS * expected.spread


def _longest(outliers: Sequence[Running]) -> list[Running]:
    return sorted(outliers, key=lambda r: (-r.kv, r.trajectory))


def _taker(
    one: Running, takers: Sequence[str], bins: dict[str, Load], slack: dict[str, list[int]]
) -> str | None:
    """The first destination of its version with room; the room is reserved."""
    for name in takers:
        if bins[name].version != one.version:
            continue
        if slack[name][0] >= one.kv and slack[name][1] >= 1:
            slack[name][0] -= one.kv
            slack[name][1] -= 1
            return name
    return None


def _undo(
    outliers: Sequence[Running], taken: dict[str, str | None], slack: dict[str, list[int]]
) -> None:
    for one in outliers:
        if (name := taken[one.trajectory]) is not None:
            slack[name][0] += one.kv
            slack[name][1] += 1
