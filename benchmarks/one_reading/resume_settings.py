"""`resume_settings`: runs that are stopped at a step and resumed with one setting changed. Counts
the faults: a resume hangs, admits more groups than its steps need, ignores the change, or violates
an invariant. The note has each of them.

Stepped runs try every setting that has a meaning in them, under both update flows; whole runs of
processes try other shapes (two ranks, an adapter, an agent, late rewards) with the settings that
decide how many groups there are and what they are asked for.
"""

import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.case import Case, alone
from rollstream.errors import TopicMissing
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Prompt, StepDone, Take
from testbed.run_driver import SUPERVISOR, RunDriver, RunFailed
from testbed.servers import kafka_broker
from testbed.stepped.resumed import resumed
from testbed.stepped.run import Shape

STEPS, STOP_AT = 6, 3
FIRST = Shape(steps=STEPS, groups=4, samples=2)
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "trainer.groups_per_step": (8, 3, 1),
    "trainer.samples_per_group": (4, 3),
    "trainer.steps": (8, 4),
    "trainer.survivors_min": (1,),
    "trainer.micro_batch_tokens": (256, 24),
    "trainer.choose": ("freshest",),
    "trainer.advantage": ("centred", "leave_one_out", "batch"),
    "trainer.loss": ("ppo_clip", "dppo"),
    "trainer.ratio": ("sequence", "none"),
    "trainer.ratio_max": (1.2,),
    "trainer.ratio_min": (0.5,),
    "trainer.clip_low": (0.1,),
    "trainer.clip_high": (0.4,),
    "trainer.clip_dual": (3.0,),
    "trainer.mask_ratio": ((0.5, 2.0),),
    "trainer.mask_sequence": ((0.5, 2.0),),
    "trainer.mask_negative": (0.5,),
    "trainer.aggregate": ("sequence", "prompt"),
    "trainer.entropy_bonus": (0.01,),
    "trainer.ratio_penalty": (0.01,),
    "trainer.overlong": ("mask",),
    "trainer.ess_guard": ("scale", "skip"),
    "trainer.ess_min": (0.6,),
    "trainer.lr": (1e-2,),
    "trainer.betas": ((0.8, 0.9),),
    "trainer.weight_decay": (0.1,),
    "trainer.lr_ramp_steps": (0,),
    "trainer.lr_final": (1.0,),
    "trainer.gradient_norm_max": (0.1,),
    "trainer.filter_equal_rewards": (True,),
    "dispatch.max_lag": (0, 1, 5, None),
    "dispatch.ready_groups_max": (8,),
    "dispatch.group_deadline_s": (60.0,),
    "sampling.temperature": (0.7,),
    "sampling.tokens_max": (8, 40),
    "task.redundancy": (2,),
}
"""The values that are tried in place of those of `FIRST`."""
QUICK = {"trainer.groups_per_step": (3,), "sampling.temperature": (0.7,), "trainer.lr": (1e-2,)}


def cases(quick: bool) -> Iterator[Case]:
    """Yields the number of resumes that broke their word; the quick form tries three of them."""
    faults: list[str] = []
    tried = 0
    for keep_version in (False, True):
        for key, values in (QUICK if quick else SETTINGS).items():
            for value in values:
                tried += 1
                found = stepped_faults(keep_version, key, value)
                flow = "keep_version" if keep_version else "in_flight"
                faults += [f"{flow}, {key} = {value}: {one}" for one in found]
                _tell(f"{flow} {key} = {value}", found)
    for shape in () if quick else SHAPES:
        tried += 1
        found = shape.faults()
        faults += [f"{shape.name}: {one}" for one in found]
        _tell(shape.name, found)
    note = "; ".join([f"{tried} resumes", *faults])
    yield alone("resume_settings", len(faults), "faults", at_most=0, note=note)


def _tell(what: str, found: list[str]) -> None:
    print(f"{what}: {'; '.join(found) or 'kept'}", file=sys.stderr, flush=True)


def stepped_faults(keep_version: bool, key: str, value: Any) -> list[str]:
    """Returns what is wrong with a stepped run that is resumed with this setting."""
    first = replace(FIRST, keep_version=keep_version)
    then = replace(first, changed=((key, value),))
    if key == "dispatch.max_lag":
        then = replace(first, max_lag=value)
    with tempfile.TemporaryDirectory(prefix="rollstream-resume-") as folder:
        return resumed(first, then, STOP_AT, Path(folder)).lines()


