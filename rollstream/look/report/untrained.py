"""Compares the trajectories of a run that were not trained (failed, dropped for their age) with the
trained ones, for the report. If long answers or hard prompts fail or are dropped more often, that
is a bias.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from rollstream.look.monitor.failure_causes import failure_cause
from rollstream.look.monitor.snapshot import RunWarning
from rollstream.look.report.cards import card, table
from rollstream.look.report.elements import PageElement

if TYPE_CHECKING:  # imports DuckDB
    from rollstream.look.index.run_index import RunIndex

# Fewer failures give no warning, for the reason of `DROPPED_MIN`.
FAILED_MIN = 40
# Fewer failed or dropped samples per trained sample hardly affect learning.
SHARE_MIN = 0.02
# A smaller difference of two medians or means, as a share of that of the trained samples, gives no
# warning.
DIFFERENCE_MIN = 0.1


@dataclass(frozen=True, slots=True)
class FailedCause:
    """The failures of one cause, with the median number of their generated tokens. `again` counts
    those after which the environment was asked again.
    """

    cause: str
    failed: int
    again: int
    length: float | None


@dataclass(frozen=True, slots=True)
class EpisodeComparison:
    """Failed trajectories against trained ones. `reward_near` is the mean reward of trained samples
    whose group has a failed one, `reward_trained` that of all. `released` counts trajectories that
    redundancy released, `abandoned` turns of trained episodes that are not trained. Dialogues and
    episodes of agents lasted `open_s` in all, of which they waited for their environments or
    programs for `waiting_s`.
    """

    causes: tuple[FailedCause, ...] = ()
    failed: int = 0
    trained: int = 0
    released: int = 0
    length_failed: float | None = None
    length_trained: float | None = None
    reward_near: float | None = None
    reward_trained: float | None = None
    waiting_s: float = 0.0
    open_s: float = 0.0
    abandoned: int = 0

    @property
    def waiting_share(self) -> float | None:
        """None without dialogues."""
        return self.waiting_s / self.open_s if self.open_s else None


FAILED = "SELECT reason, tokens FROM t WHERE finish = 'dead'"
AGAIN = "SELECT reason, count(*) FROM (SELECT unnest(failures) AS reason FROM t) GROUP BY reason"
TRAINED = """
SELECT count(*) AS trained, median(tokens) AS length_trained, avg(reward) AS reward_trained,
    avg(reward) FILTER ("group" IN (SELECT "group" FROM t WHERE finish = 'dead')) AS reward_near,
    coalesce(sum(abandoned), 0)::BIGINT AS abandoned
FROM t WHERE step IS NOT NULL AND finish != 'dead'
"""
# A step that is repeated after a crash does not count them again: its first record has the number.
RELEASED = """
SELECT coalesce(sum(most), 0)::BIGINT FROM (
    SELECT max(coalesce(counts['released'], 0)) AS most FROM done GROUP BY step)
"""
DIALOGUES = """
SELECT coalesce(sum(waiting_s), 0) AS waiting_s,
    coalesce(sum(greatest(0, finished_s - started_s)), 0) AS open_s
FROM t WHERE waiting_s IS NOT NULL
"""


def compare_episodes(index: "RunIndex") -> EpisodeComparison:
    lengths: dict[str, list[int]] = {}
    for reason, tokens in index.cursor().execute(FAILED).fetchall():
        lengths.setdefault(failure_cause(reason or ""), []).append(tokens)
    again: Counter[str] = Counter()
    for reason, count in index.cursor().execute(AGAIN).fetchall():
        again[failure_cause(reason)] += count
    every = [length for failed in lengths.values() for length in failed]
    names = sorted({*lengths, *again}, key=lambda name: (-len(lengths.get(name, ())), name))
    return EpisodeComparison(
        causes=tuple(
            FailedCause(
                name,
                len(lengths.get(name, ())),
                again[name],
                float(median(lengths[name])) if name in lengths else None,
            )
            for name in names
        ),
        failed=len(every),
        released=index.value(RELEASED),
        length_failed=float(median(every)) if every else None,
        **(index.row(TRAINED) or {}),
        **(index.row(DIALOGUES) or {}),
    )


# Fewer dropped samples give no warning: if the spread is half of the mean, the median of 40 lengths
# errs by 1.25 · 0.5 / √40 = 10 %.
DROPPED_MIN = 40


@dataclass(frozen=True, slots=True)
class DropComparison:
    """Dropped samples against trained ones: their numbers, and the medians of their lengths and
    rewards, None of no values.

    Samples are dropped because of their lag or at a group's deadline. That is a bias, mostly
    against long answers (docs/explanation/scheduling.md). A sample counts as dropped if its group
    expired, or was trained without it in a step whose record counts dropped samples. Dead
    trajectories are neither.
    """

    dropped: int = 0
    trained: int = 0
    length_dropped: float | None = None
    length_trained: float | None = None
    reward_dropped: float | None = None
    reward_trained: float | None = None


DROPPED = """
SELECT count(*) FILTER (is_dropped) AS dropped, count(*) FILTER (is_trained) AS trained,
    median(tokens) FILTER (is_dropped) AS length_dropped,
    median(tokens) FILTER (is_trained) AS length_trained,
    median(reward) FILTER (is_dropped) AS reward_dropped,
    median(reward) FILTER (is_trained) AS reward_trained
