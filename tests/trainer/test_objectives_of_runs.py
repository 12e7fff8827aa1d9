"""Whole runs whose loss needs another policy than the trained one, with several epochs a step,
with Muon, and with a critic: killed, resumed and replayed to the same bits.
"""

import json
import threading
from pathlib import Path

import pytest

from rollstream.consumers.trainer import past_versions
from rollstream.run.cli.main import main
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.settings import LoraSettings, WeightsSettings
from rollstream.storage.weights.retention import listed_versions
from rollstream.streams.records import StepDone, Take, TakesRepeated
from testbed.run_process import assert_the_log_adds_up, read, started
from tests.runs.test_resume import UNEVEN, hashes, train_until, used
from tests.support.kept_run import STEPS, made
from tests.support.shares import one_of
from tests.support.tiny_run import TinyRun, tiny_run

KL = {"reference_kl": 0.2, "lr": 3e-3}
CLIP = {"loss": "ppo_clip", "lr": 3e-3}
FORMS = {
    "v0": KL,
    "moving": {**KL, "reference": "every 3"},
    "in_reward": {**KL, "reference": "every 3", "reference_kl_in": "reward"},
    "decoupled": {**CLIP, "proximal": "every 1", "updates_per_step": 2},
    "decoupled_moving": {**CLIP, "proximal": "every 3"},
    "behaviour": {**CLIP, "proximal": "behaviour"},
    "epochs": {"epochs": 3, "updates_per_step": 2, "lr": 3e-3},
    "decoupled_epochs": {**CLIP, "proximal": "every 1", "epochs": 2},
    "muon": {"optimiser": "muon", "lr": 3e-3, "epochs": 2},
    "critic": {**CLIP, "advantage": "gae", "critic": {"lr": 1e-2, "warmup": 1}},
    "critic_on_the_policy": {**CLIP, "advantage": "gae", "critic": {"body": "policy"}},
    "critic_reference_epochs": {
        **KL,
        **CLIP,
        "advantage": "gae",
        "reference": "every 3",
        "reference_kl_in": "reward",
        "epochs": 2,
        "critic": {"action": "turn"},
    },
}
REPLAYED = ("in_reward", "decoupled_moving", "behaviour", "muon", "critic_reference_epochs")
"""Together they have each part of a step that a replay computes again."""
READ_AGAIN = ("moving", "in_reward", "decoupled_moving", "critic_reference_epochs")
"""Those that need version 3 to continue from the checkpoint of step 4."""


