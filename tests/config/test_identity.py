"""Invariant 15: what identifies a run, and which settings its roles must agree on."""

import json
import threading
from functools import partial
from pathlib import Path

import pytest

from rollstream.consumers.trainer.build import Provenance, check_run
from rollstream.errors import BusError, ConfigurationError, NewerRelease
from rollstream.run.cli.configuration import load_and_settle
from rollstream.run.cli.main import main, parse
from rollstream.run.config.config import (
    accept_change,
    essential_settings,
    fingerprint,
    load,
    load_for_viewing,
    setting_changes,
)
from rollstream.run.config.recorded_configuration import (
    check_configuration,
    present_configuration,
    record_configuration,
    watch_configuration,
)
from rollstream.run.config.run_folder import RunFolder, write_configuration
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import RoleLaunch
from rollstream.run.roles.roles import run_role
from rollstream.storage.identity import (
    IDENTITY_KEY,
    check_readable,
    mark_deleted,
    read_or_create_identity,
)
from rollstream.storage.stored_settings import configuration_key
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import encode_json
from rollstream.streams.records import Configured
from rollstream.streams.release import ABANDONED, EPOCHS, RELEASE
from testbed.memory import MemoryStore


@pytest.fixture
def store() -> ObjectStore:
    return MemoryStore()


def of(**settings: object) -> Configuration:
    return Configuration.model_validate_json(json.dumps(settings))


CLUSTER = {"bus": "kafka://a:9092,b:9092/team.run", "store": "s3://bucket/run?endpoint=http://a:1"}
MOVED = {
    "bus": "kafka://other:9093/team.run?security=ssl&linger_ms=5",
    "store": "s3://bucket/run?deadline_s=30",
}


def test_hosts_endpoints_and_options_may_change(tmp_path: Path) -> None:
    assert fingerprint(of(**CLUSTER)) == fingerprint(of(**MOVED))
    write_configuration(RunFolder(tmp_path), of(**CLUSTER))
    write_configuration(RunFolder(tmp_path), of(**MOVED))
    assert load(tmp_path / "config.json", (), {}).bus == MOVED["bus"]


