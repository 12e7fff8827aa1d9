"""Removing a run: everything of it and nothing of another one, refused while it lives, and repeated
after an interruption at any point.
"""

import os
import shutil
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec.structs import replace

from rollstream.errors import (
    ConfigurationError,
    Fenced,
    LeaseHeld,
    OutsideRun,
)
from rollstream.keep import removal
from rollstream.keep.removal import (
    RemovalPlan,
    RunPlace,
    check_not_living,
    find_run_place,
    plan_objects,
    plan_removal,
    remove,
)
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import bus_url, store_url
from rollstream.run.supervisor.supervisor import RunLock
from rollstream.storage.identity import IDENTITY_KEY, check_exists, read_or_create_identity
from rollstream.storage.lease_renewal import LeaseRenewal
from rollstream.storage.leases import LeaseCandidate, acquire_lease
from rollstream.storage.stores.base import ListedObject
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.named_streams import WeightStream
from rollstream.storage.weights.pointer import believed_pointer
from rollstream.storage.weights.verify import verify_version
from rollstream.streams.connect import open_bus
from rollstream.streams.records import RelayStatus, RolloutStatus
from rollstream.streams.removal import living_rollouts, own_groups, own_topics, topic_names
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.sample_records import SAMPLES
from testbed.servers import versity
from testbed.versions import publish_small
from testbed.waiting import WAIT_S, wait_for
from tests.support.kept_run import made
from tests.support.tiny_run import tiny_run


def place_of(folder: Path) -> RunPlace:
    c = load(folder / "config.json")
    return RunPlace(c.run, folder, bus_url(c, folder), store_url(c, folder))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = made(tmp_path_factory.mktemp("finished"), archive=True)
    read_or_create_identity(open_store(f"file:{folder}/store"), "tiny")
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


def removed(folder: Path, *keep: removal.Keep) -> RemovalPlan:
    plan = plan_removal(place_of(folder), keep)
    for _ in remove(plan, keep):
        pass
    return plan


def test_a_run_is_removed_with_all_it_wrote_and_again_changes_nothing(run: Path) -> None:
    place = place_of(run)
    plan = removed(run)
    assert plan.log is not None
    assert {"ledger", "trajectories", "status"} <= set(plan.log.topics)
    assert not run.exists() or [path.name for path in run.iterdir()] == ["trainer.jsonl"]
    assert not plan_removal(place, ())


def test_a_run_is_removed_through_a_link_to_its_folder(run: Path) -> None:
    (run / "trainer.jsonl").unlink(missing_ok=True)  # not the run's
    link = run.with_name("link")
    link.symlink_to(run)
    removed(link)
    assert not run.exists()
    assert not link.is_symlink()


