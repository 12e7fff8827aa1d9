"""A scorer that holds the reference policy: its annotations, what a trainer makes of them, and what
a second scorer or a killed one changes.
"""

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from rollstream.consumers.credit import scored_reference
from rollstream.consumers.objectives.policies.other_policies import FrozenPolicy, load_reference
from rollstream.consumers.objectives.policies.reference_scores import ReferenceScorer
from rollstream.consumers.trainer.learn.forward import scoring_form
from rollstream.consumers.trainer.past_versions import PublishedVersions
from rollstream.producers.scoring.scorer import AnnotationPlan, Scorer
from rollstream.run.cli.main import main
from rollstream.run.roles.reference import ReferencePool
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.settings import WeightsSettings
from rollstream.storage.starting_model.models import build_model
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.admissible import REFERENCE_LOGPROBS, TrainingBounds, reference_problem
from rollstream.streams.bus import Bus
from rollstream.streams.records import Annotation, StepDone, Take, Trajectory
from rollstream.streams.values import Span, Version
from rollstream.streams.writer import publish
from testbed.run_process import STEPS, assert_the_log_adds_up, read, started
from testbed.waiting import WAIT_S, wait_for
from tests.runs.test_resume import UNEVEN, hashes, train_until, used
from tests.runs.test_whole_run import assert_every_group_has_one_ending
from tests.support.kept_run import write_configuration_of
from tests.support.shares import one_of
from tests.support.tiny_run import SIZES, TinyRun, tiny_run

KL = {"reference_kl": 0.2, "lr": 3e-3, "threads": 1}
SCORED = {**KL, "reference_by": "score"}
ALONE = {"micro_batch_tokens": 1}
"""Each sample in a micro-batch of its own: then trainer and scorer compute the same."""


def pool_of(run: TinyRun, timeout_s: float = WAIT_S) -> ReferencePool:
    name, form = scored_reference(run.trainer), scoring_form(run.trainer)
    past = PublishedVersions(lambda: (run.store,), run.weights.dtype)

    def policy() -> FrozenPolicy:
        is_model = "/" in name
        model = load_reference(name, 32) if is_model else run.trained_model()
        return FrozenPolicy(model, name, form, past)

    def believed() -> int:
        pointer = believed_pointer(run.store)
        return pointer.version.number if pointer and pointer.version else -1

    scorer = ReferenceScorer(name, policy, believed)
    return ReferencePool(scorer, TrainingBounds(32), timeout_s, lambda _: run.stop.wait(0.02))


def scorer_of(run: TinyRun, name: str = "scorer-0", bus: Bus | None = None) -> Scorer:
    plan = AnnotationPlan((REFERENCE_LOGPROBS,), False, name)
    return Scorer(bus or run.bus, pool_of(run), plan, window=16)


def start_scorer(run: TinyRun, name: str = "scorer-0") -> None:
    scorer = scorer_of(run, name)
    run.start_thread(lambda: scorer.run(run.stop))


def notes_of(run: TinyRun) -> list[Annotation]:
    return run.records("annotations", Annotation)


@contextmanager
def run_of(folder: Path, trainer: dict[str, object], **changed) -> Generator[TinyRun]:
    given = {"steps": 6, **trainer}
    with tiny_run(folder, trainer=given, checkpoint_every=2, task=UNEVEN, **changed) as run:
        write_configuration_of(run)
        yield run


def completed(folder: Path, trainer: dict[str, object], **changed) -> dict[int, set[str]]:
    """The hashes of a whole run's steps; its folder is kept."""
    with run_of(folder, trainer, **changed) as run:
        run.start_all()
        if scored_reference(run.trainer):
            start_scorer(run)
        assert run.train()
        run.end()
        assert_every_group_has_one_ending(run)
        assert max(used(run).values()) == 1
        return hashes(run)


def replayed(folder: Path, out: str, *changed: str) -> list[str]:
    """The hashes of the steps of a replay, with changed settings if they are given."""
    words = ["replay", str(folder / "run"), "--out", str(folder / out), "--from-step", "0"]
    assert main([*words, *(part for one in changed for part in ("--set", one))]) == 0
    return hashes_in(folder / out)


def hashes_in(folder: Path) -> list[str]:
    return [
        one.state_hash for one in sorted(read(folder, "ledger", StepDone), key=lambda d: d.step)
    ]


