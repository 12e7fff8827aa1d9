"""States of a run written by a test: a healthy run, and changes to it."""

import io
from collections.abc import Callable

from rich.console import Console

from rollstream.look.monitor.concerns import warnings_of
from rollstream.look.monitor.snapshot import (
    RunSettings,
    RunSnapshot,
    run_settings_of,
    take_snapshot,
)
from rollstream.look.monitor.state import RunState
from rollstream.look.monitor.view import TerminalSize, render_frame
from rollstream.run.config.settings import Configuration
from testbed.oncall.records import (
    GROUPS as GROUPS,
    LENGTH as LENGTH,
    NOW_S as NOW_S,
    SAMPLES as SAMPLES,
    SETTINGS as SETTINGS,
    STEP_S as STEP_S,
    STEPS as STEPS,
    admitted as admitted,
    announced as announced,
    applied as applied,
    apply_healthy,
    apply_step as apply_step,
    begin_s as begin_s,
    done as done,
    finished as finished,
    half,
    names as names,
    status as status,
    take as take,
)


def plan() -> RunSettings:
    return run_settings_of(Configuration.model_validate(SETTINGS))


def healthy(rollouts: int = 2, reward: Callable[[int], float] = half) -> RunState:
    """Twenty steps trained at lag 1, four groups open, rollouts busy."""
    state = plan().state()
    state.began_s = begin_s(0)
    apply_healthy(state, rollouts, reward)
    state.newest_s = dict.fromkeys(("admissions", "ledger", "status", "trajectories"), NOW_S - 0.2)
    return state


def moment(state: RunState, now_s: float = NOW_S) -> RunSnapshot:
    return take_snapshot(state, plan(), now_s)


def kinds(state: RunState, now_s: float = NOW_S) -> list[str]:
    """The warnings of this moment."""
    return [concern.kind for concern in warnings_of(moment(state, now_s))]


def drawn(at: RunSnapshot, columns: int, lines: int | None = None, detailed: bool = True) -> str:
    console = Console(width=columns, file=io.StringIO(), force_terminal=False)
    console.print(render_frame(at, TerminalSize(columns, lines), detailed))
    return console.file.getvalue()  # pyright: ignore


def move(ago_s: float, source: str, destination: str, requests: int) -> dict[str, object]:
    """A line of `moves.jsonl`."""
    where = {"source": source, "destination": destination}
    return {"time_s": NOW_S - ago_s, **where, "requests": requests, "plan_s": 0.001}
