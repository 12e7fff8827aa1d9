"""States of a run, made of records and metrics lines as in `testbed/oncall/records.py`, for the
situations in which advice is tested (`advice_situations.py`).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rollstream.look.monitor.snapshot import RunSnapshot, run_settings_of, take_snapshot
from rollstream.look.monitor.state import ArchiveBacklog, DeadLetters, RunState, foreign_line
from rollstream.run.config.settings import Configuration
from rollstream.streams.records import GroupClosed, Opened, Prompt
from rollstream.streams.values import Sampling, Version
from testbed.oncall import records
from testbed.oncall.records import GROUPS, NOW_S, SAMPLES, SETTINGS, STEP_S, STEPS

OPEN = STEPS * GROUPS  # the first open group
PLAN = run_settings_of(Configuration.model_validate(SETTINGS))


def healthy(rollouts: int = 2, reward: Callable[[int], float] = records.half) -> RunState:
    state = PLAN.state()
    state.began_s = records.begin_s(0)
    records.apply_healthy(state, rollouts, reward)
    state.newest_s = dict.fromkeys(("admissions", "ledger", "status", "trajectories"), NOW_S - 0.2)
    return state


def at(state: RunState, now_s: float = NOW_S, **changes: Any) -> RunSnapshot:
    shown = take_snapshot(state, PLAN, now_s)
    plan = {name: changes.pop(name) for name in [*changes] if hasattr(PLAN, name)}
    return replace(shown, plan=replace(PLAN, **plan), **changes)


def waits(rollouts: int = 2, share: float = 0.75, busy_s: float = 0.0) -> RunState:
    """The trainer waits for this share of each of the last steps."""
    state = healthy(rollouts)
    for step in range(STEPS - 10, STEPS + 1):
        state.apply(records.done(step, wait_s=share * STEP_S, busy_s=busy_s))
    return state


def idle(state: RunState, share: float = 0.9, **changes: Any) -> RunState:
    """Rollouts that have had nothing to decode since their first heartbeat."""
    for name in [*state.rollouts]:
        before = state.rollouts[name][-1].idle_s
        for beat in (1, 2):
            values = {"idle_s": before + share * (0.2 + beat - 2 + 0.99), **changes}
            state.apply(records.status(name, NOW_S - 2 + beat, **values))
    return state


def admit(state: RunState, groups: range) -> RunState:
    for group in groups:
        state.apply(records.admitted(group), NOW_S - 1)
    return state


def prompts(state: RunState) -> RunState:
    for group in range(OPEN + GROUPS, OPEN + 2 * GROUPS):
        tokens = np.zeros(4, np.uint32)
        state.apply(Prompt(group, "remainder", tokens, SAMPLES, Sampling(), 0), NOW_S)
    return state


def near_the_end(state: RunState) -> RunState:
    """The run's last step: the open groups are all that it needs."""
    for step in range(STEPS + 1, 60):
        state.apply(records.done(step, NOW_S - 2, wait_s=0.75 * STEP_S))
    return state


def ready(state: RunState) -> RunState:
    admit(state, range(OPEN, OPEN + 5 * GROUPS))
    for group in range(OPEN, OPEN + 5 * GROUPS):
        for index in range(SAMPLES):
            state.apply(records.finished(group, index, index % 2, STEPS), NOW_S)
    return state


def events(state: RunState, *lines: tuple[float, str, str]) -> RunState:
    """Lines of the supervisor: seconds ago, event and role."""
    for ago_s, event, role in lines:
        line = {"time_s": NOW_S - ago_s, "event": event, "role": role, "code": 1}
        state.apply_event(line)
    return state


def ended(finish: str, count: int) -> RunState:
    state = healthy()
    for number in range(count):
        group, index = divmod(number, SAMPLES)
        reward = None if finish == "dead" else float(index % 2)
        state.apply(records.finished(500 + group, index, reward, STEPS, finish=finish), NOW_S)
    return state


def closed(reason: Any, count: int) -> RunState:
    state = healthy()
    for group in range(1000, 1000 + count):
        state.apply(GroupClosed(group, reason, "", STEPS), NOW_S)
    return state