FROM (
    SELECT tokens, reward, t.step IS NOT NULL AS is_trained, t.step IS NULL AND (e.ended = 'expired'
        OR (list_contains(e.members, t.o) AND s.counts['dropped'] > 0)) AS is_dropped
    FROM t LEFT JOIN ended e USING ("group") LEFT JOIN steps s ON s.step = e.step
    WHERE finish != 'dead')
"""


def compare_dropped(index: "RunIndex") -> DropComparison:
    return DropComparison(**(index.row(DROPPED) or {}))


def drop_bias_warnings(drops: DropComparison) -> Iterator[RunWarning]:
    if drops.dropped < max(DROPPED_MIN, SHARE_MIN * drops.trained):
        return
    pairs = (
        ("length", drops.length_dropped, drops.length_trained, "{:.0f}"),
        ("reward", drops.reward_dropped, drops.reward_trained, "{:.3g}"),
    )
    if differ := differing(pairs):
        yield RunWarning(
            "dropped_bias",
            f"{drops.dropped} answers dropped for age differ from the {drops.trained} trained: "
            f"median {' and '.join(differ)}",
            "a larger dispatch.max_lag or more rollouts drop fewer",
        )


def differing(
    pairs: Iterable[tuple[str, float | None, float | None, str]],
) -> list[str]:
    """Returns a text for each known pair of values that differ by more than `DIFFERENCE_MIN`; a
    pair is a name, the untrained and the trained value, and their format.
    """
    return [
        f"{name} {form.format(other)} against {form.format(trained)}"
        for name, other, trained, form in pairs
        if other is not None and trained is not None
        if abs(other - trained) > DIFFERENCE_MIN * abs(trained)
    ]


def failed_bias_warnings(episodes: EpisodeComparison) -> Iterator[RunWarning]:
    if episodes.failed < max(FAILED_MIN, SHARE_MIN * episodes.trained):
        return
    pairs = (
        ("median length", episodes.length_failed, episodes.length_trained, "{:.0f}"),
        ("mean reward of their groups", episodes.reward_near, episodes.reward_trained, "{:.3g}"),
    )
    if differ := differing(pairs):
        yield RunWarning(
            "failed_bias",
            f"{episodes.failed} trajectories failed ({causes_text(episodes)}) and differ from the "
            f"{episodes.trained} trained: {' and '.join(differ)}",
            "what fails is not learnt from: repair its cause, or give it more time, turns or "
            "retries (task.reply_timeout_s, task.turns_max, task.retries)",
        )


def causes_text(episodes: EpisodeComparison) -> str:
    return ", ".join(f"{cause.failed} {cause.cause}" for cause in episodes.causes if cause.failed)


def episode_card(episodes: EpisodeComparison) -> list[PageElement]:
    content: list[PageElement] = []
    if episodes.causes:
        head = ["cause", "failed", "asked again", "median length"]
        rows = [
            (cause.cause, str(cause.failed), str(cause.again), _number(cause.length))
            for cause in episodes.causes
        ]
        rows.append(("(trained)", str(episodes.trained), "", _number(episodes.length_trained)))
        content.append(table(head, rows))
    facts: list[tuple[str, str]] = []
    if episodes.failed and episodes.reward_near is not None:
        text = f"{_number(episodes.reward_near)}, of all groups {_number(episodes.reward_trained)}"
        facts.append(("mean reward in groups with a failure", text))
    if episodes.released:
        facts.append(("released, because enough others had ended", str(episodes.released)))
    if episodes.abandoned:
        text = f"{episodes.abandoned}, not trained"
        facts.append(("turns that a restarted program left behind", text))
    if episodes.waiting_share is not None:
        generating = 1 - episodes.waiting_share
        text = f"{episodes.waiting_share:.0%}, generating or queued {generating:.0%}"
        facts.append(("time of dialogues: waiting for a reply", text))
    content += [table(["", ""], facts)] if facts else []
    note = "what fails is never trained; a bias if lengths or rewards differ"
    return [card("Failed, released and waiting", note, *content)] if content else []


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
