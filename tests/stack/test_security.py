"""The stack with encryption and access rights (deploy/compose.security.yaml) on a real Docker
daemon: a run trains to its end, no container can do what another's role may, and no secret is in a
process list, a description of a container, a log or the run's folder.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.stack.compose import ROLES, SERVERS, Stack, env_file, wait_until
from testbed.stack.daemon import StackDaemon
from testbed.stack.whole_run import StackRun

pytestmark = pytest.mark.long

UP_S = 1800.0
ROOT_SECRET = "hunter2-root-4f1d"
TRY = """
import os
from rollstream.streams.bus import AppendEntry
from rollstream.streams.connect import open_bus
from rollstream.storage.stores.connect import open_store
from rollstream.errors import RollstreamError

bus = open_bus(os.environ["ROLLSTREAM_BUS"])
store = open_store(os.environ["ROLLSTREAM_STORE"])
for what in (
    lambda: bus.append("ledger", [AppendEntry(b"k", b"v")]),
    lambda: store.put("weights/latest.json", b"{}"),
):
    try:
        what()
        print("done")
    except RollstreamError as error:
        print("refused", error)
"""


@pytest.fixture
def stack(daemon: StackDaemon) -> Iterator[Stack]:
    given = env_file("security")
    del given["COMPOSE_FILE"]
    shorter = {"TRAINER__STEPS": "12", "WARMUP__STEPS": "100", "WARMUP__DOCUMENTS": "2000"}
    variables = {**given, "S3_SECRET_KEY": ROOT_SECRET}
    made = Stack(daemon, shorter, variables, more=["deploy/compose.security.yaml"])
    with made.without_data():
        yield made


def test_a_run_trains_with_rights_of_each_role_and_shows_no_secret(
    stack: Stack, tmp_path: Path
) -> None:
    stack.up()
    wait_until(stack, (*ROLES, *SERVERS), "healthy", UP_S)
    passwords = json.loads(stack.run("bucket", "cat", "/run/access/admin/passwords.json"))
    hidden = {secret for own in passwords.values() for secret in own.values()}
    listed = b"".join(p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists())
    for role in ("rollout", "prompts"):
        said = stack.run(role, "python", "-c", TRY).splitlines()
        assert len(said) == 2, said
        assert all(line.startswith("refused ") for line in said), said
    wait_until(stack, ROLES, "ended", UP_S)
    StackRun(stack).wait_for_report()
    StackRun(stack).audit()
    containers = stack.containers()
    described = stack.daemon.docker("inspect", *(one.id for one in containers))
    logs = "".join(stack.logs(one, 100_000) for one in containers)
    (report,) = stack.containers("report")
    stack.copy_out(report, "/run/rollstream", tmp_path / "run")
    for secret in hidden:
        assert secret.encode() not in listed
        assert secret not in described + logs
        found = subprocess.run(["grep", "-rl", secret, tmp_path / "run"], capture_output=True)
        assert found.returncode == 1, found.stdout
    assert ROOT_SECRET not in logs