def unscored(**changes: Any) -> RunSnapshot:
    """One group has all its answers for 500 s, and lacks an annotation."""
    state = replace(PLAN, annotations=("judge",)).state()
    state.began_s = records.begin_s(0)
    state.steps.append(records.done(STEPS))
    state.apply(records.announced(STEPS))
    state.apply(records.admitted(OPEN), NOW_S - 600)
    for index in range(SAMPLES):
        state.apply(records.finished(OPEN, index, float(index % 2), STEPS), NOW_S - 500)
    for number in range(2):
        state.apply(records.status(f"rollout-{number}"), NOW_S - 0.2)
    state.newest_s = {"status": NOW_S - 0.2}
    return at(state, **changes)


def later(state: RunState, seconds: float) -> RunSnapshot:
    return at(state, NOW_S + seconds)


def resumed(state: RunState, ago_s: float) -> RunState:
    """The same run after some days, started again `ago_s` seconds ago."""
    state.apply_event({"time_s": NOW_S - 900, "event": "stopped"})
    return events(state, (ago_s, "start", "trainer"), (ago_s, "start", "rollout-0"))


def beating(state: RunState, at_s: float) -> RunState:
    for number in range(2):
        state.apply(records.status(f"rollout-{number}", at_s), at_s)
    state.newest_s["status"] = at_s
    return state


def clock(offset_s: float, silent_s: float = 0.2) -> RunState:
    """A rollout whose clock is off by so much, read by an observer that follows the run."""
    state = healthy()
    state.live_s = NOW_S - silent_s
    state.apply(records.status("rollout-1", NOW_S - silent_s + offset_s, term=2), NOW_S)
    return state


def with_backlog(state: RunState, seconds: float) -> RunState:
    state.unarchived = {"trajectories": ArchiveBacklog(70_000, NOW_S - seconds)}
    return state


def with_dead_letter() -> RunState:
    state = healthy()
    state.dead_letters = {"status": DeadLetters(1, "odd bytes")}
    return state


def with_foreign(counts: dict[str, int]) -> RunState:
    state = healthy()
    state.apply_move(foreign_line(counts, NOW_S))
    return state


def verified(is_verified: bool, health: str = "generating") -> RunState:
    state = healthy()
    state.apply(records.status("rollout-0", NOW_S, verified=is_verified, health=health))
    return state


def lagging(mean: float, masked: int = 0) -> RunState:
    state = healthy()
    for step in range(STEPS - 10, STEPS + 1):
        counts = {"masked_tokens": masked}
        state.apply(records.done(step, lag_consumed_mean=mean, counts=counts))
    return state


def restarted(times: int) -> RunState:
    state = healthy()
    for term in range(1, times + 2):
        state.apply(Opened("trainer", term), NOW_S - 20 * (times + 2 - term))
    return state


def rewards(value: float, steps: int) -> RunState:
    state = healthy()
    for step in range(STEPS - steps + 1, STEPS + 1):
        state.apply(records.done(step, reward_mean=value))
    return state


def skipped(count: float) -> RunState:
    state = healthy()
    state.apply(records.done(STEPS, updates_skipped=count))
    return state


def with_starting(state: RunState) -> RunState:
    state.apply(records.status("rollout-9", health="starting", running=0))
    return state


def few_steps() -> RunState:
    state = PLAN.state()
    for step in range(1, 4):
        records.apply_step(state, step)
        state.apply(records.done(step, NOW_S - 4 + step, wait_s=1.9))
    for number in range(2):
        state.apply(records.status(f"rollout-{number}"))
    state.newest_s = {"status": NOW_S}
    return state


def heard(seconds: float) -> RunState:
    state = healthy()
    for number in range(2):
        state.live_s = state.heard_s = NOW_S + seconds - 0.2
        state.apply(records.status(f"rollout-{number}", NOW_S, version=Version(STEPS, 1)), NOW_S)
    state.steps[-1] = records.done(STEPS, NOW_S + seconds - 2)
    return state


def deaths_then_resumed() -> RunState:
    state = events(healthy(), *((ago, "death", "archive") for ago in (150.0, 140.0, 130.0)))
    state.apply_event({"time_s": NOW_S - 125, "event": "failed"})
    return events(state, (122, "start", "archive"), (122, "start", "trainer"))
