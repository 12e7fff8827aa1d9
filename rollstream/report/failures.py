"""Folds a run's failed, released and waiting trajectories for the report, without I/O. A trajectory
that fails is never trained: if long answers or hard prompts fail more often, that is a bias.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from rollstream.monitor.failure_causes import failure_cause
from rollstream.monitor.snapshot import RunWarning
from rollstream.report import page
from rollstream.streams import records

# Fewer failures give no warning, for the reason of `history.DROPPED_MIN`.
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


@dataclass(slots=True)
class EpisodeHistory:
    """Sorts trajectories into failed and trained ones. The ledger must be applied first, because it
    decides which were trained, then the first completion of each trajectory. Memory grows by a name
    and a number per trained sample, and two numbers per group.
    """

    _used: set[str] = field(default_factory=set[str])
    _released: dict[int, int] = field(default_factory=dict[int, int])
    _trained: "array[float]" = field(default_factory=lambda: array("f"))
    _lengths: dict[str, "array[float]"] = field(default_factory=dict[str, "array[float]"])
    """By cause."""
    _again: Counter[str] = field(default_factory=Counter[str])
    _hit: set[int] = field(default_factory=set[int])
    _rewards: dict[int, tuple[float, int]] = field(default_factory=dict[int, tuple[float, int]])
    """Sum and number of the trained samples' own rewards, by group."""
    _waiting_s: float = 0.0
    _open_s: float = 0.0
    _abandoned: int = 0

    def apply(self, record: records.Record) -> None:
        match record:
            case records.Take():
                self._used.update(member.trajectory for member in record.members)
            case records.StepDone():
                released = record.counts.get("released", 0)
                # A repeated step does not count them again: its first record has the number.
                self._released[record.step] = max(released, self._released.get(record.step, 0))
            case records.Trajectory():
                self._finished(record)
            case _:
                pass

    def compared(self) -> EpisodeComparison:
        every = [length for lengths in self._lengths.values() for length in lengths]
        near = [self._rewards[group] for group in self._hit if group in self._rewards]
        names = sorted({*self._lengths, *self._again}, key=lambda name: (-self._count(name), name))
        return EpisodeComparison(
            causes=tuple(
                FailedCause(
                    name,
                    self._count(name),
                    self._again[name],
                    float(median(self._lengths[name])) if name in self._lengths else None,
                )
                for name in names
            ),
            failed=len(every),
            trained=len(self._trained),
            released=sum(self._released.values()),
            length_failed=float(median(every)) if every else None,
            length_trained=float(median(self._trained)) if self._trained else None,
            reward_near=_mean(near),
            reward_trained=_mean(list(self._rewards.values())),
            waiting_s=self._waiting_s,
            open_s=self._open_s,
            abandoned=self._abandoned,
        )

    def _count(self, cause: str) -> int:
        return len(self._lengths.get(cause, ()))

    def _finished(self, record: records.Trajectory) -> None:
        self._again.update(failure_cause(reason) for reason in record.failures)
        if record.waiting_s is not None or record.turns:
            turns_s = sum(turn.waiting_s for turn in record.turns)
            self._waiting_s += (record.waiting_s or 0.0) + turns_s
            self._open_s += max(0.0, record.finished_s - record.started_s)
        if record.finish == "dead":
            cause = failure_cause(record.reason)
            self._lengths.setdefault(cause, array("f")).append(len(record.logprobs))
            self._hit.add(record.group)
        elif record.trajectory in self._used:
            self._trained.append(len(record.logprobs))
            self._abandoned += len(record.abandoned)
            if record.reward is not None:
                total, number = self._rewards.get(record.group, (0.0, 0))
                self._rewards[record.group] = total + record.reward, number + 1


def _mean(sums: list[tuple[float, int]]) -> float | None:
    number = sum(count for _, count in sums)
    return sum(total for total, _ in sums) / number if number else None


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


def episode_card(episodes: EpisodeComparison) -> str:
    content = ""
    if episodes.causes:
        head = ["cause", "failed", "asked again", "median length"]
        rows = [
            (cause.cause, str(cause.failed), str(cause.again), _number(cause.length))
            for cause in episodes.causes
        ]
        rows.append(("(trained)", str(episodes.trained), "", _number(episodes.length_trained)))
        content += page.table(head, rows)
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
    content += page.table(["", ""], facts) if facts else ""
    note = "what fails is never trained; a bias if lengths or rewards differ"
    return page.wide("Failed, released and waiting", note, content) if content else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
