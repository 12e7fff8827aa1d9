"""Which rollouts take which lengths of a wave. Pure (invariant 9).

HistoPipe (RhymeRL, arXiv 2508.18588): the wave's prompts are ranked by expected length and cut into
ranking groups. Consecutive waves assign them in opposite directions, so a rollout with the short
end of one wave has the long end of the next, without a barrier in between. The longer groups get
more rollouts. Preemptible rollouts keep the short end in every wave, so that little is lost when
one is taken away.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollstream.consumers.dispatch.ramp import end_times, share_out


@dataclass(frozen=True, slots=True)
class RolloutSpeed:
    """A rollout and its measured speed, in any unit."""

    rollout: str
    speed: float = 1.0
    preemptible: bool = False


@dataclass(frozen=True, slots=True)
class WaveLayout:
    """Rollouts of each ranking group, shortest first; `means` are the wave's expected lengths,
    sorted.
    """

    means: tuple[float, ...]
    groups: tuple[tuple[str, ...], ...]

    def near(self, mean: float) -> Iterator[tuple[str, ...]]:
        """Rollouts of the ranking group of this length, then those of its neighbours."""
        count = len(self.groups)
        rank = bisect_left(self.means, mean) / len(self.means)
        own = min(count - 1, int(rank * count))
        yield self.groups[own]
        for away in range(1, count):
            if own + away < count:
                yield self.groups[own + away]
            if own >= away:
                yield self.groups[own - away]


def lay_out_wave(
    means: Sequence[float], workers: Sequence[RolloutSpeed], ascending: bool, samples: int, slots: int
) -> WaveLayout | None:
    """Ranking groups, one for every two rollouts, over the prompts of a wave. None where a ranking
    is useless: too few rollouts, or all lengths equal.
    """
    ranked = tuple(sorted(means))
    count = min((len(workers) + 1) // 2, len(ranked))
    if count < 2 or ranked[0] == ranked[-1]:
        return None
    longest = [ranked[(g + 1) * len(ranked) // count - 1] for g in range(count)]
    answers = max(1, len(ranked) * samples // count)
    shares = share_out(end_times(longest, answers, len(workers), lambda b: 1.0 + b / slots))
    return WaveLayout(ranked, _split_by_shares(shares, _rollouts_in_order(workers, ascending)))


def _rollouts_in_order(workers: Sequence[RolloutSpeed], ascending: bool) -> list[RolloutSpeed]:
    steady = sorted((w for w in workers if not w.preemptible), key=lambda w: w.rollout)
    passing = sorted((w for w in workers if w.preemptible), key=lambda w: w.rollout)
    return passing + (steady if ascending else steady[::-1])


def _split_by_shares(shares: Sequence[int], workers: Sequence[RolloutSpeed]) -> tuple[tuple[str, ...], ...]:
    """Cut the rollouts into one range per share. A share counts rollouts of mean speed: a range has
    fewer fast or more slow ones, and leaves at least one rollout for each later range.
    """
    mean = sum(w.speed for w in workers) / len(workers)
    groups: list[tuple[str, ...]] = []
    at, wanted, given = 0, 0.0, 0.0
    for index, share in enumerate(shares):
        begin, wanted = at, wanted + share * mean
        most = len(workers) - (len(shares) - index - 1)
        while at < most and (at == begin or given + workers[at].speed / 2 <= wanted):
            given += workers[at].speed
            at += 1
        groups.append(tuple(w.rollout for w in workers[begin:at]))
    rest = tuple(w.rollout for w in workers[at:])
    return (*groups[:-1], groups[-1] + rest)
