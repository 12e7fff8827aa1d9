"""Situations of a run, and what its advice may be in each: one that raises a concern (`planted`),
and those that look alike but are not (`look_alike`). The states are made of records and metrics
lines, as in `testbed/oncall/records.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rollstream.look.monitor.concerns import concern_of, warnings_of
from rollstream.look.monitor.machine_use import MachineUse
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning
from testbed.first_hour.advice_states import (
    OPEN,
    PLAN,
    admit,
    at,
    beating,
    clock,
    closed,
    deaths_then_resumed,
    ended,
    events,
    few_steps,
    healthy,
    heard,
    idle,
    lagging,
    later,
    near_the_end,
    prompts,
    ready,
    restarted,
    resumed,
    rewards,
    skipped,
    unscored,
    verified,
    waits,
    with_backlog,
    with_dead_letter,
    with_foreign,
    with_starting,
)
from testbed.oncall.records import GROUPS, NOW_S, STEP_S

IDLE_CORES, BUSY_CORES = MachineUse(16, 6), MachineUse(2, 1.95)


@dataclass(frozen=True, slots=True)
class Situation:
    """A moment of a run, and the concern that may be raised in it ("" for none) with texts that its
    warning must and must not have. `is_planted`: silence would be wrong, too.
    """

    name: str
    concern: str
    moment: Callable[[], RunSnapshot]
    needed: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    is_planted: bool = True

    def fault(self) -> str:
        """What is wrong with the advice; "" if it is right, or rightly silent."""
        warnings = warnings_of(self.moment())
        raised = sorted({concern_of(one) for one in warnings})
        if self.concern not in raised and self.is_planted:
            return f"{self.concern} is not raised, but {raised or 'nothing'}"
        if others := [name for name in raised if name != self.concern]:
            return f"{others[0]} is raised: {_text(warnings, others[0])}"
        text = _text(warnings, self.concern)
        lacking = [word for word in self.needed if raised and word not in text]
        present = [word for word in self.wrong if word in text]
        return f"wrong advice: {text}" if lacking or present else ""


def _text(warnings: Sequence[RunWarning], name: str) -> str:
    return "; ".join(f"{one.what}: {one.do}" for one in warnings if concern_of(one) == name)


PLANTED = (
    Situation("nothing is written", "run_silent", lambda: later(healthy(), 60)),
    Situation(
        "a supervisor gave up",
        "run_failed",
        lambda: later(events(healthy(), (0, "failed", "")), 1),
    ),
    Situation(
        "no step, rollouts alive",
        "step_overdue",
        lambda: at(beating(healthy(), NOW_S + 100), NOW_S + 100),
    ),
    Situation("a rollout is gone", "rollouts_silent", lambda: at(clock(-60.0 + 60.0, 60.0))),
    Situation(
        "a role dies again and again",
        "roles_dying",
        lambda: at(events(healthy(), *((ago, "death", "rollout-1") for ago in (50.0, 40.0, 30.0)))),
    ),
    Situation("an orchestrator restarts the trainer", "roles_dying", lambda: at(restarted(4))),
    Situation("weights differ", "unverified_versions", lambda: at(verified(False))),
    Situation("bytes that are no record", "dead_letters", lambda: at(with_dead_letter())),
    Situation(
        "the archive stands still", "archive_behind", lambda: at(with_backlog(healthy(), 7200))
    ),
    Situation(
        "a record of another program", "foreign_records", lambda: at(with_foreign({"status": 2}))
    ),
    Situation("a skipped update", "skipped_updates", lambda: at(skipped(1.0))),
    Situation(
        "the reward stands at 0.5 for all", "equal_rewards", lambda: at(healthy(2, lambda _: 0.5))
    ),
    Situation("every reward is 1", "constant_reward", lambda: at(rewards(1.0, 12)), ("solved",)),
    Situation(
        "every reward is 0",
        "constant_reward",
        lambda: at(rewards(0.0, 12)),
        ("compare",),
        ("solved",),
    ),
    Situation("most groups are filtered", "filtered_groups", lambda: at(closed("filtered", 120))),
    Situation("every second answer dies", "dead_trajectories", lambda: at(ended("dead", 100))),
    Situation("answers are cut", "cut_trajectories", lambda: at(ended("length", 200))),
    Situation(
        "answers of agents are cut",
        "cut_trajectories",
        lambda: at(ended("length", 200), has_agents=True),
        ("cut at a limit of tokens", "the max_tokens that the program asks for"),
    ),
    Situation("no scorer runs", "unscored_groups", lambda: unscored()),
    Situation(
        "the trainer waits, cores are idle",
        "trainer_starved",
        lambda: at(waits(5), machine=IDLE_CORES),
        ("3 more rollouts would give about +60%",),
    ),
    Situation(
        "the trainer waits, rollouts have GPUs",
        "trainer_starved",
        lambda: at(waits(5), rollout_cores=None),
        ("3 more rollouts would give about +60%", "further GPUs"),
    ),
    Situation(
        "GPUs are split badly",
        "split_off",
        lambda: at(waits(4), trainer_gpus=4),
        ("rollouts.count = 6",),
    ),
    Situation("no prompt is left", "rollouts_starved", lambda: at(idle(healthy())), ("no prompt",)),
    Situation(
        "assignments are slow",
        "rollouts_starved",
        lambda: at(prompts(idle(healthy()))),
        ("dispatch",),
    ),
    Situation(
        "the trainer is slower",
        "rollouts_starved",
        lambda: at(admit(idle(healthy()), range(OPEN, OPEN + 5 * GROUPS)), machine=IDLE_CORES),
        ("fewer rollouts", "trainer.workers"),
    ),
    Situation(
        "complete groups wait", "queue_full", lambda: at(ready(healthy())), ("fewer rollouts",)
    ),
    Situation("data are old", "lag_high", lambda: at(lagging(3.6, 60))),
)
_ALIKE = (
    Situation("healthy", "", lambda: at(healthy())),
    Situation("healthy, all cores busy", "", lambda: at(healthy(), machine=BUSY_CORES)),
    Situation("not begun", "", lambda: at(PLAN.state())),
    Situation(
        "finished long ago",
        "",
        lambda: later(events(healthy(), (0, "complete", "")), 9000),
    ),
    Situation("a pause shorter than a restart", "", lambda: later(healthy(), 3)),
    Situation(
        "all cores are busy",
        "trainer_starved",
        lambda: at(waits(2), machine=BUSY_CORES),
        ("cores are busy", "another machine"),
        ("would give",),
    ),
    Situation(
        "a cluster whose machines are unknown",
        "trainer_starved",
        lambda: at(waits(5), is_one_machine=False),
        ("where cores are idle",),
        ("would give",),
    ),
    Situation(
        "a finished run on cores",
        "trainer_starved",
        lambda: later(events(waits(5), (0, "complete", "")), 60),
        (),
        ("would give",),
    ),
    Situation(
        "room for one rollout only",
        "trainer_starved",
        lambda: at(waits(5), machine=MachineUse(16, 14.9)),
        ("1 more rollout would give",),
        (),
    ),
    Situation("the last step needs no more groups", "", lambda: at(near_the_end(waits(2)))),
    Situation(
        "rollouts are idle at the end of the run",
        "",
        lambda: at(idle(near_the_end(healthy()))),
    ),
    Situation(
        "another rollout is just starting",
        "",
        lambda: at(with_starting(waits(2)), machine=IDLE_CORES),
    ),
    Situation("the first steps", "", lambda: at(few_steps())),
    Situation(
        "the trainer waits while it computes",
        "",
        lambda: at(waits(2, 0.75, 1.8 * STEP_S), trainer_threads=2, machine=IDLE_CORES),
    ),
    Situation(
        "weights arrive slowly",
        "rollouts_starved",
        lambda: at(prompts(idle(healthy(), health="pulling"))),
        ("weights",),
        ("logs/dispatch.log", "queue_per_slot", "data set"),
    ),
    Situation(
        "the trainer is slower, all cores busy",
        "rollouts_starved",
        lambda: at(admit(idle(healthy()), range(OPEN, OPEN + 5 * GROUPS)), machine=BUSY_CORES),
        ("fewer rollouts",),
        ("more trainer.workers",),
    ),
    Situation(
        "complete groups wait, all cores busy",
        "queue_full",
        lambda: at(ready(healthy()), machine=BUSY_CORES),
        ("fewer rollouts",),
        ("more trainer.workers",),
    ),
    Situation(
        "complete groups wait for a trainer on GPUs",
        "queue_full",
        lambda: at(ready(healthy()), trainer_gpus=2),
        ("trainer.processes",),
        ("trainer.workers",),
    ),
    Situation(
        "a run that was resumed loads a large model",
        "",
        lambda: at(beating(resumed(healthy(), 300 - 500), NOW_S + 500), NOW_S + 500),
    ),
    Situation(
        "a run that was resumed has the archive of Friday",
        "",
        lambda: at(with_backlog(resumed(healthy(), 5), 200_000)),
    ),
    Situation(
        "a run that was resumed after deaths",
        "",
        lambda: at(
            resumed(
                events(healthy(), *((ago, "death", "archive") for ago in (990.0, 950.0, 910.0))),
                400,
            ),
            NOW_S - 390,
        ),
    ),
    Situation(
        "deaths just before it was resumed",
        "",
        lambda: at(deaths_then_resumed()),
    ),
    Situation(
        "groups waited for a scorer while the run was stopped",
        "",
        lambda: unscored(trainer_age_s=20.0),
    ),
    Situation("a clock is a minute behind", "", lambda: at(clock(-60.0))),
    Situation("a clock is eight minutes behind", "", lambda: at(clock(-480.0))),
    Situation("a clock is two hours ahead", "", lambda: at(clock(7200.0))),
    Situation(
        "the observer's clock is two hours ahead",
        "",
        lambda: later(heard(7200), 7200),
    ),
    Situation("a rollout leaves", "", lambda: at(verified(True, "leaving"))),
    Situation("an upgrade restarts each role once", "", lambda: at(restarted(1))),
    Situation("a single dead answer", "", lambda: at(ended("dead", 1))),
    Situation("some answers are cut", "", lambda: at(ended("length", 12))),
    Situation("some groups are filtered", "", lambda: at(closed("filtered", 20))),
    Situation("one group has expired", "", lambda: at(closed("expired", 1))),
    Situation("rewards are 1 for three steps", "", lambda: at(rewards(1.0, 3))),
    Situation("lag below its bound", "", lambda: at(lagging(2.9, 10))),
    Situation("the archive rolls soon", "", lambda: at(with_backlog(healthy(), 60))),
)
LOOK_ALIKES = tuple(replace(one, is_planted=False) for one in _ALIKE)
SITUATIONS = (*PLANTED, *LOOK_ALIKES)
