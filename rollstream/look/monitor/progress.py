"""Speed, lag, state and phase of a run, as pure functions of its `RunState`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Literal

from rollstream.look.monitor.format import age
from rollstream.look.monitor.rollouts import SILENT_S, RolloutSnapshot, rollout_snapshots
from rollstream.look.monitor.sessions import ENDINGS, EndedState
from rollstream.look.monitor.state import RunState
from rollstream.streams.records import StepDone

# Speed and remaining time are computed from so many last steps.
RATE_STEPS = 10
RATE_S = 60.0  # window of the trajectories per second


@dataclass(frozen=True, slots=True)
class RunPace:
    """Over the last `recent_steps` steps: `step_s` is the median duration of a step,
    `recent_trained_per_s` the trained tokens. `since_step_s` is the age of the last step, `left_s`
    the estimated time to the end. None if unknown. `generated_per_s` sums up the living rollouts,
    each a mean over its last ten seconds; for a run that is over it comes from its last minute, as
    `trajectories_per_s` does.
    """

    step_s: float | None
    since_step_s: float | None
    left_s: float | None
    steps_per_h: float | None
    recent_trained_per_s: float | None
    generated_per_s: float
    trajectories_per_s: float
    recent_steps: int
    wait_share: float
    busy_share: float = 0.0
    """Computing seconds of the trainer's threads per second of the steps."""