@pytest.fixture
def read_again(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the versions that were read from the store."""
    found: list[int] = []
    made_read = past_versions.PublishedVersions.read

    def noted(self: past_versions.PublishedVersions, number: int, term: int | None = None):
        found.append(number)
        return made_read(self, number, term)

    monkeypatch.setattr(past_versions.PublishedVersions, "read", noted)
    return found


def forget_checkpoints(run: TinyRun, but: int = 0) -> None:
    for key in [entry.key for entry in run.store.list("checkpoints/")]:
        if f"s{but:08}-" not in key:
            run.store.delete(key)


@pytest.mark.parametrize("name", one_of(3, FORMS))
def test_a_resumed_run_equals_one_that_was_never_stopped(
    name: str, tmp_path: Path, read_again: list[int]
) -> None:
    """Stopped within a step; then steps are repeated from the checkpoint of step 4, whose policies
    are of version 3, and all of them from step 0.
    """
    with tiny_run(
        tmp_path,
        trainer={"steps": 6, **FORMS[name]},
        checkpoint_every=2,
        task=UNEVEN,
        weights=WeightsSettings(dtype="bfloat16"),
    ) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        assert run.train(term=2)
        whole = hashes(run)
        assert len(set().union(*whole.values())) == 6, "a step changed nothing"
        read_again.clear()
        for term, step in ((3, 4), (4, 0)):
            forget_checkpoints(run, but=step)
            trainer = run.build_trainer(term)
            assert trainer.step == step
            assert trainer.run(threading.Event())
            assert hashes(run) == whole
        if name != "behaviour":
            assert set(read_again) == ({3} if name in READ_AGAIN else set())


def test_each_repetition_is_a_fact_in_the_ledger(tmp_path: Path) -> None:
    """Once, however often the step is repeated; a trajectory is still in one take (invariant 2)."""
    with tiny_run(tmp_path, trainer={"steps": 4, **FORMS["epochs"]}, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=2)
        assert run.train(term=2)
        takes = run.records("ledger", Take)
        again = run.records("ledger", TakesRepeated)
        numbers = {
            (step, update): tuple(
                take.micro_batch for take in takes if (take.step, take.update) == (step, update)
            )
            for step in range(1, 5)
            for update in range(2)
        }
        assert [(r.step, r.epoch, r.update, r.micro_batches) for r in again] == [
            (step, epoch, update, numbers[step, update])
            for step in range(1, 5)
            for epoch in (1, 2)
            for update in range(2)
        ]
        assert max(used(run).values()) == 1
        done = run.records("ledger", StepDone)
        assert [one.takes for one in done] == [
            len(numbers[one.step, 0]) + len(numbers[one.step, 1]) for one in done
        ]
        assert len(listed_versions(run.store)) == 5, "an epoch makes no version"


def test_the_version_that_a_checkpoint_needs_is_kept(tmp_path: Path) -> None:
    """The bound of 4 versions alone would leave 7 to 10; the checkpoint of step 7 needs 5
    (invariant 11).
    """
    with tiny_run(
        tmp_path,
        trainer={"steps": 10, **KL, "reference": "every 5"},
        checkpoint_every=7,
        task=UNEVEN,
        weights=WeightsSettings(dtype="bfloat16", versions_max=4, deltas=False),
    ) as run:
        run.start_all()
        assert run.train(term=1)
        assert sorted(version.number for version in listed_versions(run.store)) == [5, 8, 9, 10]
        whole = hashes(run)
        forget_checkpoints(run, but=7)
        assert run.build_trainer(term=2).step == 7
        assert run.train(term=3)
        assert hashes(run) == whole


@pytest.mark.parametrize("name", one_of(2, REPLAYED))
def test_a_replay_recomputes_every_step(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", **FORMS[name])
    assert main(["audit", str(run)]) == 0
    capsys.readouterr()
    for first in ("0", "5"):
        out = tmp_path / first
        assert main(["replay", str(run), "--out", str(out), "--from-step", first, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["differing"] == []
        assert found["compared"] == (STEPS if first == "0" else 2)


def test_adapters_have_a_moving_reference_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", lora=LoraSettings(rank=2, alpha=4.0), **FORMS["moving"])
    words = ["replay", str(run), "--out", str(tmp_path / "again"), "--from-step", "5", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["differing"] == []


def test_an_experiment_takes_another_reference_from_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", **FORMS["v0"])
    words = ["replay", str(run), "--from-step", "5", "--json", "--out"]
    changed = ["--set", "trainer.reference=every 3"]
    assert main([*words, str(tmp_path / "same")]) == 0
    assert main([*words, str(tmp_path / "other"), *changed]) == 0
    capsys.readouterr()
    same, other = (
        [line["reference_kl"] for line in read_metrics(tmp_path / out / "metrics/trainer.jsonl")]
        for out in ("same", "other")
    )
    assert same[0] == other[0]
    assert same[1] > other[1] > 0, "version 3 is nearer than version 0"


def test_an_experiment_begins_a_critic_on_recorded_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step 5 is repeated as it was recorded; the state that step 6 begins from has no critic."""
    run = made(tmp_path / "run", **CLIP)
    words = ["replay", str(run), "--from-step", "5", "--json", "--out"]
    critic = ["--set", "trainer.preset=ppo"]  # wins over the recorded advantage
    assert main([*words, str(tmp_path / "other"), *critic]) == 0
    found = read_metrics(tmp_path / "other" / "metrics/trainer.jsonl")
    assert [line.get("value_mean") for line in found] == [None, 0]
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.reference_kl=0.2", "trainer.reference=every 5"],
        ["trainer.preset=decoupled_ppo", "trainer.updates_per_step=2"],
        [
            "trainer.preset=ppo",
            "trainer.epochs=2",
            "trainer.reference_kl=0.1",
            "trainer.reference=every 5",
        ],
    ],
)
def test_a_killed_trainer_and_its_replay_have_the_same_hashes(
    settings: list[str], tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise 1 with `kill -9` between two checkpoints: the replay, which nothing disturbs, makes
    the weights of every step again.
    """
    folder, task = tmp_path / "run", "task.name=tests.support.uneven_task:Uneven"
    with started(folder, model, [*settings, task]) as run:
        run.wait_for(lambda: len(read(folder, "ledger", StepDone)) >= 6)
        run.kill("trainer")
        run.wait_complete()
    assert_the_log_adds_up(folder)
    words = ["replay", str(folder), "--out", str(tmp_path / "again"), "--from-step", "0", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["compared"], found["differing"]) == (12, [])
    done = read(folder, "ledger", StepDone)
    assert len({one.state_hash for one in done}) == 12
    assert_the_log_adds_up(folder)
