"""Whole runs that train an adapter: resumed, replayed and forked to the same bits, and several
versions side by side under `keep_version`.
"""

import json
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rollstream.consumers.settings import DispatchSettings
from rollstream.consumers.trainer.loop import Trainer
from rollstream.look.index.parentage import read_parentage
from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import store_url
from rollstream.storage.settings import LoraSettings
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.adapters import BASE
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.retention import stored_versions
from rollstream.streams.bus import AppendEntry, Bus
from rollstream.streams.bus_wrapper import BusWrapper
from rollstream.streams.records import (
    Applied,
    Assignment,
    RolloutStatus,
    StepDone,
    Trajectory,
)
from rollstream.streams.values import Version
from testbed.run_process import read
from testbed.waiting import WAIT_S, wait_for
from tests.support.kept_run import STEPS, made, write_configuration_of
from tests.support.tiny_run import ROLLOUT, Died, TinyRun, tiny_run

LORA = LoraSettings(rank=2, alpha=4.0)
KEEP = ROLLOUT.model_copy(update={"on_update": "keep_version", "slots": 4})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("run"), lora=LORA)


def printed_json(capsys: pytest.CaptureFixture[str]) -> dict:
    return json.loads(capsys.readouterr().out)


def test_versions_are_adapters_that_rollouts_served_verified(run: Path) -> None:
    store = open_store(f"file:{run / 'store'}")
    versions = [stored.version for stored in stored_versions(store)]
    assert versions[0] == BASE
    assert {read_manifest(store, v).kind for v in versions[1:]} == {"adapter"}
    hashes = {v: read_manifest(store, v).hash for v in versions}
    applied = [a for a in read(run, "applied", Applied) if a.version in hashes]
    assert applied
    assert all(one.hash == hashes[one.version] and one.compared for one in applied)


def test_the_audit_finds_nothing(run: Path, capsys) -> None:
    assert main(["audit", str(run), "--json"]) == 0


def test_a_replay_gives_every_hash_again(run: Path, tmp_path: Path, capsys) -> None:
    assert main(["replay", str(run), "--from-step", "0", "--out", str(tmp_path), "--json"]) == 0
    found = printed_json(capsys)
    assert (found["compared"], found["differing"]) == (STEPS, [])