def test_files_of_the_user_stay_in_the_folder(run: Path) -> None:
    (run / "notes.txt").write_text("mine")
    (run / "store" / "exported").mkdir()
    (run / "store" / "exported" / "file").touch()
    plan = removed(run)
    assert run / "notes.txt" in plan.folder.foreign
    assert (run / "notes.txt").read_text() == "mine"
    assert (run / "store" / "exported" / "file").exists()
    assert not (run / "config.json").exists()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_a_removal_is_interrupted_anywhere_and_the_same_command_continues(
    run: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """No role can act on the remaining objects in between, and none remains at the end."""
    left = after

    def interrupt() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Interrupted

    delete, unlink = FileStore.delete, Path.unlink
    with monkeypatch.context() as patched:
        patched.setattr(FileStore, "delete", lambda *a: (interrupt(), delete(*a)))
        patched.setattr(Path, "unlink", lambda *a, **k: (interrupt(), unlink(*a, **k)))
        with pytest.raises(Interrupted):
            removed(run)
    if (run / "store" / IDENTITY_KEY).exists() and after:
        with pytest.raises(ConfigurationError, match="of it was interrupted"):
            read_or_create_identity(open_store(f"file:{run}/store"), "tiny")
    assert (run / "config.json").exists(), "the same command finds log and store"
    removed(run)
    assert {path.name for path in run.iterdir()} <= {"trainer.jsonl"} if run.exists() else True


def test_the_last_version_and_checkpoint_are_kept_and_can_be_read(run: Path) -> None:
    plan = removed(run, "final")
    store = open_store(f"file:{run}/store")
    pointer = believed_pointer(store)
    assert pointer is not None
    assert pointer.version is not None
    assert verify_version(store, pointer.version)[1] == ""
    assert {entry.key.split("/")[0] for entry in store.list()} == {
        "weights", "checkpoints", "run.json"
    }  # fmt: skip
    assert not (run / "bus").exists()
    with pytest.raises(ConfigurationError, match="was deleted"):
        read_or_create_identity(store, "tiny")
    assert plan.objects.kept
    removed(run)
    assert not (run / "store").exists()


def test_named_weight_streams_go_with_the_run_and_their_newest_versions_are_kept(run: Path) -> None:
    stream, store = WeightStream("draft"), open_store(f"file:{run}/store")
    with closing(open_bus(f"sqlite:{run}/bus")) as bus:
        publish_small(bus, store, "tiny", stream, range(5))
    store.put("streams/mine.txt", b"of the user")
    plan = removed(run, "final")
    assert plan.log is not None
    assert stream.topic.name in plan.log.topics
    part = stream.part(store)
    pointer = believed_pointer(part)
    assert pointer is not None
    assert pointer.version == Version(4, 1)
    assert verify_version(part, Version(4, 1))[1] == ""
    removed(run)
    assert [entry.key for entry in store.list()] == ["streams/mine.txt"]


def test_the_archive_is_kept_and_nothing_else(run: Path) -> None:
    removed(run, "archive")
    store = open_store(f"file:{run}/store")
    assert {entry.key.split("/")[0] for entry in store.list()} == {"archive", "run.json"}
    assert (run / "config.json").exists()


def test_a_run_with_a_living_lease_is_refused(run: Path) -> None:
    store = open_store(f"file:{run}/store")
    lease = acquire_lease(store, LeaseCandidate("trainer", "train", "n", 1.0), 0.0)
    with LeaseRenewal(lease), pytest.raises(LeaseHeld, match="leases are held of trainer"):
        check_not_living(place_of(run), 0.0)


@pytest.mark.parametrize("seconds", [3e10, 1e308])
def test_a_lease_that_states_years_is_not_waited_for(run: Path, seconds: float) -> None:
    store = open_store(f"file:{run}/store")
    acquire_lease(store, LeaseCandidate("trainer", "sent", "nonce", seconds), 0.0)
    with pytest.raises(LeaseHeld, match=r"role trainer .*delete roles/trainer\.json"):
        check_not_living(place_of(run), heartbeats_s=0.0)


PIPES = ("ledger.db", "ledger.db-wal", "ledger.db-shm", "ledger.db-journal", "status.db")


@pytest.mark.parametrize(
    "name",
    [*(f"bus/{name}" for name in PIPES), "store/roles/trainer.json", "run.lock", "replay.json"],
)
def test_no_removal_waits_for_a_pipe(run: Path, name: str) -> None:
    (run / name).unlink(missing_ok=True)
    os.mkfifo(run / name)
    with suppress(OutsideRun):  # or the removal deletes the rest
        RunLock(run, 0.0).close()
        check_not_living(place_of(run), heartbeats_s=0.0)
        removed(run)


def test_a_lock_that_is_a_link_is_not_opened(run: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    (run / "run.lock").symlink_to(key)
    with pytest.raises(OutsideRun, match=r"run\.lock"):
        RunLock(run, 0.0)
    assert key.read_text() == "secret"


def test_a_holder_that_was_suspended_is_fenced(run: Path) -> None:
    """It wakes up after the removal found its lease unchanged."""
    store = open_store(f"file:{run}/store")
    lease = acquire_lease(store, LeaseCandidate("trainer", "train", "n", 1.0), 0.0)
    check_not_living(place_of(run), 0.0)
    removed(run)
    with pytest.raises(Fenced):
        lease.renew()


def test_a_role_that_read_the_identity_before_the_mark_ends_when_it_has_its_lease(
    run: Path,
) -> None:
    store = open_store(f"file:{run}/store")
    read_or_create_identity(store, "tiny")  # the role starts, and imports for seconds
    removed(run)
    acquire_lease(store, LeaseCandidate("trainer", "train", "n"), 0.0)
    with pytest.raises(ConfigurationError, match="was deleted while this role started"):
        check_exists(store, "tiny")


def test_a_lease_taken_between_the_look_and_the_mark_stops_the_removal(run: Path) -> None:
    store, place = open_store(f"file:{run}/store"), place_of(run)
    plan = plan_removal(place, ())
    lease = acquire_lease(store, LeaseCandidate("trainer", "train", "n", 0.3), 0.0)
    with LeaseRenewal(lease), pytest.raises(LeaseHeld):
        list(remove(plan, ()))
    read_or_create_identity(store, "tiny")  # the mark was taken back
    assert (run / "bus" / "ledger.db").exists()


def test_objects_of_other_runs_are_not_this_runs() -> None:
    keys = [
        "run.json", "weights/latest.json", "roles/trainer.json", "exp/run.json",
        "exp/weights/v1/x", "weights/inner/run.json", "weights/inner/blobs/b", "notes",
        "archive/topic=ledger/run=a/date=2026-01-01/ledger-00000-00000000000000000000.parquet",
        "archive/topic=ledger/run=a-1/date=2026-01-01/ledger-00000-00000000000000000000.parquet",
    ]  # fmt: skip
    plan = plan_objects([ListedObject(key, 1) for key in keys], "a", (), ())
    assert [entry.key for entry in plan.delete] == [keys[1], keys[8], keys[2], "run.json"]
    assert {entry.key for entry in plan.foreign} == {*keys[3:8], keys[9]}


def test_pins_of_killed_readers_are_the_runs() -> None:
    plan = plan_objects([ListedObject("pins/eval.json", 1)], "a", (), ())
    assert [entry.key for entry in plan.delete] == ["pins/eval.json"]
    assert not plan.foreign


def test_a_store_whose_run_was_removed_is_no_error_a_store_of_others_is(run: Path) -> None:
    """Whatever a command repeats: a folder that is gone, and a store without any object."""
    url = f"file:{run}/store"
    for _ in remove(plan_removal(find_run_place(url, or_emptied=True), ()), ()):
        pass
    assert not (run / "store").exists()
    for _ in range(2):
        assert not plan_removal(find_run_place(url, or_emptied=True), ())
        (run / "store").mkdir(exist_ok=True)
    open_store(url).put("exported/model", b"x")
    for wrong in (url, f"file:{run}/mistyped/store"):
        with pytest.raises(ConfigurationError, match="is the URL right"):
            find_run_place(wrong, or_emptied=True)


def test_an_emptied_prefix_of_a_bucket_is_no_error() -> None:
    url = versity.new_url()
    open_store(url).put("run.json", b'{"id": "1", "run": "one"}')
    place = find_run_place(url, or_emptied=True)
    assert place.run == "one"
    list(remove(plan_removal(place, ()), ()))
    assert not plan_removal(find_run_place(url, or_emptied=True), ())


PREFIXES = ["", "a", "a-1", "a.b", "a.b.c", "ab", "b"]


@given(st.sets(st.sampled_from(PREFIXES), min_size=1), st.data())
def test_names_on_a_broker_belong_to_one_run(runs: set[str], data: st.DataObject) -> None:
    """Also prefixes of each other, and groups that users named."""

    def names(prefix: str, parts: list[str]) -> set[str]:
        return {f"{prefix}.{part}" if prefix else part for part in parts}

    named = ["weight-stream-draft", f"weight-stream-{'a' * 64}"]
    topics = {run: names(run, [*topic_names(), *named]) for run in runs}
    used = [f"{g}.{t}" for g in ("dispatch", "truncated") for t in ("ledger", "trajectories")]
    of_users = ["my.reader.trajectories", "my.reader.weight-stream-draft"]
    groups = {run: names(run, used + of_users * bool(run)) for run in runs}
    whole = set[str]().union(*topics.values()) | {"__consumer_offsets", "other"}
    for other in runs:
        whole |= names(other, ["weight-stream-", "weight-stream-a_b", f"weight-stream-{'a' * 65}"])
    members = set[str]().union(*groups.values()) | {"others-group"}
    run = data.draw(st.sampled_from(sorted(runs)))
    assert set(own_topics(run, whole)) == topics[run]
    assert set(own_groups(run, whole, members)) == groups[run]


def test_a_rollout_and_a_relay_that_left_are_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_sleep(seconds: float) -> None:
        raise AssertionError("it waits for a heartbeat")

    url = f"sqlite:{tmp_path}/bus"
    bus = open_bus(url)
    bus.create(catalogue())
    samples = {type(one): one for one in SAMPLES}
    rollout, relay = samples[RolloutStatus], samples[RelayStatus]
    publish(bus, "status", "rollout-0/1", replace(rollout, health="leaving"))
    publish(bus, "status", "relay-0/1", relay)
    monkeypatch.setattr("rollstream.streams.removal.time.sleep", no_sleep)
    with pytest.raises(AssertionError, match="waits"):
        living_rollouts(url, WAIT_S)
    publish(bus, "status", "relay-0/1", replace(relay, url=""))
    assert not living_rollouts(url, WAIT_S)
    bus.close()


def test_a_living_rollout_is_refused(tmp_path: Path) -> None:
    with tiny_run(tmp_path, trainer={"steps": 1000}) as run:
        run.start_all()
        run.start_thread(lambda: run.build_trainer(1).run(run.stop))
        wait_for(lambda: run.records("status"))
        with pytest.raises(LeaseHeld, match="rollouts or relays report to sqlite:"):
            check_not_living(RunPlace("tiny", tmp_path, f"sqlite:{tmp_path}/bus", None), WAIT_S)