@pytest.mark.parametrize(
    "changed",
    [
        {"bus": "kafka://a:9092/team.other"}, {"store": "s3://bucket/other"},
        {"store": "s3://other/run"}, {"bus": "sqlite:bus"},
    ],
)  # fmt: skip
def test_prefix_and_bucket_may_not_even_when_accepted(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    write_configuration(RunFolder(tmp_path), of(**CLUSTER))
    with pytest.raises(ConfigurationError, match="cannot change in a run"):
        write_configuration(RunFolder(tmp_path), of(**(CLUSTER | changed)), accepted=True)


def test_a_hash_that_was_recorded_over_whole_urls_is_still_the_runs(store: ObjectStore) -> None:
    """The hash of 0.1.0's recorded configuration differs from today's for the same settings; the
    settings do not differ.
    """
    had = essential_settings(of(**CLUSTER)) | CLUSTER
    store.create(configuration_key("of-old"), encode_json(had))
    assert not accept_change(store, of(**MOVED), False, "of-old")
    with pytest.raises(ConfigurationError, match="store"):
        accept_change(store, of(**(CLUSTER | {"store": "s3://bucket/other"})), False, "of-old")


def test_the_id_is_drawn_once_and_another_run_is_refused(store: ObjectStore) -> None:
    drawn = read_or_create_identity(store, "one")
    assert read_or_create_identity(store, "one") == drawn
    assert read_or_create_identity(MemoryStore(), "one").id != drawn.id
    with pytest.raises(ConfigurationError, match="the store holds the run 'one', not 'two'"):
        read_or_create_identity(store, "two")


def test_a_ledger_of_another_run_is_refused() -> None:
    mine = Provenance("run", 2, "hash", "revision", run_id="aa")
    check_run(mine, Configured("hash", "revision", 0))
    check_run(mine, Configured("hash", "revision", 0, run_id="aa"))
    with pytest.raises(ConfigurationError, match="id bb, the store of the run with id aa"):
        check_run(mine, Configured("hash", "revision", 0, run_id="bb"))


def test_a_role_with_another_max_lag_is_refused_by_name(store: ObjectStore) -> None:
    read_or_create_identity(store, "run")
    record_configuration(store, of())
    other = of(dispatch={"max_lag": 3}, rollouts={"on_update": "keep_version"})
    with pytest.raises(ConfigurationError) as refused:
        check_configuration(store, other)
    assert "dispatch.max_lag: 4 in the run, 3 asked for" in str(refused.value)
    assert "rollouts.on_update" in str(refused.value)
    assert check_configuration(store, of(rollouts={"slots": 3}))


def test_every_role_compares_before_it_takes_a_lease(tmp_path: Path) -> None:
    store = open_store(f"file:{tmp_path / 'store'}")
    read_or_create_identity(store, "run")
    record_configuration(store, of())
    before = sorted(entry.key for entry in store.list())
    launch = partial(RoleLaunch, folder=tmp_path, stop=threading.Event(), nonce="n", name="one")
    other = of(dispatch={"max_lag": 3}, metrics={"enabled": False})
    for role in ("prompts", "dispatch", "train", "rollout", "score", "archive", "relay", "eval"):
        with pytest.raises(ConfigurationError, match=r"dispatch\.max_lag: 4 in the run, 3 asked"):
            run_role(launch(role=role, configuration=other))
    assert sorted(entry.key for entry in store.list()) == before


def test_before_the_trainer_recorded_a_configuration_any_role_may_start(
    store: ObjectStore,
) -> None:
    with watch_configuration(store, of(dispatch={"max_lag": 3}), threading.Event(), False):
        pass
    assert not check_configuration(store, of())


def test_a_role_that_started_first_stops_when_the_trainer_records_another(
    store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.run.config.recorded_configuration.UNRECORDED_S", 0.01)
    stop = threading.Event()
    read_or_create_identity(store, "run")

    def work() -> None:
        with watch_configuration(store, of(dispatch={"max_lag": 3}), stop, False):
            record_configuration(store, of())
            assert stop.wait(30)

    with pytest.raises(ConfigurationError, match="max_lag"):
        work()


def test_an_accepted_change_is_what_roles_compare_with(store: ObjectStore) -> None:
    read_or_create_identity(store, "run")
    record_configuration(store, of())
    changed = of(trainer={"lr": 1e-3})
    assert check_configuration(store, changed, accepted=True)
    record_configuration(store, changed)
    assert check_configuration(store, changed)
    with pytest.raises(ConfigurationError, match=r"trainer\.lr"):
        check_configuration(store, of())


def test_the_present_configuration_is_the_recorded_one_and_this_hosts_own(
    store: ObjectStore,
) -> None:
    mine = of(metrics={"port": 9001}, sampling={"tokens_max": 4})
    assert present_configuration(store, mine) == mine
    read_or_create_identity(store, "run")
    assert present_configuration(store, mine) == mine
    record_configuration(store, of(sampling={"tokens_max": 48}, trainer={"lr": 1e-3}))
    found = present_configuration(store, mine)
    assert (found.sampling.tokens_max, found.metrics.port) == (48, 9001)
    assert found.trainer.lr == 1e-3


def test_a_run_that_needs_a_newer_release_is_refused_before_any_lease(store: ObjectStore) -> None:
    read_or_create_identity(store, "run")
    record_configuration(store, of())
    found = json.loads(store.get(IDENTITY_KEY))
    assert found["release"] == RELEASE
    found |= {"release": "7.1", "needs": ["merged_groups"]}
    store.put(IDENTITY_KEY, encode_json(found))
    with pytest.raises(NewerRelease, match=r"merged_groups; .* run release 7\.1 or a later"):
        read_or_create_identity(store, "run")
    with pytest.raises(NewerRelease):
        record_configuration(store, of())


def test_a_folder_is_claimed_only_once_log_and_store_were_reached(tmp_path: Path) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text('run = "run"\n')
    folder = tmp_path / "run"

    def asked(bus: str) -> None:
        line = ["warmup", str(toml), "--run", str(folder), "--set", f"bus={bus}"]
        load_and_settle(parse(line))

    with pytest.raises(BusError, match=r"no broker of kafka://127.0.0.1:1/run can be reached"):
        asked("kafka://127.0.0.1:1/run")
    assert not (folder / "config.json").exists()
    asked("sqlite:bus")
    assert load(folder / "config.json", (), {}).bus == "sqlite:bus"


def test_readers_warn_of_unknown_keys_and_roles_refuse_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_configuration(RunFolder(tmp_path), of())
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    values["novel"] = 1
    values["trainer"]["magic"] = {"deep": True}
    path.write_text(json.dumps(values))
    assert load_for_viewing(path).trainer == of().trainer
    load_for_viewing(path)
    assert capsys.readouterr().err.count("trainer.magic") == 1
    with pytest.raises(ConfigurationError, match="unknown key"):
        load(path, (), {})
    assert main(["report", str(tmp_path)]) == 0
    assert main(["train", str(path)]) == 2


def test_a_removed_setting_is_ignored_in_a_recorded_configuration_at_its_default_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_configuration(RunFolder(tmp_path), of())
    path, toml = tmp_path / "config.json", tmp_path / "new.toml"
    values = json.loads(path.read_text())
    values["rollouts"]["vllm"]["kv_handover"] = False
    path.write_text(json.dumps(values))
    assert load(path, (), {}).rollouts == load_for_viewing(path).rollouts == of().rollouts
    assert "kv_handover" not in capsys.readouterr().err
    write_configuration(RunFolder(tmp_path), of())
    values["rollouts"]["vllm"]["kv_handover"] = True
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigurationError, match=r"kv_handover = true, .* set it to false there"):
        load(path, (), {})
    assert load_for_viewing(path).rollouts == of().rollouts
    assert "kv_handover" in capsys.readouterr().err
    toml.write_text("[rollouts.vllm]\nkv_handover = false\n")
    with pytest.raises(ConfigurationError, match=r"key rollouts\.vllm\.kv_handover in new\.toml"):
        load(toml, (), {})


def test_a_removed_setting_in_recorded_essentials_is_a_difference_unless_it_is_the_default() -> (
    None
):
    now, key = essential_settings(of()), "rollouts.vllm.kv_handover"
    assert setting_changes(now | {key: False}, now) == []
    assert [found.key for found in setting_changes(now | {key: True}, now)] == [key]


def test_a_run_of_agents_needs_a_release_that_knows_abandoned_turns(store: ObjectStore) -> None:
    """Invariant 14: a program that does not, refuses before it acts."""
    read_or_create_identity(store, "run")
    record_configuration(store, of())
    assert ABANDONED not in json.loads(store.get(IDENTITY_KEY))["needs"]
    record_configuration(store, of(agent={"service": True}, evaluation={"enabled": False}))
    assert ABANDONED in json.loads(store.get(IDENTITY_KEY))["needs"]


def test_a_reader_that_judges_records_refuses_a_run_with_a_feature_that_it_lacks(
    store: ObjectStore,
) -> None:
    check_readable(store)
    record_after(store, "a_feature_of_tomorrow")
    with pytest.raises(NewerRelease, match="a_feature_of_tomorrow"):
        check_readable(store)


def test_a_deleted_run_may_be_read(store: ObjectStore) -> None:
    mark_deleted(store, "run")
    check_readable(store)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [({}, False), ({"trainer": {"epochs": 2}}, True)],
)
def test_a_feature_of_a_setting_is_a_need_only_where_it_is_set(
    store: ObjectStore, settings: dict[str, object], needed: bool
) -> None:
    configuration = of(**settings)
    read_or_create_identity(store, configuration.run)
    record_configuration(store, configuration)
    assert (EPOCHS in json.loads(store.get(IDENTITY_KEY))["needs"]) == needed


def record_after(store: ObjectStore, feature: str) -> None:
    """Write `run.json` as a later release would, with a need of its own."""
    values = {"id": "1", "run": "run", "needs": [feature], "release": "9.0"}
    store.create(IDENTITY_KEY, encode_json(values))
