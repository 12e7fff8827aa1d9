"""What a command that looks may do with a run of somebody else (`analysis/looking.py`)."""

import json
import os
import shutil
import sys

import pytest

from rollstream.errors import ConfigurationError, OutsideRun
from rollstream.look.query import own_runs
from rollstream.look.query.locate import locate_run
from rollstream.look.query.looking import (
    model_file,
    open_run_log,
    open_run_store,
    permits_run_code,
    refused_code,
    require_code,
)
from rollstream.run.cli.main import main
from rollstream.storage.identity import IDENTITY_KEY, RunIdentity
from rollstream.storage.stores.file import FileStore
from rollstream.storage.stores.json_objects import encode_json
from tests.analysis.asked_run import make_run

ID = "0123456789abcdef"
CODE = "their_rule:centred"


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    """A user who began no run on this machine and named no host."""
    monkeypatch.setenv("ROLLSTREAM_STATE", str(tmp_path / "state"))
    for name in ("ROLLSTREAM_BUS", "ROLLSTREAM_STORE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    make_run(folder)
    FileStore(folder / "store").put(IDENTITY_KEY, encode_json(RunIdentity(ID, "asked")))
    return folder


def configure(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "bus",
    [
        "kafka://127.0.0.1:9/p?security=sasl_plaintext",
        "kafka://127.0.0.1:9/p?security=sasl_ssl",
        "kafka://127.0.0.1:9/p?security=ssl&ca=/etc/passwd",
        "kafka://127.0.0.1:9/p?security=ssl&cert=/etc/passwd&key=/etc/passwd",
    ],
)
def test_kafka_secrets_go_only_to_brokers_that_the_user_named(run, bus, monkeypatch):
    configure(run, bus=bus)
    monkeypatch.setenv("KAFKA_USER", "user")
    monkeypatch.setenv("KAFKA_PASSWORD", "secret")
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:9 .*only to hosts that you named"):
        open_run_log(locate_run(str(run)))


def test_a_host_named_by_itself_gets_secrets_over_tls_alone(run):
    plain, tls = (
        f"kafka://127.0.0.1:9/p?security={security}" for security in ("sasl_plaintext", "sasl_ssl")
    )
    assert main(["trust", str(run), "--host", "127.0.0.1:9"]) == 0
    for bus, error in ((plain, "only to hosts that you named"), (tls, "can be reached")):
        configure(run, bus=bus)
        with pytest.raises(Exception, match=error):
            open_run_log(locate_run(str(run)))


def test_a_url_in_the_environment_or_of_an_own_run_is_the_users_word(run, monkeypatch):
    bus = "kafka://127.0.0.1:9/p?security=sasl_plaintext"
    configure(run, bus=bus)
    monkeypatch.setenv("ROLLSTREAM_BUS", bus)
    with pytest.raises(OSError, match="can be reached"):
        open_run_log(locate_run(str(run)))
    monkeypatch.delenv("ROLLSTREAM_BUS")
    own_runs.remember_begun("f" * 16, {"bus": bus}, run)
    with pytest.raises(OSError, match="can be reached"):
        open_run_log(locate_run(str(run)))


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "https://127.0.0.1:9"])
def test_aws_credentials_go_only_to_servers_that_the_user_named(run, endpoint, monkeypatch):
    url = f"s3://bucket/prefix?endpoint={endpoint}"
    configure(run, store=url)
    with pytest.raises(ConfigurationError, match="only to hosts that you named"):
        open_run_store(locate_run(str(run)))
    for name, value in (("ROLLSTREAM_STORE", url), ("AWS_ENDPOINT_URL", endpoint)):
        monkeypatch.setenv(name, value)
        assert open_run_store(locate_run(str(run)))
        monkeypatch.delenv(name)
    assert open_run_store(locate_run(url)), "the command line is the user's word"


def test_a_region_is_no_way_to_another_host(run):
    configure(run, store="s3://bucket/p?region=x.evil.example/")
    with pytest.raises(ConfigurationError, match="no region"):
        open_run_store(locate_run(str(run)))