def test_a_fork_has_the_parents_adapter_over_the_same_base(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "fork"
    words = ["--at", "4", "--out", str(out), "--set", "trainer.steps=9"]
    assert main(["fork", str(run), *words]) == 0
    theirs, mine = (
        open_store(url)
        for url in (f"file:{run / 'store'}", store_url(load(out / "config.json"), out))
    )
    parentage = read_parentage(mine)
    (done,) = [d for d in read(run, "ledger", StepDone) if d.step == 4]
    assert parentage is not None
    assert parentage.state_hash == done.state_hash
    for store in (theirs, mine):
        assert read_manifest(store, BASE).kind == "anchor"
    hashes = [
        {n: e.hash for n, e in read_manifest(s, BASE).weights.tensors.items()}
        for s in (theirs, mine)
    ]
    assert hashes[0] == hashes[1]


def test_exported_both_ways(run: Path, tmp_path: Path, capsys) -> None:
    assert main(["weights", "export", str(run), "latest", "--out", str(tmp_path / "a")]) == 0
    assert {path.name for path in (tmp_path / "a").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    whole = ["--out", str(tmp_path / "whole"), "--merged"]
    assert main(["weights", "export", str(run), "latest", *whole]) == 0
    assert (tmp_path / "whole" / "config.json").is_file()


def published_after(trainer: Trainer, step: int) -> threading.Event:
    """Is set once the version of this step was handed to the publisher."""
    reached, publish = threading.Event(), trainer.publisher.publish

    def published(snapshot) -> None:
        publish(snapshot)
        if snapshot.done.step == step:
            reached.set()

    trainer.publisher.publish = published  # pyright: ignore[reportAttributeAccessIssue]
    return reached


def steps_of(folder: Path, stops: int) -> list[int]:
    """The steps in the ledger of a run whose trainer was stopped after this step and started again:
    a step that is repeated with another hash is there twice.
    """
    with tiny_run(folder, trainer={"steps": 6}, lora=LORA, checkpoint_every=2) as run:
        run.start_all()
        trainer = run.build_trainer(1)
        assert not trainer.run(published_after(trainer, stops))
        assert run.train(2)
        return [done.step for done in run.records("ledger", StepDone)]


def test_a_resumed_trainer_repeats_recorded_steps_with_equal_hashes(tmp_path: Path) -> None:
    """The checkpoint is of step 2, the ledger has step 3: it is trained again to the same bits."""
    assert steps_of(tmp_path / "run", stops=3) == [1, 2, 3, 4, 5, 6]


def test_keep_version_serves_versions_side_by_side_and_never_drains(tmp_path: Path, capsys) -> None:
    changed = {"trainer": {"steps": 6, "groups_per_step": 2}, "rollout": KEEP, "tokens_max": 30}
    with tiny_run(tmp_path / "run", lora=LORA, **changed) as run:
        run.start_all()
        assert run.train()
        statuses = run.records("status", RolloutStatus)
        trajectories = run.records("trajectories", Trajectory)
    assert not any(status.health == "draining" for status in statuses)
    assert all(len(one.spans) <= 1 for one in trajectories)
    served = {one.spans[0].version for one in trajectories if one.spans}
    assert len(served) > 2
    last = {status.rollout: status for status in statuses}
    assert all(len(one.held) <= 2 for one in last.values()), "an adapter stayed with no trajectory"


class DiesAfterAPartial(BusWrapper):
    """The bus of a rollout that dies right after its first partial was acknowledged."""

    def __init__(self, below: Bus) -> None:
        super().__init__(below)
        self.died = threading.Event()

    def append(self, topic: str, entries: Sequence[AppendEntry]) -> list[int]:
        if self.died.is_set():
            raise Died
        offsets = super().append(topic, entries)
        if topic == "partials":
            self.died.set()
            raise Died
        return offsets


def test_a_trajectory_resumes_under_its_stored_adapter_after_its_rollout_died(
    tmp_path: Path, capsys
) -> None:
    """A rollout dies behind a partial. Nothing shows it to dispatch before another rollout has fed
    two steps and dropped the versions of the dead one; then a dispatch replaces it that does see
    it. The dead rollout's trajectories are resumed under the version that they began with, which
    the rollout that resumes them loads from the store.
    """
    folder = tmp_path / "run"
    changed = {
        "trainer": {"steps": 6, "groups_per_step": 2, "samples_per_group": 2},
        "rollout": KEEP.model_copy(update={"partial_tokens": 2}),
        "dispatch": DispatchSettings(max_lag=12, heartbeat_timeout_s=3600.0, load_bytes_per_s=1e12),
        "tokens_max": 40,
    }
    with tiny_run(folder, lora=LORA, checkpoint_every=2, **changed) as run:
        write_configuration_of(run)
        dying, replaced = DiesAfterAPartial(run.bus), threading.Event()
        run.start_prompts(1)
        run.start_dispatch(1, replaced)
        run.start_rollout("rollout-0", dying=dying)
        trainer = run.build_trainer(1)
        two_steps = published_after(trainer, 2)
        run.start_thread(lambda: trainer.run(two_steps))
        first_trainer = run.threads[-1]
        wait_for(dying.died.is_set)
        run.start_rollout("rollout-1")
        first_trainer.join(WAIT_S)
        assert two_steps.is_set()
        begun = held_by(run, "rollout-0")
        wait_for(lambda: not begun & held_by(run, "rollout-1"))
        replaced.set()
        run.dispatch = run.dispatch.model_copy(update={"heartbeat_timeout_s": 1.0})
        run.start_dispatch(2)
        wait_for(lambda: any(key in finished(run) for key in loaded(run)))
        assert run.train(2)
        resumed = {key: version for key, version in loaded(run).items() if key in finished(run)}
        assert all(finished(run)[key] == [version] for key, version in resumed.items())
        assert set(resumed.values()) <= begun
    assert main(["audit", str(folder), "--json"]) == 0


def held_by(run: TinyRun, rollout: str) -> set[Version]:
    """The versions that its newest status names. The log is compacted: of the records below an end,
    newer ones may have replaced all of this rollout before they are read.
    """
    statuses = wait_for(
        lambda: [one for one in run.records("status", RolloutStatus) if one.rollout == rollout]
    )
    return statuses[-1].held


def loaded(run: TinyRun) -> dict[tuple[str, int], Version]:
    """Versions that were loaded from the store to resume a trajectory."""
    return {
        (order.trajectory, order.attempt): order.version
        for order in run.records("assignments", Assignment)
        if order.kind == "resume" and order.from_history
    }


def finished(run: TinyRun) -> dict[tuple[str, int], list[Version]]:
    return {
        (one.trajectory, one.attempt): [span.version for span in one.spans]
        for one in run.records("trajectories", Trajectory)
    }
