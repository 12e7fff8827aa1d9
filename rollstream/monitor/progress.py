"""Computes the progress of a run from its `RunState` (what observers know of the run from its log
and metrics files): speed and lag over the last steps, and the run's state and phase. All functions
are pure.

The supervisor records how a run ended. Without that record (no supervisor, as on a cluster, or a
killed one) a run counts as finished once its last step is done and nothing was written for a while;
a run that is quiet before its last step is `silent`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from rollstream.monitor.format import age
from rollstream.monitor.rollouts import SILENT_S, RolloutSnapshot, rollout_snapshots
from rollstream.monitor.sessions import ENDINGS, EndedState
from rollstream.monitor.state import RunState
from rollstream.streams.records import StepDone

RATE_STEPS = 10  # speed and remaining time are computed from so many last steps
RATE_S = 60.0  # window of the trajectories per second


@dataclass(frozen=True, slots=True)
class RunPace:
    """Holds the run's speed. Over the last `recent_steps` steps: `step_s` is the median duration of
    a step, `trained_per_s` the trained tokens. `since_step_s` is the age of the last step, `left_s`
    the estimated time to the run's last step. All of these are None if unknown.

    `generated_per_s` sums up the tokens per second of the living rollouts, each a mean over its
    last ten seconds; of a run that is over it is computed from its last minute's trajectories.
    `trajectories_per_s` counts the trajectories that finished in the last minute.
    """

    step_s: float | None
    since_step_s: float | None
    left_s: float | None
    steps_per_h: float | None
    trained_per_s: float | None
    generated_per_s: float
    trajectories_per_s: float
    recent_steps: int
    wait_share: float
    """Share of the steps' time in which the trainer waited for trajectories."""
    busy_share: float = 0.0
    """Computing seconds of the trainer's threads, added up, per second of the steps."""


@dataclass(frozen=True, slots=True)
class LagSummary:
    """Counts the generated tokens of the last trajectories by lag: in `finish` by the lag when the
    trajectory finished, in `trained` by the lag when it was trained, masked tokens left out. Over
    the last steps, `mean` is the mean lag of tokens when trained, and `masked_share` the share of
    generated tokens that were masked because their lag was above `max_lag`.
    """

    finish: Mapping[int, int]
    trained: Mapping[int, int]
    mean: float | None
    masked_share: float


def run_pace(
    state: RunState,
    recent: Sequence[StepDone],
    lines: Sequence[RolloutSnapshot],
    remaining: int,
    at_s: float,
    over: bool,
) -> RunPace:
    """Returns the pace at `at_s`. `recent` are the last steps (`recent_steps`), `lines` the
    rollouts, `remaining` the number of steps still to train; `over` if the run has ended.
    """
    step_s = _step_s(recent)
    trajectories_per_s, tokens_per_s = state.samples.per_s(RATE_S, at_s)
    seconds = max(1e-9, _total(recent, "seconds"))
    live_per_s = sum(line.tokens_per_s for line in lines if line.is_alive())
    return RunPace(
        step_s=step_s,
        since_step_s=max(0.0, at_s - recent[-1].time_s) if recent else None,
        left_s=_remaining_s(recent, step_s, remaining, at_s),
        steps_per_h=3600 / step_s if step_s else None,
        trained_per_s=_trained_per_s(recent),
        generated_per_s=tokens_per_s if over else live_per_s,
        trajectories_per_s=trajectories_per_s,
        recent_steps=len(recent),
        wait_share=_total(recent, "wait_s") / seconds,
        busy_share=_total(recent, "busy_s") / seconds,
    )


def lag_summary(state: RunState, recent: Sequence[StepDone], max_lag: int | None) -> LagSummary:
    """Returns the lag of the last trajectories and of the last steps (`recent`)."""
    return LagSummary(
        finish=state.samples.lag_at_finish(),
        trained=_up_to(state.samples.lag_when_trained(), max_lag),
        mean=_mean(recent, "lag_consumed_mean"),
        masked_share=_masked_share(recent),
    )