def test_code_is_imported_for_a_run_of_the_users_own_and_under_the_names_it_had(run):
    configure(run, trainer={"advantage": CODE})
    location = locate_run(str(run))
    assert refused_code(location) == (CODE,)
    with pytest.raises(ConfigurationError, match=r"their_rule:centred.*--trust"):
        require_code(location)
    assert not refused_code(locate_run(str(run), is_trusted=True))
    own_runs.remember_begun(ID, {"trainer": {"advantage": CODE}}, run)
    assert not refused_code(locate_run(str(run)))
    configure(run, trainer={"advantage": CODE, "choose": "other:rule"})
    assert refused_code(locate_run(str(run))) == ("other:rule", CODE)


def test_a_module_in_the_runs_own_folder_is_not_that_of_an_own_run(run, monkeypatch):
    configure(run, trainer={"advantage": CODE})
    own_runs.remember_begun(ID, {"trainer": {"advantage": CODE}}, run)
    (run / "their_rule.py").write_text("raise SystemExit('imported')")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(run)
    assert not permits_run_code(locate_run("."), (CODE,))


@pytest.mark.parametrize("key", ["../../x", "a/b", "", "Z" * 16, "0" * 65])
def test_an_id_of_a_run_names_no_file_of_the_users(key, tmp_path):
    assert not own_runs.remember_run(key, ["a:b"])
    assert own_runs.own_run(key) == own_runs.OwnRun()
    assert not (tmp_path / "state").exists()


def test_a_part_that_lies_elsewhere_is_named_once(run, tmp_path, capsys):
    elsewhere = tmp_path / "larger-disk"
    (run / "bus").rename(elsewhere)
    (run / "bus").symlink_to(elsewhere)
    with pytest.raises(OutsideRun, match=r"rollstream trust .* --folder .*larger-disk"):
        open_run_log(locate_run(str(run)))
    assert main(["trust", str(run), "--folder", str(elsewhere)]) == 0
    assert str(elsewhere) in capsys.readouterr().out
    assert open_run_log(locate_run(str(run))).end("ledger")
    configure(run, bus=f"sqlite:{tmp_path}/other")
    (tmp_path / "other").mkdir()
    with pytest.raises(OutsideRun, match="other"):
        open_run_log(locate_run(str(run)))


def test_links_that_an_own_run_began_with_are_followed(run, tmp_path):
    elsewhere = tmp_path / "larger-disk"
    (run / "bus").rename(elsewhere)
    (run / "bus").symlink_to(elsewhere)
    own_runs.remember_begun(ID, {}, run)
    assert open_run_log(locate_run(str(run))).end("ledger")


def test_trust_remembers_the_code_that_the_run_names(run, capsys):
    configure(run, trainer={"advantage": CODE})
    assert main(["trust", str(run), "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line == {"run": "asked", "code": [CODE], "folders": [], "hosts": []}
    assert not refused_code(locate_run(str(run)))


def test_the_model_is_read_from_the_run_and_nothing_is_written(run, tmp_path):
    before = sorted(run.rglob("*"))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "tokenizer.json").write_text("user's")
    assert model_file(locate_run(str(run)), "missing.json") is None
    (run / "model").rename(run / "old") if (run / "model").exists() else None
    (run / "model").symlink_to(outside)
    with pytest.raises(OutsideRun):
        model_file(locate_run(str(run)), "tokenizer.json")
    (run / "model").unlink()
    (run / "old").rename(run / "model") if (run / "old").exists() else None
    assert sorted(run.rglob("*")) == before


def test_forwarding_writes_into_no_other_folder_of_the_run(run, capsys):
    shutil.rmtree(run / "metrics", ignore_errors=True)
    (run / "metrics").symlink_to(".")
    before = sorted(run.iterdir())
    assert main(["forward", str(run), "--to", "tensorboard"]) == 2
    assert "metrics leads to" in capsys.readouterr().err
    assert sorted(run.iterdir()) == before


@pytest.mark.parametrize("content", ["pipe", "[" * 100_000, "7", '{"bus": ["x"]}'])
def test_a_configuration_that_is_none_ends_with_a_sentence(run, content, capsys):
    path = run / "config.json"
    path.unlink()
    os.mkfifo(path) if content == "pipe" else path.write_text(content)
    for words in (["tail", str(run), "ledger"], ["top", str(run), "--once"], ["audit", str(run)]):
        assert main(words) == 2
        assert "Traceback" not in capsys.readouterr().err
