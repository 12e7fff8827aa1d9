"""A fault for each concern of `rollstream/look/monitor/concerns.py`, planted into the log, the
archive or the metrics files of a healthy run: what a faulty role, program or machine leaves there.
The run continues beside the fault, so that the fault alone raises its concern.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rollstream.look.monitor.feed import SLOW_REFRESH_S
from rollstream.look.monitor.state import foreign_line, skipped_line
from rollstream.storage.skipped_rows import SkippedRecord
from rollstream.streams.bus import AppendEntry
from rollstream.streams.dead_letters import DeadLetterWriter
from rollstream.streams.records import Annotation, GroupClosed
from testbed.oncall import records
from testbed.oncall.planted_run import PlantedRun
from testbed.oncall.records import GROUPS, SAMPLES, STEPS

OPEN = STEPS * GROUPS  # the first open group
RECENT = 12  # steps that the pace of a run is computed from, and one more


@dataclass(frozen=True, slots=True)
class Fault:
    """`plant` writes the fault of a concern into a run, which has these GPUs of its trainer."""

    plant: Callable[[PlantedRun], None]
    trainer_gpus: int | None = None


def plant(run: PlantedRun, fault: Fault) -> None:
    """Let the run continue until its observer refreshes everything, then plant the fault."""
    run.pass_time(SLOW_REFRESH_S + 1)
    run.train()
    run.beat()
    fault.plant(run)


def prepare(run: PlantedRun, fault: Fault) -> None:
    """Give the run the settings without which the fault would be none."""
    run.settings = replace(run.settings, trainer_gpus=fault.trainer_gpus)


# ---- no progress ---------------------------------------------------------------------------------


def _damaged_log(run: PlantedRun) -> None:
    for file in (run.folder.path / "bus").glob("*.db"):
        file.write_bytes(b"\xff" * file.stat().st_size)


def _all_gone(run: PlantedRun) -> None:
    run.pass_time(60)


def _given_up(run: PlantedRun) -> None:
    run.note("supervisor.jsonl", {"time_s": run.now_s, "event": "failed"})


def _no_step(run: PlantedRun) -> None:
    run.pass_time(100)
    run.beat()


def _one_rollout_gone(run: PlantedRun) -> None:
    run.pass_time(60)
    run.train()
    run.beat(rollouts=1)


def _deaths(run: PlantedRun) -> None:
    death = {"event": "death", "role": "rollout-1", "code": -9, "delay_s": 0.25}
    run.note("supervisor.jsonl", *({"time_s": run.now_s - ago, **death} for ago in (9, 6, 3)))


# ---- wrong data ----------------------------------------------------------------------------------


def _unverified(run: PlantedRun) -> None:
    run.pass_time(1)
    run.beat(verified=False)


def _file_of_the_archive_damaged(run: PlantedRun) -> None:
    for _ in range(40):
        run.apply(records.applied("rollout-0", "h"))
    run.archive()
    run.bus.truncate("applied", run.bus.end("applied"))
    for file in (run.folder.path / "store" / "archive" / "topic=applied").rglob("*.parquet"):
        file.write_bytes(b"\xff" * file.stat().st_size)


def _bytes_that_are_no_record(run: PlantedRun) -> None:
    topic, positions = "trajectories", run.bus.end("trajectories")
    run.bus.append(topic, [AppendEntry(b"7", b"\x00 no record")])
    found = run.bus.read(topic, positions)
    DeadLetterWriter(run.bus, topic).append([(one, "it begins with a zero") for one in found])


def _archive_stands_still(run: PlantedRun) -> None:
    run.archive()
    run.apply(records.applied("rollout-0", "h"))
    run.pass_time(4 * run.settings.archive_roll_s)
    run.train()
    run.beat()


def _other_logprobs(run: PlantedRun) -> None:
    values = {"tokens": 100.0, "mean": 0.2, "max": 0.6, "kl": 0.04, "above": 0.0}
    given = {f"mismatch_{name}/sums": value for name, value in values.items()}
    run.train_again(RECENT, None, **{"reward_mean/sums": 0.5}, **given)


# ---- nothing to learn from -----------------------------------------------------------------------


def _skipped(run: PlantedRun) -> None:
    run.train(updates_skipped=1.0)


def _refused(run: PlantedRun) -> None:
    run.train({"refused_logprobs": 2, "trained": 8})


def _foreign(run: PlantedRun) -> None:
    run.note("moves.jsonl", foreign_line({"status": 3}, run.now_s))


def _bad_row(run: PlantedRun) -> None:
    record = SkippedRecord("rows.jsonl", 1000, 1, ("rows.jsonl, line 7: not JSON",))
    run.note("prompts.jsonl", skipped_line([record], run.now_s))


def _equal(run: PlantedRun) -> None:
    for group in range(200, 220):
        run.apply(records.admitted(group))
        for index in range(SAMPLES):
            run.apply(records.finished(group, index, 0.0, task="chain_sum"))
        run.apply(records.take(run.step, [group]))


def _constant(run: PlantedRun) -> None:
    run.train_again(RECENT, None, reward_mean=0.0)


def _filtered(run: PlantedRun) -> None:
    for group in range(1000, 1000 + OPEN + 8):
        run.apply(GroupClosed(group, "filtered", "all rewards are 1", run.step))


def _dead(run: PlantedRun) -> None:
    for group in range(1000, 1005):
        reason = "KeyError: 'answer'"
        run.apply(records.finished(group, 0, None, finish="dead", reason=reason))


def _cut(run: PlantedRun) -> None:
    for group in range(1000, 1060):
        for index in range(SAMPLES):
            run.apply(records.finished(group, index, records.half(index), finish="length"))


def _no_scorer(run: PlantedRun) -> None:
    for index in range(SAMPLES):
        run.apply(records.finished(OPEN, index, None))
    run.pass_time(400)
    run.train()
    run.beat()


def _slow_scorer(run: PlantedRun) -> None:
    for index in range(SAMPLES):
        values = np.array([1.0], np.float32)
        run.apply(Annotation(f"0.{index}", 0, "reward", values, "scorer-0"))


# ---- slowness ------------------------------------------------------------------------------------


def _trainer_waits(run: PlantedRun) -> None:
    run.train_again(RECENT, None, wait_s=0.75 * records.STEP_S)


def _rollouts_wait(run: PlantedRun) -> None:
    run.pass_time(10)
    run.beat(idle_s=21.0)


def _trainer_slow(run: PlantedRun) -> None:
    for group in range(OPEN, OPEN + 5 * GROUPS):
        if group >= OPEN + GROUPS:
            run.apply(records.admitted(group))
        for index in range(SAMPLES):
            run.apply(records.finished(group, index, records.half(index), STEPS))


def _old_data(run: PlantedRun) -> None:
    run.train_again(RECENT, {"masked_tokens": 60}, lag_consumed_mean=3.6)


FAULTS: Mapping[str, Fault] = {
    "run_unreadable": Fault(_damaged_log),
    "run_silent": Fault(_all_gone),
    "run_failed": Fault(_given_up),
    "step_overdue": Fault(_no_step),
    "rollouts_silent": Fault(_one_rollout_gone),
    "roles_dying": Fault(_deaths),
    "unverified_versions": Fault(_unverified),
    "unreadable_parts": Fault(_file_of_the_archive_damaged),
    "dead_letters": Fault(_bytes_that_are_no_record),
    "archive_behind": Fault(_archive_stands_still),
    "mismatch": Fault(_other_logprobs),
    "skipped_updates": Fault(_skipped),
    "refused_trajectories": Fault(_refused),
    "skipped_rows": Fault(_bad_row),
    "foreign_records": Fault(_foreign),
    "equal_rewards": Fault(_equal),
    "constant_reward": Fault(_constant),
    "filtered_groups": Fault(_filtered),
    "dead_trajectories": Fault(_dead),
    "cut_trajectories": Fault(_cut),
    "unscored_groups": Fault(_no_scorer),
    "late_annotations": Fault(_slow_scorer),
    "split_off": Fault(_trainer_waits, trainer_gpus=4),
    "trainer_starved": Fault(_trainer_waits),
    "rollouts_starved": Fault(_rollouts_wait),
    "queue_full": Fault(_trainer_slow),
    "lag_high": Fault(_old_data),
}
"""A fault for each concern, by its name."""
