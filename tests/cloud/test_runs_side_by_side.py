"""Three runs at once on one broker and in one bucket, their prefixes the beginnings of each other:
each is whole by itself, and deleting one leaves the others as they are.
"""

import uuid
from contextlib import ExitStack
from pathlib import Path

import pytest

from rollstream.run.config.config import load
from rollstream.storage.stores.connect import open_store
from rollstream.streams.kafka.address import Secrets, parse_kafka_url
from rollstream.streams.kafka.client import Admin, base_settings
from testbed.run_driver import HERE, RunDriver
from testbed.run_process import SETTINGS
from testbed.servers import kafka_broker, versity

NAMES = ("a", "a-1", "a.b")
STEPS = 4
SMALL = [
    f"trainer.steps={STEPS}", "trainer.groups_per_step=2", "trainer.samples_per_group=2",
    "rollouts.count=1", "sampling.tokens_max=20", "checkpoints.every=2", "archive.roll_s=1",
]  # fmt: skip


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


def complete_all(root: Path, model: Path, urls: dict[str, list[str]]) -> None:
    with ExitStack() as stack:
        runs: list[RunDriver] = []
        for name in NAMES:
            (root / f"{name}.toml").write_text(f'run = "{name}"\n')
            settings = [*SETTINGS, f"model.path={model}", *SMALL, *urls[name]]
            run = RunDriver(root / name, root / f"{name}.toml", settings)
            runs.append(stack.enter_context(run))
            run.start()
        for run in runs:
            run.wait_complete()
            report = run.audit()
            assert (report["run"], report["violations"]) == (run.folder.name, 0)


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
    complete_all(tmp_path, model, urls)
    whole = open_store(base)
    before = {entry.key: whole.stat(entry.key).etag for entry in whole.list()}
    topics, groups = cluster_names(server, mark)

    HERE.run("rm", str(tmp_path / "a"), "--yes")
    left, left_groups = cluster_names(server, mark)
    assert left == topics - of_run(topics, f"{mark}a")
    assert left_groups == groups - of_run(groups, f"{mark}a")
    assert of_run(topics, f"{mark}a")
    assert of_run(groups, f"{mark}a")
    after = {entry.key: whole.stat(entry.key).etag for entry in whole.list()}
    assert after == {key: etag for key, etag in before.items() if not key.startswith("a/")}
    assert not (tmp_path / "a").exists()

    url = load(tmp_path / "a.b" / "config.json")
    HERE.run("rm", url.store, "--bus", url.bus, "--keep", "archive,final", "--yes")
    kept = {entry.key.split("/")[1] for entry in whole.list("a.b/")}
    assert kept == {"archive", "weights", "model", "checkpoints", "run.json", "configurations"}
    assert of_run(cluster_names(server, mark)[0], f"{mark}a.b") == set()
    HERE.run("weights", "export", "latest", str(tmp_path / "exported"), url.store)
    assert RunDriver(tmp_path / "a-1").audit()["violations"] == 0
    refused = HERE.run("run", str(tmp_path / "a.b"), code=2)
    assert "the run a.b was deleted" in refused.stderr
