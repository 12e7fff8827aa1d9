"""A synthetic run, published into a real SQLite bus: 60 steps, two rollouts, one death.

Its numbers follow the measured course of the quickstart (shares of styles, lengths, accuracy), so
that its plots look like those of a run.
"""

from pathlib import Path

import numpy as np

from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.metrics_file import MetricsFile
from rollstream.streams.connect import open_bus
from rollstream.streams.records import (
    Admitted,
    Applied,
    GroupClosed,
    Record,
    RolloutStatus,
    StepDone,
    Take,
    Trajectory,
    WeightsAnnounced,
)
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, GroupMembers, Member, Span, Version
from rollstream.streams.writer import FencedWriter, publish

STARTED_S = 1_700_000_000.0
STEP_S = 1.1
GROUPS, SAMPLES = 4, 2


def course(step: int) -> float:
    """Progress of learning, 0 to 1."""
    return 1 - float(np.exp(-step / 18))


def publish_run(path: Path, steps: int = 60) -> RunFolder:
    """`steps` finished steps of `GROUPS` groups; one more group is open, one closed as dead."""
    folder = RunFolder(path)
    write_configuration(folder, Configuration(run="synthetic", folder=str(path)))
    bus = open_bus(f"sqlite:{path / 'bus'}")
    bus.create(catalogue(1))
    ledger = FencedWriter(bus, "ledger", "trainer", 1)
    weights = FencedWriter(bus, "weights", "trainer", 1)
    admissions = FencedWriter(bus, "admissions", "dispatch", 1)
    for writer in (ledger, weights, admissions):
        writer.open()
    weights.append([("synthetic", announced(0))])
    for step in range(1, steps + 1):
        first = (step - 1) * GROUPS
        groups = range(first, first + GROUPS)
        admissions.append([(str(group), admitted(group)) for group in groups])
        for group in groups:
            for index in range(SAMPLES):
                publish(bus, "trajectories", str(group), trajectory(group, index, step))
        records: list[Record] = [take(step, groups), done(step)]
        ledger.append([("run", record) for record in records])
        weights.append([("synthetic", announced(step))])
        for name in ("rollout-0", "rollout-1"):
            publish(bus, "applied", name, applied(name, step))
    dead, still_open = steps * GROUPS, steps * GROUPS + 1
    admissions.append([(str(group), admitted(group)) for group in (dead, still_open)])
    ledger.append([("run", GroupClosed(dead, "dead", "1 of 2 survived", steps))])
    for name in ("rollout-0", "rollout-1"):
        publish(bus, "status", f"{name}/1", status(name, steps))
    bus.close()
    write_metrics(folder, steps)
    return folder


def write_metrics(folder: RunFolder, steps: int) -> None:
    with MetricsFile(folder.metrics / "eval.jsonl") as lines:
        for step in range(0, steps + 1, 10):
            lines.append(evaluation(step))
    with MetricsFile(folder.metrics / "supervisor.jsonl") as lines:
        lines.append({"time_s": STARTED_S - 4, "event": "start", "role": "rollout-1", "pid": 7})
        death = {"event": "death", "role": "rollout-1", "code": -9, "delay_s": 0.25}
        lines.append({"time_s": STARTED_S + 20 * STEP_S, **death})


def evaluation(step: int) -> dict[str, object]:
    full = 0.24 + 0.66 * course(step)
    jump = 0.15 * (1 - course(step)) + 0.02
    return {
        "step": step,
        "seconds": step * STEP_S,
        "accuracy_sampled": 0.26 + 0.58 * course(step),
        "accuracy_greedy": 0.1 if step == 0 else 0.95,
        "length_median": 5 + 36 * course(step),
        "length_p99": 161 + 128 * course(step),
        "shares": {"direct": 1 - full - jump, "jump": jump, "full": full},
    }


def admitted(group: int) -> Admitted:
    names = tuple(f"{group}.{index}" for index in range(SAMPLES))
    return Admitted(group, group // GROUPS, names, 600.0, Address(0, group))


def trajectory(group: int, index: int, step: int) -> Trajectory:
    random = np.random.default_rng((group, index))
    length = int(4 + random.exponential(30 * course(step) + 3))
    finished = STARTED_S + step * STEP_S - 0.2 * (index + 1)
    died = 20 < step < 23 and index == 1  # while rollout-1 restarts
    return Trajectory(
        trajectory=f"{group}.{index}",
        group=group,
        index=index,
        attempt=1,
        task="remainder",
        rollout=f"rollout-{0 if died else index}",
        rollout_term=1,
        tokens=np.arange(6 + length, dtype=np.uint32),
        sources=np.array([0] * 6 + [1] * length, np.uint8),
        logprobs=np.full(length, -0.3, np.float32),
        spans=(Span(0, length, Version(step - 1, 1)),),
        finish="stop",
        reward=1.0,
        trainer_version=Version(step - 1, 1),
        started_s=finished - 0.85 * STEP_S,
        finished_s=finished,
    )


def take(step: int, groups: range) -> Take:
    members = {
        g: tuple(Member(f"{g}.{i}", Address(0, g * SAMPLES + i), "00") for i in range(SAMPLES))
        for g in groups
    }
    together = tuple(GroupMembers(group, named) for group, named in members.items())
    return Take(step, 0, 0, tuple(m for named in members.values() for m in named), together)


def done(step: int) -> StepDone:
    wobble = 0.04 * np.sin(step * 1.7)
    metrics = {
        "reward_mean": 0.28 + 0.55 * course(step) + wobble,
        "loss": 0.02 * np.sin(step),
        "entropy": 0.62 - 0.35 * course(step),
        "kl": 0.0008 + 0.0004 * np.sin(step),
        "ess": 0.98 - 0.05 * course(step),
        "lag_finish_mean": min(1.2, step / 3),
        "lag_finish_max": min(2.0, step),
        "lag_consumed_mean": min(1.9, step / 2) + wobble,
        "lag_consumed_max": min(4.0, step),
        "length_median": 5 + 36 * course(step),
        "length_p99": 160 + 120 * course(step) + 200 * wobble,
        "tokens_trained": 4000.0 + 6000 * course(step),
        "seconds": STEP_S,
        "wait_s": 0.1 + abs(wobble),
    }
    floats = {name: float(value) for name, value in metrics.items()}
    when = STARTED_S + step * STEP_S
    return StepDone(step, Version(step, 1), "00", 1, floats, {"trained": GROUPS * SAMPLES}, when)


def announced(number: int) -> WeightsAnnounced:
    parent = Version(number - 1, 1) if number else None
    when = STARTED_S + number * STEP_S
    return WeightsAnnounced(
        "synthetic", Version(number, 1), "weights/x", "00", "anchor", parent, 1_200_000, when
    )


def applied(name: str, step: int) -> Applied:
    late = 0.2 if name == "rollout-0" else 0.5
    when = STARTED_S + (step - 1) * STEP_S + late
    return Applied(name, 1, Version(step - 1, 1), "00", "hashes", 40, 0.01, when)


def status(name: str, step: int, beat: int = 0) -> RolloutStatus:
    return RolloutStatus(
        rollout=name,
        term=2 if name == "rollout-1" else 1,  # it died once
        slots=64,
        running=58,
        waiting=3,
        kv_used=4000,
        kv_capacity=32768,
        version=Version(step, 1),
        verified=True,
        health="generating",
        quota_left=0,
        tokens_per_s=3700.0,
        tokens_total=180_000 + 1850 * beat,
        idle_s=1.5 + 0.01 * beat,
        time_s=STARTED_S + step * STEP_S + 0.5 * beat,
    )