def recent_steps(steps: Sequence[StepDone]) -> list[StepDone]:
    """Returns the last `RATE_STEPS` + 1 steps, without those of earlier terms: the time between the
    last step of one trainer and the first of its successor is not training.
    """
    last = list(steps)[-RATE_STEPS - 1 :]
    return [done for done in last if done.version.term == last[-1].version.term]


def _step_s(recent: Sequence[StepDone]) -> float | None:
    """Returns the median seconds between two steps."""
    if len(recent) < 2:
        return None
    return max(1e-3, median(b.time_s - a.time_s for a, b in pairwise(recent)))


def _remaining_s(
    recent: Sequence[StepDone], step_s: float | None, remaining: int, now_s: float
) -> float | None:
    """Returns the seconds until the run's last step at the current speed."""
    if step_s is None or remaining <= 0:
        return None
    return max(0.0, recent[-1].time_s + remaining * step_s - now_s)


def _trained_per_s(recent: Sequence[StepDone]) -> float | None:
    if len(recent) < 2 or recent[-1].time_s <= recent[0].time_s:
        return None
    return _total(recent[1:], "tokens_trained") / (recent[-1].time_s - recent[0].time_s)


def _total(recent: Sequence[StepDone], name: str) -> float:
    return sum(done.metrics.get(name, 0.0) for done in recent)


def _mean(recent: Sequence[StepDone], name: str) -> float | None:
    values = [done.metrics[name] for done in recent if name in done.metrics]
    return fmean(values) if values else None


def _masked_share(recent: Sequence[StepDone]) -> float:
    """Returns the share of the last steps' generated tokens that were masked for their lag."""
    masked = sum(done.counts.get("masked_tokens", 0) for done in recent)
    trained = _total(recent, "tokens_trained")
    return masked / max(1.0, masked + trained)


def _up_to(histogram: Mapping[int, int], max_lag: int | None) -> Mapping[int, int]:
    """Drops lags above `max_lag`: those tokens were masked, not trained."""
    return {lag: n for lag, n in histogram.items() if max_lag is None or lag <= max_lag}


QUIET_S = 30.0  # sixty heartbeats: a run with a living rollout writes far more often
STARTING_S = 120.0  # within it a role loads libraries and model and writes its first record
EVALUATION_S = 240.0  # longer than the supervisor's wait for the last evaluation
StandingState = Literal["new", "running", "silent"] | EndedState
"""`new`: no record yet. `running`. `silent`: unfinished, but nothing was written for `QUIET_S`. The
others: the run is over.
"""


@dataclass(frozen=True, slots=True)
class RunStanding:
    """Describes where a run stands: its state, and `step` of `steps` done. `phase` describes the
    state in one to three words for the user. `newest_s` is the time of the newest record in seconds
    since the epoch, None for a run without records.
    """

    state: StandingState
    phase: str
    step: int
    steps: int
    newest_s: float | None
    is_starting: bool
    """True if a process started so recently that it may not have written a record yet."""

    @property
    def is_over(self) -> bool:
        """True if the run writes no more records unless it is restarted."""
        return self.state in ENDINGS.values()

    @property
    def is_quiet(self) -> bool:
        """True if the run is `silent`: unfinished, but nothing was written for `QUIET_S`."""
        return self.state == "silent"