@pytest.mark.parametrize("where", one_of(2, ["loss", "reward"]))
def test_a_trainer_that_computes_the_reference_itself_makes_the_same_bits(
    where: str, tmp_path: Path
) -> None:
    """The same recorded steps, replayed once with the annotations and once by a trainer that holds
    version 0: each micro-batch has one sample, no token is masked.
    """
    completed(tmp_path / "run", {**SCORED, **ALONE, "reference_kl_in": where})
    recorded = hashes_in(tmp_path / "run")
    assert len(set(recorded)) == 6
    assert replayed(tmp_path, "same") == recorded
    assert replayed(tmp_path, "own", "trainer.reference_by=trainer") == recorded
    words = ["replay", str(tmp_path / "run"), "--out", str(tmp_path / "no"), "--from-step", "0"]
    assert main([*words, "--set", "trainer.reference=every 2"]) == 2, "annotations are of v0"
    weaker = replayed(tmp_path, "weaker", "trainer.reference_kl=0.19")
    assert weaker[-1] != recorded[-1], "the term has no effect"


def test_with_several_samples_in_a_micro_batch_the_difference_is_rounding(tmp_path: Path) -> None:
    completed(tmp_path / "run", SCORED)
    assert replayed(tmp_path, "same") == hashes_in(tmp_path / "run")
    replayed(tmp_path, "own", "trainer.reference_by=trainer")
    scored, own = (
        [line.get("reference_kl", 0.0) for line in read_metrics(folder / "trainer.jsonl")]
        for folder in (tmp_path / "run", tmp_path / "own/metrics")
    )
    assert np.allclose(scored, own, rtol=1e-3)
    assert scored[-1] > 0


@pytest.mark.parametrize("reference", one_of(3, ["every 2", "v3", "teacher"]))
def test_a_resumed_and_a_replayed_run_have_the_bits_of_the_first(
    reference: str, tmp_path: Path
) -> None:
    """Also where late annotations contradict the first ones: the ledger names those."""
    if reference == "teacher":
        build_model("Qwen3ForCausalLM", SIZES, seed=7).save_pretrained(tmp_path / reference)
        reference = str(tmp_path / reference)
    bf16 = WeightsSettings(dtype="bfloat16")
    trainer = {**SCORED, "reference": reference}
    with run_of(tmp_path / "run", trainer, weights=bf16) as run:
        run.start_all()
        start_scorer(run)
        train_until(run, term=1, steps=3)
        contradict(run)
        assert run.train(term=2)
        whole = hashes(run)
        assert all(len(found) == 1 for found in whole.values()), "a repeated step differs"
        for key in [entry.key for entry in run.store.list("checkpoints/")]:
            if "s00000000-" not in key:
                run.store.delete(key)
        assert run.build_trainer(term=3).step == 0
        assert run.train(term=4)
        assert hashes(run) == whole
        run.end()
    assert {n: {h} for n, h in enumerate(replayed(tmp_path, "again"), 1)} == whole


def contradict(run: TinyRun) -> None:
    for note in notes_of(run):
        other = replace(note, values=note.values - 1, scorer="late")
        publish(run.bus, "annotations", str(note.group), other)