@dataclass(frozen=True, slots=True)
class LagSummary:
    """Generated tokens of the last trajectories by lag: in `finish` when the trajectory finished,
    in `trained` when it was trained. Over the last steps, `mean` is the mean lag when trained, and
    `masked_share` the share of tokens masked for a lag above `max_lag`.
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
    """`recent` are the last steps, `remaining` the number still to train."""
    step_s = _step_s(recent)
    trajectories_per_s, tokens_per_s = state.samples.per_s(RATE_S, at_s)
    seconds = max(1e-9, _total(recent, "seconds"))
    live_per_s = sum(line.tokens_per_s for line in lines if line.is_alive())
    return RunPace(
        step_s=step_s,
        since_step_s=max(0.0, at_s - recent[-1].time_s) if recent else None,
        left_s=_remaining_s(recent, step_s, remaining, at_s),
        steps_per_h=3600 / step_s if step_s else None,
        recent_trained_per_s=_recent_trained_per_s(recent),
        generated_per_s=tokens_per_s if over else live_per_s,
        trajectories_per_s=trajectories_per_s,
        recent_steps=len(recent),
        wait_share=_total(recent, "wait_s") / seconds,
        busy_share=_total(recent, "busy_s") / seconds,
    )


def lag_summary(state: RunState, recent: Sequence[StepDone], max_lag: int | None) -> LagSummary:
    return LagSummary(
        finish=state.samples.lag_at_finish(),
        trained=_up_to(state.samples.lag_when_trained(), max_lag),
        mean=_mean(recent, "lag_consumed_mean"),
        masked_share=_masked_share(recent),
    )


def recent_steps(steps: Sequence[StepDone]) -> list[StepDone]:
    """The last `RATE_STEPS` + 1 of the newest term."""
    last = list(steps)[-RATE_STEPS - 1 :]
    # The time between the last step of one trainer and the first of its successor is not training.
    return [done for done in last if done.version.term == last[-1].version.term]


def _step_s(recent: Sequence[StepDone]) -> float | None:
    if len(recent) < 2:
        return None
    return max(1e-3, median(b.time_s - a.time_s for a, b in pairwise(recent)))


def _remaining_s(
    recent: Sequence[StepDone], step_s: float | None, remaining: int, now_s: float
) -> float | None:
    if step_s is None or remaining <= 0:
        return None
    return max(0.0, recent[-1].time_s + remaining * step_s - now_s)


def _recent_trained_per_s(recent: Sequence[StepDone]) -> float | None:
    if len(recent) < 2 or recent[-1].time_s <= recent[0].time_s:
        return None
    return _total(recent[1:], "tokens_trained") / (recent[-1].time_s - recent[0].time_s)


def _total(recent: Sequence[StepDone], name: str) -> float:
    return sum(done.metrics.get(name, 0.0) for done in recent)


def _mean(recent: Sequence[StepDone], name: str) -> float | None:
    values = [done.metrics[name] for done in recent if name in done.metrics]
    return fmean(values) if values else None


def _masked_share(recent: Sequence[StepDone]) -> float:
    masked = sum(done.counts.get("masked_tokens", 0) for done in recent)
    trained = _total(recent, "tokens_trained")
    return masked / max(1.0, masked + trained)


def _up_to(histogram: Mapping[int, int], max_lag: int | None) -> Mapping[int, int]:
    # Tokens above `max_lag` were masked, not trained.
    return {lag: n for lag, n in histogram.items() if max_lag is None or lag <= max_lag}


# Sixty heartbeats: a run with a living rollout writes far more often.
QUIET_S = 30.0
# Within it a role loads libraries and model and writes its first record.
STARTING_S = 120.0
# Longer than the supervisor's wait for the last evaluation.
EVALUATION_S = 240.0
# `new`: no record yet. `silent`: unfinished, but nothing was written for `QUIET_S`. `EndedState`:
# the run is over.
StandingState = Literal["new", "running", "silent"] | EndedState


@dataclass(frozen=True, slots=True)
class RunStanding:
    """`step` of `steps` done; `phase` describes the state in one to three words. `newest_s` is the
    time of the newest record in seconds since the epoch.
    """

    state: StandingState
    phase: str
    step: int
    steps: int
    newest_s: float | None
    is_starting: bool
    """A process may not have written its first record yet."""

    @property
    def is_over(self) -> bool:
        return self.state in ENDINGS.values()

    @property
    def is_quiet(self) -> bool:
        return self.state == "silent"


def standing_of(
    state: RunState, steps: int, now_s: float, is_evaluated: bool = True
) -> RunStanding:
    """Returns the standing at `now_s`; `is_evaluated`: an evaluation ends the run."""
    step = state.steps[-1].step if state.steps else 0
    newest_s = max(state.newest_s.values(), default=None)
    # No clock counts but the observer's.
    heard_s = newest_s if state.heard_s is None else state.heard_s
    quiet_s = 0.0 if heard_s is None else now_s - heard_s
    starts = (event["time_s"] for event in state.events if event.get("event") == "start")
    is_starting = now_s - max(starts, default=float("-inf")) < STARTING_S
    # The warm-up, which trains the initial model before the run's first version, writes no records.
    is_warming_up = state.weights is None and not state.rollouts
    is_quiet = quiet_s > QUIET_S and not is_starting and not is_warming_up
    ending = _last_ending(state)
    if ending is None and step >= steps and not is_starting and _is_idle(state, now_s, quiet_s):
        # Without a supervisor's record of the end (a cluster, a killed supervisor) a run counts as
        # finished once its last step is done and nothing was written for a while.
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
    newest = max((line["step"] for line in state.evaluations), default=step)
    return f", evaluated to v{newest:.0f}" if newest < step else ""


def _last_ending(state: RunState) -> StandingState | None:
    for event in reversed(state.events):
        if event.get("event") in ENDINGS:
            return ENDINGS[event["event"]]
        if event.get("event") == "start":
            return None
    return None


def _is_idle(state: RunState, now_s: float, quiet_s: float) -> bool:
    if any(line.is_alive() for line in rollout_snapshots(state, now_s)):
        return False
    # No evaluation can still be running, or, in a run without a supervisor, every role is silent.
    return not state.newest_s or quiet_s > (EVALUATION_S if state.events else SILENT_S)


def restart_ages(state: RunState, now_s: float) -> dict[str, tuple[float, ...]]:
    """Returns the ages of restarts that new terms show, without those by a supervisor."""
    starts: dict[str, list[float]] = {}
    for event in state.events:
        if event.get("event") == "start":
            starts.setdefault(str(event.get("role")), []).append(event["time_s"])
    ages: dict[str, tuple[float, ...]] = {}
    for role, time_s in state.restart_times:
        # A supervisor records deaths, and a run that was stopped and resumed has new terms without
        # any.
        if not any(at <= time_s < at + STARTING_S for at in starts.get(role, ())):
            ages[role] = (*ages.get(role, ()), max(0.0, now_s - time_s))
    return ages


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """Unexpected, `ago_s` seconds ago; `code` −9 is signal 9."""

    role: str
    code: int
    ago_s: float


def recorded_deaths(state: RunState, now_s: float) -> tuple[ProcessDeath, ...]:
    """Returns the recorded deaths by the present supervisor, the newest first."""
    deaths: list[ProcessDeath] = []
    has_started = False
    for event in reversed(state.events):
        # The resume may have mended the cause of deaths under an earlier supervisor.
        if event.get("event") in ENDINGS and has_started:
            break
        has_started |= event.get("event") == "start"
        if event.get("event") == "death":
            ago_s = max(0.0, now_s - event["time_s"])
            deaths.append(ProcessDeath(str(event.get("role")), int(event.get("code", 0)), ago_s))
    return tuple(deaths)


def start_age_s(state: RunState, role: str, now_s: float) -> float | None:
    starts = [
        event["time_s"]
        for event in state.events
        if event.get("event") == "start" and event.get("role") == role
    ]
    return max(0.0, now_s - max(starts)) if starts else None
