"""Three runs at once on one broker and in one bucket, their prefixes the beginnings of each other:
each is whole by itself, and deleting one leaves the others as they are.
"""

import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollstream.run.config.config import load
from rollstream.storage.stores.connect import open_store
from rollstream.streams.kafka.address import Secrets, parse_kafka_url
from rollstream.streams.kafka.client import Admin, base_settings
from testbed.run_process import SETTINGS, run_line, running
from testbed.servers import kafka_broker, versity
from testbed.waiting import WAIT_S, wait_for

NAMES = ("a", "a-1", "a.b")
STEPS = 4
SMALL = [
    f"trainer.steps={STEPS}", "trainer.groups_per_step=2", "trainer.samples_per_group=2",
    "rollouts.count=1", "sampling.tokens_max=20", "checkpoints.every=2", "archive.roll_s=1",
]  # fmt: skip


def command(*words: str, code: int = 0) -> str:
    line = [sys.executable, "-m", "rollstream", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr if code else done.stdout


def cluster_names(server: str, prefix: str) -> tuple[set[str], set[str]]:
    """Topics and groups of all three runs."""
    admin = Admin(base_settings(parse_kafka_url(f"kafka://{server}"), Secrets()))
    try:
        topics = {name for name in admin.topic_names() if name.startswith(prefix)}
        return topics, {name for name in admin.group_names() if name.startswith(prefix)}
    finally:
        admin.close()


def of_run(names: set[str], prefix: str) -> set[str]:
    """Those of one run: `a` has nothing below `a.b`."""
    longer = f"{prefix}.b."
    return {n for n in names if n.startswith(f"{prefix}.") and not n.startswith(longer)}


def start_all(root: Path, model: Path, urls: dict[str, list[str]]) -> Sequence[subprocess.Popen]:
    with ExitStack() as started:
        found: list[subprocess.Popen] = []
        for name in NAMES:
            (root / f"{name}.toml").write_text(f'run = "{name}"\n')
            settings = [*SETTINGS, f"model.path={model}", *SMALL, *urls[name]]
            line = run_line(root / f"{name}.toml", root / name, settings)
            found.append(started.enter_context(running(line, root / f"{name}.txt")))
        for process in found:
            wait_for(lambda process=process: process.poll() is not None)
        return found


@pytest.mark.long
def test_three_runs_share_a_broker_and_a_bucket_and_one_is_deleted(
    tmp_path: Path, model: Path
) -> None:
    server, base = kafka_broker.server(), versity.new_url()
    mark, (place, _, query) = uuid.uuid4().hex[:8], base.partition("?")
    urls = {
        name: [f"bus=kafka://{server}/{mark}{name}", f"store={place}/{name}?{query}"]
        for name in NAMES
    }
    for process, name in zip(start_all(tmp_path, model, urls), NAMES, strict=True):
        assert process.returncode == 0, (tmp_path / f"{name}.txt").read_text()
    for name in NAMES:
        report = json.loads(command("audit", str(tmp_path / name), "--json"))
        assert (report["run"], report["violations"]) == (name, 0)
    whole = open_store(base)
    before = {entry.key: whole.stat(entry.key).etag for entry in whole.list()}
    topics, groups = cluster_names(server, mark)

    command("rm", str(tmp_path / "a"), "--yes")
    left, left_groups = cluster_names(server, mark)
    assert left == topics - of_run(topics, f"{mark}a")
    assert left_groups == groups - of_run(groups, f"{mark}a")
    assert of_run(topics, f"{mark}a")
    assert of_run(groups, f"{mark}a")
    after = {entry.key: whole.stat(entry.key).etag for entry in whole.list()}
    assert after == {key: etag for key, etag in before.items() if not key.startswith("a/")}
    assert not (tmp_path / "a").exists()

    url = load(tmp_path / "a.b" / "config.json")
    command("rm", url.store, "--bus", url.bus, "--keep", "archive,final", "--yes")
    kept = {entry.key.split("/")[1] for entry in whole.list("a.b/")}
    assert kept == {"archive", "weights", "model", "checkpoints", "run.json", "configurations"}
    assert of_run(cluster_names(server, mark)[0], f"{mark}a.b") == set()
    command("weights", "export", "latest", str(tmp_path / "exported"), url.store)
    assert json.loads(command("audit", str(tmp_path / "a-1"), "--json"))["violations"] == 0
    refused = command("run", str(tmp_path / "a.b"), code=2)
    assert "the run a.b was deleted" in refused
