"""A fork starts from its parent's state: the same weights, the remaining prompts, no burst; the
parent is unchanged.
"""

import json
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rollstream.consumers.trainer.data.poisoned_takes import FAILED_MAX, ComputeFailed
from rollstream.consumers.trainer.data.sample import Sample
from rollstream.look.index.parentage import PromptsLeft, prompts_left, read_parentage
from rollstream.run.cli.main import main
from rollstream.run.config.config import fingerprint, load
from rollstream.run.config.run_folder import RunFolder, open_run_log_for_writing, store_url
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.records import (
    Admitted,
    Configured,
    GroupClosed,
    Prompt,
    StepDone,
    Superseded,
    Take,
)
from testbed.memory import MemoryBus
from testbed.run_process import read
from testbed.versions import publish_small
from testbed.waiting import WAIT_S, wait_for
from tests.runs.test_resume import hashes
from tests.support.kept_run import STEPS, TASK, made, write_configuration_of
from tests.support.tiny_run import TinyRun, tiny_run


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 4 and 6 are kept."""
    return made(tmp_path_factory.mktemp("parent"))


def fork(parent: Path, out: Path, at: int | str = 4, *more: str) -> int:
    words = ["fork", str(parent), "--at", str(at), "--out", str(out)]
    return main([*words, *(word for one in ("trainer.steps=9", *more) for word in ("--set", one))])


def contents(folder: Path) -> dict[str, bytes]:
    """SQLite's own files beside a database come and go with its readers."""
    files = (path for path in folder.rglob("*") if path.is_file())
    kept = (path for path in files if path.suffix not in (".db-wal", ".db-shm"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in kept}


def audited(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    capsys.readouterr()
    assert main(["audit", str(folder), "--whole", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@settings(max_examples=60)
@given(st.data())
def test_the_prompts_left_are_those_whose_groups_had_not_ended(data: st.DataObject) -> None:
    """Over forks of forks: each prompt asked before and not ended is asked once more, and no
    other.
    """
    had = PromptsLeft()
    asked = set(range(60))
    for _ in range(data.draw(st.integers(1, 3))):
        order = sorted(asked)
        read = set(order[: data.draw(st.integers(0, 8))])
        following = max(read) + 1 if read else had.first()
        unread = [group for group in order if group >= following][:6]
        opened = set(data.draw(st.lists(st.sampled_from(sorted(read)), max_size=5))) if read else {}
        ended = set(data.draw(st.lists(st.sampled_from(unread), max_size=3)))
        later = set(data.draw(st.lists(st.sampled_from(sorted(ended | read) or [0]), max_size=3)))
        later &= asked
        had = prompts_left(had, following, opened, ended, later)
        asked -= (read - set(opened) - later) | (ended - later)
        assert {group for group in range(60) if group in had} == asked


def test_a_fork_has_the_parents_state_and_version_under_its_own_name(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = audited(parent, capsys)
    before = contents(parent)
    assert fork(parent, tmp_path / "fork") == 0
    assert contents(parent) == before
    assert audited(parent, capsys) == report
    c = load(tmp_path / "fork" / "config.json")
    store = open_store(store_url(c, tmp_path / "fork"))
    pointer, parentage = believed_pointer(store), read_parentage(store)
    assert pointer is not None
    assert pointer.version is not None
    assert parentage is not None
    (done,) = [d for d in read(parent, "ledger", StepDone) if d.step == 4]
    assert parentage.state_hash == done.state_hash
    mine = read_manifest(store, pointer.version).weights.tensors
    theirs = read_manifest(open_store(f"file:{parent}/store"), done.version).weights.tensors
    assert {n: t.hash for n, t in mine.items()} == {n: t.hash for n, t in theirs.items()}
    assert (c.run, pointer.version.number, parentage.run) == ("tiny-at-4", 4, "tiny")
    (configured,) = read(tmp_path / "fork", "ledger", Configured)
    assert (configured.resumed_from, configured.forked_from) == (4, "tiny s00000004-t0001")


def test_a_fork_admits_the_unfinished_prompts_of_its_parent_without_a_burst(
    parent: Path, tmp_path: Path
) -> None:
    """Admission continues as after step 4: (η + 4 + 1)·B groups at most, 4·B of them trained."""
    assert fork(parent, tmp_path / "fork") == 0
    with running(tmp_path / "fork") as run:
        run.start_prompts(2)
        run.start_dispatch(1)
        run.start_rollout("rollout-0")
        wait_for(lambda: len(run.records("admissions", Admitted)) >= 3 * 3)
        wait_for(lambda: len(run.records("trajectories")) >= 3 * 3 * 4)
        run.end()
        admitted = run.records("admissions", Admitted)
        assert [record.wave for record in admitted] == [4, 4, 4, 5, 5, 5, 6, 6, 6]
        groups = [record.group for record in admitted]
        prompts = [record.group for record in run.records("prompts", Prompt)]
    assert groups == prompts[: len(groups)]
    ended = ended_until(parent, 4)
    assert not ended & set(prompts)
    assert ended | set(prompts) == set(range(max(prompts) + 1))


def ended_until(folder: Path, step: int) -> set[int]:
    """Groups trained, or closed for another reason, by then."""
    takes = (take for take in read(folder, "ledger", Take) if take.step <= step)
    closed = (closed for closed in read(folder, "ledger", GroupClosed) if closed.step <= step)
    taken = {group.group for take in takes for group in take.groups}
    return taken | {one.group for one in closed}


@contextmanager
def running(folder: Path) -> Generator[TinyRun]:
    """The fork's log and store as a tiny run."""
    c = load(folder / "config.json")
    run = TinyRun(
        open_run_log_for_writing(c, folder),
        open_store(store_url(c, folder)),
        folder,
        c.trainer,
        task=TASK,
        name=c.run,
    )
    try:
        yield run
    finally:
        run.end()
        run.bus.close()


def test_a_fork_of_a_fork_leaves_out_what_either_finished(parent: Path, tmp_path: Path) -> None:
    assert fork(parent, tmp_path / "one") == 0
    assert fork(tmp_path / "one", tmp_path / "two", "latest", "run=second") == 0
    one, two = (read_parentage(open_store(f"file:{tmp_path / n}/store")) for n in ("one", "two"))
    assert one is not None
    assert two is not None
    assert (two.prompts, two.run, two.step) == (one.prompts, "tiny-at-4", 4)
    groups = [record.group for record in read(tmp_path / "two", "prompts", Prompt)]
    assert groups == [*one.prompts.again, one.prompts.on]


def test_a_step_without_a_checkpoint_takes_the_newest_before_it_and_reports_it(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fork(parent, tmp_path / "fork", 5) == 0
    reported = capsys.readouterr()
    assert "no checkpoint of step 5 is kept; the fork begins at step 4" in reported.err
    assert main(["checkpoints", "show", "latest", str(tmp_path / "fork")]) == 0
    assert "a fork of tiny at step 4" in capsys.readouterr().out.replace("\n", " ")
    assert main(["report", str(tmp_path / "fork")]) == 0
    assert "forked from tiny at step 4" in (tmp_path / "fork" / "report.html").read_text()


@pytest.mark.parametrize(
    ("at", "setting", "expected", "code"),
    [
        (3, "seed=0", "no checkpoint up to step 3 is kept; kept are: s00000004-t0001, s", 1),
        ("soon", "seed=0", "--at soon: give the number of a step, or latest", 2),
        (-1, "seed=0", "give the number of a step", 2),
        (4, "run=tiny", "a fork has a name of its own", 2),
        (4, "trainer.steps=4", "trainer.steps must be > 4", 2),
        (4, "trainer.updates_per_step=2", "trainer.updates_per_step: 1 in the run, 2 asked", 2),
        (4, "model.path=/nowhere", "model.path", 2),
        (4, "trainer.stepps=9", "trainer.steps", 2),
    ],
)
def test_what_cannot_be_a_fork_is_refused_and_nothing_is_made(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], at, setting, expected, code
) -> None:
    assert fork(parent, tmp_path / "fork", at, setting) == code
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()


@pytest.mark.parametrize("by", ["trainer", "score"])
def test_a_fork_that_would_need_a_version_of_its_parent_is_refused(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], by: str
) -> None:
    more = ["trainer.reference_kl=0.1", f"trainer.reference_by={by}"]
    for reference in ("every 3", "v2"):
        assert fork(parent, tmp_path / "fork", 4, *more, f"trainer.reference={reference}") == 2
        assert f"'{reference}' is the parent's version" in capsys.readouterr().err
    assert not (tmp_path / "fork").exists()
    for number, reference in enumerate(("every 4", "v4", "v7", "v0")):
        out = tmp_path / f"fork-{number}"
        assert fork(parent, out, 4, *more, f"trainer.reference={reference}") == 0


@pytest.mark.parametrize("reference", ["v0", "every 4"])
def test_a_fork_with_a_reference_resumes_and_replays_to_the_same_bits(
    tmp_path: Path, reference: str
) -> None:
    """Version 0 is the parent's starting model, version 4 the fork's first."""
    kl = {"reference_kl": 0.2, "reference": reference, "lr": 3e-3}
    parent = made(tmp_path / "parent", **kl)
    assert fork(parent, tmp_path / "fork", 4) == 0
    with running(tmp_path / "fork") as run:
        run.configuration_hash = fingerprint(load(tmp_path / "fork" / "config.json"))
        run.start_prompts(2)
        run.start_dispatch(1)
        run.start_rollout("rollout-0")
        stop = threading.Event()
        thread = threading.Thread(target=lambda: run.train(2, stop), daemon=True)
        thread.start()
        wait_for(lambda: len(run.records("ledger", StepDone)) >= 2)
        stop.set()
        thread.join(WAIT_S)
        assert run.train(3)
        whole = hashes(run)
        assert sorted(whole) == [5, 6, 7, 8, 9]
        for key in [entry.key for entry in run.store.list("checkpoints/")]:
            if "s00000004-" not in key:
                run.store.delete(key)
        assert run.build_trainer(4).step == 4
        assert run.train(5)
        assert hashes(run) == whole
        run.end()
    assert len(set().union(*whole.values())) == 5
    first = metrics_of(tmp_path / "fork", 5).get("reference_kl", 0.0)
    assert (first == 0) == (reference == "every 4"), "step 5 trains from version 4"


def metrics_of(folder: Path, step: int) -> dict[str, float]:
    return next(done.metrics for done in read(folder, "ledger", StepDone) if done.step == step)


def test_a_fork_needs_an_empty_folder_and_a_log_of_its_own(
    parent: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert fork(parent, tmp_path / "full") == 2
    assert fork(parent, parent / "inside") == 2
    assert fork(parent, tmp_path / "a", 4, f"bus=sqlite:{parent}/bus") == 2
    assert fork(parent, tmp_path / "b", 4, f"store=file:{parent}/store") == 2
    assert "is the parent's" in capsys.readouterr().err
    (tmp_path / "replay").mkdir()
    (tmp_path / "replay" / "config.json").write_text((parent / "config.json").read_text())
    (tmp_path / "replay" / "replay.json").write_text("{}")
    assert fork(tmp_path / "replay", tmp_path / "c") == 2
    assert "holds a replay" in capsys.readouterr().err
    assert not (tmp_path / "c").exists()


def test_a_log_that_holds_another_run_is_refused(parent: Path, tmp_path: Path, capsys) -> None:
    assert fork(parent, tmp_path / "one") == 0
    assert fork(parent, tmp_path / "two", 4, f"store=file:{tmp_path}/one/store") == 2
    assert fork(parent, tmp_path / "three", 4, f"bus=sqlite:{tmp_path}/one/bus") == 2
    streams = open_store(f"file:{tmp_path}/streams")
    publish_small(MemoryBus(), streams, "other", WeightStream("draft"), [0])
    streams.delete("run.json")
    assert fork(parent, tmp_path / "four", 4, f"store=file:{tmp_path}/streams") == 2
    assert capsys.readouterr().err.count("holds a run already") == 3
    assert not (tmp_path / "two" / "config.json").exists()


POISONED_STEP = 3


def poisoned_run(folder: Path) -> int:
    """A run with a checkpoint of each step; the first group of step 3 fails in the learner until it
    is superseded. Returns that group.
    """
    groups: set[int] = set()
    with tiny_run(folder, trainer={"steps": POISONED_STEP}, task=TASK, checkpoint_every=1) as run:
        write_configuration_of(run)
        run.start_all()
        for term in range(1, FAILED_MAX + 1):
            trainer = run.build_trainer(term)
            feeder = trainer.take_feeder
            feeder.learner = FailsInStep(feeder.learner, groups)  # pyright: ignore[reportAttributeAccessIssue]
            with pytest.raises(ComputeFailed):
                trainer.run(threading.Event())
        assert run.train(FAILED_MAX + 1)
    (group,) = groups
    return group


@dataclass
class FailsInStep:
    """A learner that fails on the samples of the first group of step 3."""

    learner: Any
    groups: set[int]

    def submit(self, samples: Sequence[Sample], shortages: int = 0) -> None:
        self.learner.submit(samples, shortages)
        groups = {int(sample.trajectory.partition(".")[0]) for sample in samples}
        if self.learner.updates == POISONED_STEP - 1 and not self.groups:
            self.groups.add(min(groups))
        if self.groups & groups:
            cause = RuntimeError("CUDA error: device-side assert")
            raise ComputeFailed((self.learner.micro_batches - 1,), cause) from cause

    def __getattr__(self, name: str) -> Any:
        return getattr(self.learner, name)


def test_forks_before_and_after_a_poisoned_step_repeat_the_decision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the poisoned step the group is dead and its prompt is not asked again; before it, it had
    not ended, and its prompt is.
    """
    parent = tmp_path / "parent"
    parent.mkdir()
    group = poisoned_run(parent)
    (superseded,) = read(parent, "ledger", Superseded)
    assert (superseded.step, group in superseded.poisoned) == (POISONED_STEP, True)
    for at in (POISONED_STEP - 1, POISONED_STEP):
        out = tmp_path / f"at-{at}"
        assert fork(parent, out, at) == 0, capsys.readouterr().err
        parentage = read_parentage(open_store(f"file:{out}/store"))
        assert parentage is not None
        assert parentage.step == at
        assert (group in parentage.prompts) == (at < POISONED_STEP)
        ended = ended_until(parent, at)
        assert {g for g in range(parentage.prompts.on) if g in parentage.prompts} == set(
            range(parentage.prompts.on)
        ) - ended


def test_a_living_run_is_forked_while_it_continues(tmp_path: Path) -> None:
    """Steps after the checkpoint are taken meanwhile; the fork asks their prompts again."""
    folder = tmp_path / "parent"
    folder.mkdir()
    making = threading.Thread(target=made, args=(folder,), daemon=True)
    making.start()
    store = open_store(f"file:{folder}/store")
    wait_for(lambda: any("s00000002" in entry.key for entry in store.list("checkpoints/")))
    assert fork(folder, tmp_path / "fork", "latest") == 0
    making.join(WAIT_S)
    assert max(done.step for done in read(folder, "ledger", StepDone)) == STEPS
    parentage = read_parentage(open_store(f"file:{tmp_path / 'fork'}/store"))
    assert parentage is not None
    prompts = {record.group for record in read(tmp_path / "fork", "prompts", Prompt)}
    ended = ended_until(folder, parentage.step)
    assert ended | prompts == set(range(max(prompts) + 1))
    assert not ended & prompts
    assert RunFolder(tmp_path / "fork").configuration.exists()