def test_the_reference_of_a_trajectory_is_that_of_its_newest_version(tmp_path: Path) -> None:
    """So it does not depend on when a scorer reads it (trainers use the version trained from)."""
    with run_of(tmp_path, {**SCORED, "reference": "every 2"}) as run:
        run.start_all()
        start_scorer(run)
        assert run.train()
        run.end()
        first = {note.trajectory: note for note in reversed(notes_of(run))}
        again = pool_of(run).scorer  # in another order than before: back to version 0, too
        records = run.records("trajectories", Trajectory)
        wanted = {2 * (one.spans[-1].version.number // 2) for one in records}
        assert len(wanted) > 1
        for record in sorted(records, key=lambda one: one.trajectory, reverse=True):
            if record.trajectory in first:
                assert first[record.trajectory].values.tolist() == again.score(record).tolist()


def test_two_scorers_give_equal_numbers_and_the_first_record_counts(tmp_path: Path) -> None:
    with run_of(tmp_path, SCORED) as run:
        run.start_all()
        start_scorer(run, "a")
        assert run.train()
        run.end()
        record = run.records("trajectories", Trajectory)[0]
        mine, other = (pool_of(run).scorer.score(record) for _ in range(2))
        assert mine.tolist() == other.tolist()
        noted = next(n for n in notes_of(run) if n.trajectory == record.trajectory)
        assert noted.values.tolist() == mine.tolist()


class DyingBus:
    """A bus whose process is killed between the computation of an annotation and its record."""

    def __init__(self, bus: Bus) -> None:
        self.bus, self.tried = bus, 0

    def __getattr__(self, name: str):
        return getattr(self.bus, name)

    def append(self, topic: str, entries: Sequence[object], **more: object):
        if topic == "annotations":
            self.tried += len(entries)
            raise KilledScorer
        return self.bus.append(topic, entries, **more)  # pyright: ignore


class KilledScorer(Exception):
    pass


def test_a_scorer_killed_between_computing_and_recording_is_succeeded(tmp_path: Path) -> None:
    with run_of(tmp_path, SCORED) as run:
        run.start_all()
        dying = DyingBus(run.bus)

        def die() -> None:
            with pytest.raises(KilledScorer):
                scorer_of(run, "first", dying).run(run.stop)  # pyright: ignore[reportArgumentType]

        run.start_thread(die)
        trained = run.start_trainer()
        wait_for(lambda: dying.tried > 0)
        assert not notes_of(run)
        start_scorer(run, "second")
        wait_for(trained.is_set)
        run.end()
        assert {note.scorer for note in notes_of(run)} == {"second"}
        takes = run.records("ledger", Take)
        assert {n.name for take in takes for n in take.annotations} == {REFERENCE_LOGPROBS}
        assert max(used(run).values()) == 1


def longer_than_one(run: TinyRun) -> list[Trajectory]:
    return [one for one in run.records("trajectories", Trajectory) if len(one.logprobs) > 1]


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (np.full(1, -1.0, np.float32), "1 values for {} generated tokens"),
        (np.full(500, -1.0, np.float32), "500 values for {} generated tokens"),
        (None, "values from 1 to 1, outside -100000 to 0.1"),
    ],
)
def test_what_cannot_be_log_probabilities_of_the_trajectory_trains_nothing(
    values: np.ndarray | None, why: str, tmp_path: Path
) -> None:
    """Invariant 12. The sample is left out and counted; its group continues without it."""
    with run_of(tmp_path, {**SCORED, "steps": 2}) as run:
        trainer = run.build_trainer(term=1)  # publishes version 0
        run.start_all()
        record = wait_for(lambda: longer_than_one(run))[0]  # of one token one value would be right
        wrong = np.ones(len(record.logprobs), np.float32) if values is None else values
        name, group = record.trajectory, record.group
        note = Annotation(name, group, REFERENCE_LOGPROBS, wrong, "foreign")
        publish(run.bus, "annotations", str(group), note)
        start_scorer(run)
        assert trainer.run(threading.Event())
        run.end()
        assert name not in used(run)
        counts = [done.counts.get("unscored", 0) for done in run.records("ledger", StepDone)]
        assert sum(counts) == 1
        assert reference_problem(record, wrong) == why.format(len(record.logprobs))


def test_a_version_that_never_comes_holds_no_place(tmp_path: Path) -> None:
    """Invariant 12: a record of any version that anyone wrote cannot stall a scorer."""
    with run_of(tmp_path, {**SCORED, "reference": "every 2"}) as run:
        run.build_trainer(term=1)
        run.start_all()
        wait_for(lambda: run.records("trajectories", Trajectory))
        record = run.records("trajectories", Trajectory)[0]
        pool, now = pool_of(run, timeout_s=60.0), [0.0]
        pool.clock, pool.wait = lambda: now[0], lambda _: None
        spans = (Span(0, len(record.logprobs), Version(10**6, 1)),)
        pool.submit_record(replace(record, trajectory="foreign", spans=spans))
        pool.submit_record(record)
        assert [name for name, _ in pool.poll()] == [record.trajectory]
        assert pool.poll() == []
        now[0] = 60.0
        ((name, verdict),) = pool.poll()
        assert (name, verdict.reason) == ("foreign", "no such version was believed within 60 s")


def test_a_teacher_with_fewer_tokens_is_refused(tmp_path: Path) -> None:
    small = {**SIZES, "vocab_size": 16}
    build_model("Qwen3ForCausalLM", small, seed=7).save_pretrained(tmp_path / "teacher")
    with pytest.raises(Exception, match="has 16 tokens, the trained model 32"):
        load_reference(str(tmp_path / "teacher"), 32)


@pytest.mark.slow
def test_killed_scorers_lose_nothing_and_a_replay_has_the_same_hashes(
    tmp_path: Path, model: Path
) -> None:
    """`kill -9` of both scorers of a whole run, as the supervisor starts them."""
    folder = tmp_path / "run"
    settings = [
        "trainer.reference_kl=0.2", "trainer.reference_by=score", "trainer.reference=every 5",
        "scoring.count=2", "scoring.function=reference",
        "task.name=tests.support.uneven_task:Uneven",
        f"trainer.steps={2 * STEPS}",  # far more than are done while a killed scorer starts again
    ]  # fmt: skip
    with started(folder, model, settings) as run:
        for name, steps in (("scorer-0", 3), ("scorer-1", 6)):
            run.wait_for(lambda at=steps: len(read(folder, "ledger", StepDone)) >= at)
            run.kill(name)
        run.wait_complete()
    assert_the_log_adds_up(folder, 2 * STEPS)
    takes = read(folder, "ledger", Take)
    noted = {note.trajectory for take in takes for note in take.annotations}
    assert {member.trajectory for take in takes for member in take.members} <= noted
    assert replayed(tmp_path, "again") == hashes_in(folder)
    assert main(["audit", str(folder)]) == 0
