"""A trainer that resumes with other bits (another machine) is a fork within its run: it publishes
nothing until its number passes the highest believed one, then an anchor
(docs/reference/invariants.md, A trainer's step).

The other machine is a learning rate that differs in its last digits, which changes every hash.
"""

from pathlib import Path

import pytest

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.storage.weights.manifest import Manifest, read_manifest
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.streams.records import StepDone, Trajectory
from rollstream.streams.values import Version
from testbed.waiting import wait_for
from tests.runs.test_resume import UNEVEN, hashes, train_until, used
from tests.support.tiny_run import TinyRun, tiny_run

STEPS = 8


def elsewhere(run: TinyRun) -> None:
    lr = run.trainer.lr * (1 + 1e-6)
    run.trainer = run.trainer.model_copy(update={"lr": lr})


def audit(run: TinyRun) -> Audit:
    policy = AuditPolicy(run.dispatch.max_lag, run.keep_version)
    return Audit(run.bus, run.store, "tiny", policy)


def chain(run: TinyRun) -> list[Manifest]:
    """Kept versions, newest first."""
    pointer = believed_pointer(run.store)
    assert pointer is not None
    found: list[Manifest] = []
    version: Version | None = pointer.version
    while version is not None and version.number:
        found.append(read_manifest(run.store, version))
        version = found[-1].parent
    return found


@pytest.mark.parametrize("every", [100, 2])
def test_other_bits_make_a_fork_that_publishes_nothing_old_and_then_an_anchor(
    tmp_path: Path, every: int
) -> None:
    with tiny_run(tmp_path, trainer={"steps": STEPS}, task=UNEVEN, checkpoint_every=every) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        pointer, before = believed_pointer(run.store), hashes(run)
        assert pointer is not None
        assert pointer.version is not None
        highest = pointer.version
        folders = versions(run)
        elsewhere(run)
        trainer = run.build_trainer(2)
        repeated = range(trainer.step + 1, highest.number + 1)
        assert run.train(3)
        run.end()
        after = hashes(run)
        assert {step for step, found in after.items() if len(found) == 2} == set(repeated)
        assert all(before[step] < after[step] for step in repeated)
        assert {name: etag for name, etag in versions(run).items() if name in folders} == folders
        new = sorted(manifest.version for manifest in chain(run) if manifest.version.term == 3)
        assert [version.number for version in new] == list(range(highest.number + 1, STEPS + 1))
        first = next(m for m in chain(run) if m.version == new[0])
        assert (first.kind, first.parent) == ("anchor" if repeated else "delta", highest)
        assert_audit_reports_it(run, list(repeated))


def versions(run: TinyRun) -> dict[str, str]:
    """Objects of versions, and the fields that a swap would compare."""
    keys = [entry.key for entry in run.store.list("weights/v")]
    return {key: run.store.stat(key).etag for key in keys}


def assert_audit_reports_it(run: TinyRun, repeated: list[int]) -> None:
    lines = {line.number: line for line in audit(run).check()}
    assert {number for number, line in lines.items() if line.violations} == set()
    notes = " ".join(lines[6].notes)
    for step in repeated:
        assert f"step {step} was repeated with another state hash" in notes
    assert max(used(run).values()) == 1


def test_rollouts_go_over_to_the_fork_and_nothing_of_it_is_old(tmp_path: Path) -> None:
    """They hold only versions that were believed; the fork's start behind the highest. There are
    more steps than rollouts may be ahead (η + 1): otherwise all may have been generated before the
    fork's first.
    """
    with tiny_run(tmp_path, trainer={"steps": 2 * STEPS}, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        elsewhere(run)
        assert run.train(2)
        wait_for(lambda: any(v.term == 2 for v in held(run)))
        run.end()
        done: dict[int, Version] = {}
        for record in run.records("ledger", StepDone):
            done.setdefault(record.step, record.version)
        assert {v for v in held(run) if v.number} <= set(done.values())


def held(run: TinyRun) -> set[Version]:
    trajectories = run.records("trajectories", Trajectory)
    return {span.version for record in trajectories for span in record.spans}


def test_a_fork_that_dies_before_it_passed_the_highest_resumes_as_one(tmp_path: Path) -> None:
    """The third trainer may agree with the first or the second; the chain of versions holds."""
    with tiny_run(tmp_path, trainer={"steps": STEPS}, task=UNEVEN) as run:
        run.start_all()
        train_until(run, term=1, steps=4)
        elsewhere(run)
        run.build_trainer(2).publisher.close()
        train_until(run, term=3, steps=6)
        elsewhere(run)
        assert run.train(4)
        run.end()
        numbers = [manifest.version.number for manifest in chain(run)]
        assert numbers == list(range(STEPS, numbers[-1] - 1, -1))
        assert set(hashes(run)) == set(range(1, STEPS + 1))
        assert [line.offenders for line in audit(run).check() if line.violations] == []