STEPS_MAX, STEPS_MORE = 400, 4
"""Steps that no run reaches before it is stopped, and those after the ones that were begun then."""
SHORT = (
    f"trainer.steps={STEPS_MAX}", "trainer.groups_per_step=4", "trainer.samples_per_group=2",
    "rollouts.count=1", "rollouts.slots=16", "warmup.steps=20", "warmup.documents=500",
    "evaluation.enabled=false",
)  # fmt: skip
CHANGED = {
    "trainer.groups_per_step": 7, "sampling.temperature": 0.7, "trainer.lr": 1e-4,
    "dispatch.max_lag": 1,
}  # fmt: skip
RUN_S = 300.0


@dataclass(frozen=True)
class ProcessShape:
    """A whole run of processes, from an example with further settings."""

    name: str
    example: str
    settings: tuple[str, ...] = ()
    changed: Mapping[str, Any] = field(default_factory=lambda: dict(CHANGED))
    is_kafka: bool = False

    def faults(self) -> list[str]:
        """Stops the run at a step, resumes it with the changed settings, and audits it."""
        with tempfile.TemporaryDirectory(prefix="rollstream-resume-") as scratch:
            folder = Path(scratch) / "run"
            bus = kafka_broker.new_url() if self.is_kafka else f"sqlite:{folder / 'bus'}"
            settings = [*SHORT, *self.settings, f"bus={bus}"]
            with RunDriver(folder, Path("examples") / self.example, settings) as run:
                run.start()
                run.wait_for(lambda: _steps(bus) >= STOP_AT)
                run.newest().stop(bound_s=60.0)
            published, last = _published(bus), max(_sizes(bus)) + STEPS_MORE
            words = [f"{key}={value}" for key, value in self.changed.items()]
            words.append(f"trainer.steps={last}")
            with RunDriver(folder, settings=words) as run:
                try:
                    run.start(SUPERVISOR, "--accept-config").wait(bound_s=RUN_S)
                except subprocess.TimeoutExpired:
                    return [f"hangs: {_steps(bus)} steps"]
                except RunFailed as failure:
                    return [str(failure)[-300:]]
            report = run.audit(bound_s=RUN_S)
            wrong = [f"audit: {report['invariants']}"] if report["violations"] else []
            return [*self._ignored(bus, published, last), *wrong]

    def _ignored(self, bus: str, published: int, last: int) -> list[str]:
        sizes, faults = _sizes(bus), list[str]()
        wanted = self.changed["trainer.groups_per_step"]
        if sizes.get(last) != wanted or max(sizes) != last:
            faults.append(f"step {max(sizes)} is the last and step {last} has {sizes.get(last)}")
        late = [p for p in _records(bus, "prompts", Prompt) if p.group >= published]
        if any(p.sampling.temperature != self.changed["sampling.temperature"] for p in late):
            faults.append("a later prompt has another temperature")
        admitted = len(_records(bus, "admissions", Admitted))
        if admitted > published + last * wanted:
            faults.append(f"flood: {admitted} admitted")
        return faults


SHAPES = (
    ProcessShape("two ranks", "quickstart.toml", ("trainer.processes=2",)),
    ProcessShape("adapter", "quickstart.toml", ("model.lora.rank=4",)),
    ProcessShape("agent", "sorting-agent.toml"),
    ProcessShape("late rewards", "late-reward.toml"),
    ProcessShape("Kafka", "quickstart.toml", is_kafka=True),
)


def _records(url: str, topic: str, kind: type[Any]) -> list[Any]:
    bus = open_bus(url)
    try:
        reader = TopicReader(bus, topic, from_begin(bus, topic))
        records = (one.record for one in reader.read_to(bus.end(topic)))
        return [record for record in records if isinstance(record, kind)]
    except TopicMissing:
        return []
    finally:
        bus.close()


def _sizes(bus: str) -> dict[int, int]:
    """Returns the number of groups of each step that was begun."""
    sizes: dict[int, int] = {}
    for take in _records(bus, "ledger", Take):
        sizes[take.step] = sizes.get(take.step, 0) + len(take.groups)
    return sizes


def _steps(bus: str) -> int:
    return max((done.step for done in _records(bus, "ledger", StepDone)), default=0)


def _published(bus: str) -> int:
    return max((one.group for one in _records(bus, "prompts", Prompt)), default=-1) + 1
