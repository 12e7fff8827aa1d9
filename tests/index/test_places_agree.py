"""Report, explorer, query, tune, ls and the live state give one number for one question, over
several kinds of run.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.look.explorer.answers.questions import RunQuestions
from rollstream.look.explorer.answers.sheet import explored_history
from rollstream.look.explorer.answers.steps import show_step
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.monitor.feed import RunFeed
from rollstream.look.monitor.snapshot import RunSnapshot, run_settings_of, take_snapshot
from rollstream.look.monitor.state import RunState
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import metrics_folder, open_run_view
from rollstream.look.query.session import QuerySession
from rollstream.look.report.history import RunHistory
from rollstream.look.report.summary import open_history, summarise
from rollstream.plan.tuning.recorded import read_run
from rollstream.producers.agent_settings import AgentSettings
from rollstream.producers.settings import RolloutSettings
from rollstream.run.cli.look.ls import run_line
from rollstream.run.config.config import load_for_viewing
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.settings import LoraSettings
from rollstream.streams.records import StepDone, Superseded
from testbed.recorded import RUN_OF_0_1_0, unpack
from testbed.waiting import wait_for
from tests.analysis.asked_run import archive, make_run, open_log
from tests.index.test_run_rules import admitted, asked, finished, taken
from tests.support.synthetic_run import publish_run
from tests.support.tiny_run import TinyRun, tiny_run

SMALL = {"steps": 2, "groups_per_step": 2, "samples_per_group": 2}
AGENT = AgentSettings(episode="tests.agents.programs:two_turns")


def synthetic(folder: Path) -> None:
    publish_run(folder, steps=6)


def repeated(folder: Path) -> None:
    """Two terms trained step 2, one completion came twice, and the log is truncated."""
    make_run(folder)
    archive(folder)
    bus = open_log(folder)
    bus.truncate("ledger", {0: bus.end("ledger")[0] - 4})
    bus.close()


def recorded(folder: Path) -> None:
    unpack(RUN_OF_0_1_0, folder)


def tiny(**changed: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        folder.mkdir()
        with tiny_run(folder, trainer=SMALL, **changed) as run:
            run.start_all(rollouts=1)
            assert run.train()
            run.end()
            configure(run)

    return make


def killed(folder: Path) -> None:
    """The trainer ends in the middle of step 2, and its successor goes on."""
    folder.mkdir()
    with tiny_run(folder, trainer=SMALL) as run:
        run.start_all(rollouts=1)
        stop = threading.Event()
        thread = threading.Thread(target=run.train, args=(1, stop), daemon=True)
        thread.start()
        wait_for(lambda: bool(run.records("ledger", StepDone)))
        stop.set()
        thread.join()
        assert run.train(2)
        run.end()
        configure(run)


def configure(run: TinyRun) -> None:
    values = {
        "run": run.name, "folder": str(run.folder), "bus": "sqlite:bus", "store": "file:store",
        "dispatch": run.dispatch.model_dump(), "trainer": run.trainer.model_dump(),
        "rollouts": run.rollout.model_dump(), "sampling": {"tokens_max": run.tokens_max},
    }  # fmt: skip
    write_configuration(RunFolder(run.folder), Configuration.model_validate(values))


def on_update(policy: str) -> RolloutSettings:
    return RolloutSettings(slots=8, context_max=128, status_s=0.1, on_update=policy)  # pyright: ignore[reportArgumentType]


KINDS: dict[str, Callable[[Path], None]] = {
    "synthetic": synthetic,
    "repeated": repeated,
    "recorded": recorded,
    "in_flight": tiny(rollout=on_update("in_flight")),
    "keep_version": tiny(rollout=on_update("keep_version")),
    "lora": tiny(lora=LoraSettings(rank=2, alpha=4.0)),
    "agents": tiny(agent=AGENT, rollout=on_update("in_flight")),
    "killed": killed,
}


class Places:
    """What each place answers about the run in this folder."""

    def __init__(self, folder: Path) -> None:
        location = locate_run(str(folder))
        self.history: RunHistory = open_history(RunFolder(folder))
        self.report = summarise(self.history)
        self.ls = run_line(RunFolder(folder), time.time())
        self.tune = read_run(str(folder)).measured
        self.live, self.state = _live(folder)
        with ExploredRun(0, location, lambda *event: None, time.time) as run:
            wait_for(lambda: run.index.progress.complete and run.snapshot is not None)
            assert run.trouble == ""
            self.explored = explored_history(run)
            self.questions = RunQuestions(run).show()
            self.steps = {step: show_step(run, step) for step in self.history.steps}
        self._session = QuerySession(location, pytest.fail)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        return [row for rows in self._session.answer(sql).batches for row in rows]

    def close(self) -> None:
        self._session.close()


def _live(folder: Path) -> tuple[RunSnapshot, RunState]:
    location = locate_run(str(folder))
    plan = run_settings_of(load_for_viewing(folder / "config.json"))
    state = plan.state()
    with open_run_view(location) as view:
        feed = RunFeed(view, metrics_folder(location), with_archive=True)
        while feed.follow(state, 0.0):
            pass
    return take_snapshot(state, plan, max(state.newest_s.values())), state


SLOW = {"synthetic", "recorded", "keep_version", "lora"}


@pytest.fixture(
    scope="module",
    params=[pytest.param(k, marks=pytest.mark.slow) if k in SLOW else k for k in KINDS],
    ids=str,
)
def places(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp(request.param) / "run"
    KINDS[request.param](folder)
    answers = Places(folder)
    yield answers
    answers.close()


def test_steps_tokens_speed_and_lag_of_the_run(places: Places) -> None:
    now, report = summarise(places.explored), places.report
    (row,) = places.query(
        "SELECT max(step), coalesce(sum(tokens_trained), 0), avg(lag_consumed_mean), "
        "max(lag_consumed_max) FROM steps"
    )
    names = ("tokens_trained", "lag_consumed_mean", "lag_consumed_max")
    figures = [report.steps, *(getattr(report, name) for name in names)]
    known = [value or 0 for value in row]
    assert [value or 0 for value in figures] == pytest.approx(known, rel=1e-4)  # a count is whole
    assert [now.steps, *(getattr(now, name) for name in names)] == figures
    assert places.ls["step"] == places.live.step == report.steps
    assert (now.seconds, now.tokens_per_s) == (report.seconds, report.tokens_per_s)
    assert now.restarts == report.restarts == places.live.restarts
    if report.tokens_per_s is not None:
        speed = report.tokens_trained / report.seconds
        assert report.tokens_per_s == pytest.approx(speed, rel=1e-4)


def test_groups_by_their_end_and_why_not_trained(places: Places) -> None:
    ended = Counter(dict(places.query("SELECT ended, count(*) FROM groups GROUP BY ALL")))
    expected = {name: ended[name] for name in ("trained", "filtered", "expired", "dead", "open")}
    expected = {"admitted": sum(ended.values()), **expected}
    assert places.report.outcomes == places.explored.outcomes == expected
    assert places.state.groups.outcomes() == expected
    assert places.history.reasons == places.explored.reasons


def test_every_metric_of_every_step(places: Places) -> None:
    metrics = dict(places.query("SELECT step, metrics FROM steps"))
    assert {step: done.metrics for step, done in places.history.steps.items()} == metrics
    assert {step: done.metrics for step, done in places.explored.steps.items()} == metrics
    for step, answer in places.steps.items():
        assert answer["step"]["metrics"] == pytest.approx(metrics[step])
    assert places.live.metrics == pytest.approx(metrics[max(metrics)])
    assert list(places.live.rewards) == [
        metrics[n].get("reward_mean", 0.0) for n in sorted(metrics)
    ]


def test_trajectories_and_tokens_of_each_rollout(places: Places) -> None:
    rows = places.query(
        "SELECT rollout, count(*), sum(tokens)::BIGINT, count(*) FILTER (finish = 'length'), "
        "count(*) FILTER (finish = 'dead') FROM rewards GROUP BY ALL ORDER BY ALL"
    )
    shown = places.history.rollouts.items()
    assert rows == [
        (name, r.trajectories, r.tokens, r.cut, r.dead)
        for name, r in sorted(shown)
        if r.trajectories
    ]
    listed = places.explored.rollouts.items()
    assert [row[:3] for row in rows] == [
        (name, r.trajectories, r.tokens) for name, r in sorted(listed) if r.trajectories
    ]
    lengths = places.query("SELECT tokens FROM rewards WHERE finish != 'dead' ORDER BY tokens")
    assert list(places.tune.lengths) == [tokens for (tokens,) in lengths]
    finishes = Counter(dict(places.query("SELECT finish, count(*) FROM rewards GROUP BY ALL")))
    assert places.explored.finishes == finishes
    assert places.state.samples.finishes(1 << 20) == finishes


def test_tokens_by_their_lag(places: Places) -> None:
    consumed = places.query("SELECT lag, sum(tokens)::BIGINT FROM lag GROUP BY lag ORDER BY lag")
    assert [(row["lag"], row["tokens"]) for row in places.questions["lags"]] == consumed
    assert places.live.lag.trained == dict(consumed)
    finish = places.query("SELECT lag_finish, sum(tokens)::BIGINT FROM spans GROUP BY ALL")
    assert places.live.lag.finish == dict(sorted(finish))
    for step, answer in places.steps.items():
        of_step = places.query(
            f"SELECT lag, tokens, trajectories FROM lag WHERE step = {step} ORDER BY lag"
        )
        assert [tuple(row.values()) for row in answer["lags"]] == of_step


def test_rewards_of_tasks_and_drafts_of_passes(places: Places) -> None:
    rows = places.query(
        "SELECT task, count(*), avg(reward), avg(tokens) FILTER (finish != 'dead') FROM rewards "
        "GROUP BY ALL ORDER BY task"
    )
    tasks = [tuple(row.values()) for row in places.explored.tasks]
    assert [row[:2] for row in tasks] == [row[:2] for row in rows]
    for shown, row in zip(tasks, rows, strict=True):
        assert list(shown[2:]) == pytest.approx(list(row[2:]))
    drafts = places.query(
        "SELECT pass, task, sum(tokens)::BIGINT, sum(guessed)::BIGINT, sum(accepted)::BIGINT "
        "FROM drafts GROUP BY ALL ORDER BY ALL"
    )
    assert drafts == [
        (one.number, one.task, one.guesses.tokens, one.guesses.guessed, one.guesses.right)
        for one in places.history.drafts
    ]


def test_the_live_state_does_not_count_the_members_of_a_superseded_take() -> None:
    records = [admitted(0), finished(0, 0), finished(0, 1), taken(1, 0)]
    superseded = Superseded(1, 0, (0,), (0,), "nan")
    state = RunState()
    for record in records:
        state.apply(record)
    assert state.samples.lag_when_trained() == {0: 8}
    state.apply(superseded)
    with asked(*records, superseded) as run:
        assert (
            state.samples.lag_when_trained() == dict(run.both("SELECT lag, tokens FROM lag")) == {}
        )
        assert state.groups.outcomes()["open"] == 1