def standing_of(
    state: RunState, steps: int, now_s: float, is_evaluated: bool = True
) -> RunStanding:
    """Returns where the run, which has `steps` steps in all, stands at `now_s`; `is_evaluated`: an
    evaluation follows the last step.
    """
    step = state.steps[-1].step if state.steps else 0
    newest_s = max(state.newest_s.values(), default=None)
    heard_s = newest_s if state.heard_s is None else state.heard_s  # no clock but the observer's
    quiet_s = 0.0 if heard_s is None else now_s - heard_s
    starts = (event["time_s"] for event in state.events if event.get("event") == "start")
    is_starting = now_s - max(starts, default=float("-inf")) < STARTING_S
    # The warm-up, which trains the initial model before the run's first version, writes no records.
    is_warming_up = state.weights is None and not state.rollouts
    is_quiet = quiet_s > QUIET_S and not is_starting and not is_warming_up
    ending = _last_ending(state)
    if ending is None and step >= steps and not is_starting and _is_idle(state, now_s, quiet_s):
        ending = "finished"
    if ending is not None:
        phase = ending + (_evaluated_to(state, step) if ending == "finished" else "")
    elif step >= steps:
        phase = "last evaluation" if is_evaluated else "ending"
    elif is_quiet:
        phase = f"silent for {age(quiet_s)}"
    elif state.weights is None or quiet_s > QUIET_S:
        phase = "starting"
    else:
        phase = "training" if step else "first step"
    running = "silent" if is_quiet else "new" if newest_s is None else "running"
    return RunStanding(ending or running, phase, step, steps, newest_s, is_starting)


def _evaluated_to(state: RunState, step: int) -> str:
    """Returns how far the versions are evaluated if the last one is not, else ""."""
    newest = max((line["step"] for line in state.evaluations), default=step)
    return f", evaluated to v{newest:.0f}" if newest < step else ""


def _last_ending(state: RunState) -> StandingState | None:
    """Returns the ending that the supervisor recorded last; None if it started a process since."""
    for event in reversed(state.events):
        if event.get("event") in ENDINGS:
            return ENDINGS[event["event"]]
        if event.get("event") == "start":
            return None
    return None


def _is_idle(state: RunState, now_s: float, quiet_s: float) -> bool:
    """True if no rollout is alive, and the newest record is so old that no evaluation can still be
    running (a run with a supervisor) or that every role is silent (a run without one).
    """
    if any(line.is_alive() for line in rollout_snapshots(state, now_s)):
        return False
    return not state.newest_s or quiet_s > (EVALUATION_S if state.events else SILENT_S)


def restart_ages(state: RunState, now_s: float) -> dict[str, tuple[float, ...]]:
    """Returns the restarts that new terms show, without those by a supervisor: it records deaths,
    and a run that was stopped and resumed has new terms without any.
    """
    starts: dict[str, list[float]] = {}
    for event in state.events:
        if event.get("event") == "start":
            starts.setdefault(str(event.get("role")), []).append(event["time_s"])
    found: dict[str, tuple[float, ...]] = {}
    for role, time_s in state.restart_times:
        if not any(at <= time_s < at + STARTING_S for at in starts.get(role, ())):
            found[role] = (*found.get(role, ()), max(0.0, now_s - time_s))
    return found


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """Describes a process that ended unexpectedly `ago_s` seconds ago; `code` −9 is signal 9."""

    role: str
    code: int
    ago_s: float


def recorded_deaths(state: RunState, now_s: float) -> tuple[ProcessDeath, ...]:
    """Returns the deaths that the supervisor recorded, the newest first; none of an earlier
    supervisor, since whoever resumed the run may have mended their cause.
    """
    found: list[ProcessDeath] = []
    has_started = False
    for one in reversed(state.events):
        if one.get("event") in ENDINGS and has_started:
            break
        has_started |= one.get("event") == "start"
        if one.get("event") == "death":
            ago_s = max(0.0, now_s - one["time_s"])
            found.append(ProcessDeath(str(one.get("role")), int(one.get("code", 0)), ago_s))
    return tuple(found)


def start_age_s(state: RunState, role: str, now_s: float) -> float | None:
    """Returns the seconds since the newest start of a role that a supervisor recorded."""
    starts = [
        one["time_s"]
        for one in state.events
        if one.get("event") == "start" and one.get("role") == role
    ]
    return max(0.0, now_s - max(starts)) if starts else None
