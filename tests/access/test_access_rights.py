"""Each role has a user, a key and rights of its own: a run needs no more than them, and nothing
else is possible with them. Shown by trying, over a real broker with ACLs and a bucket with a
policy.
"""

import fnmatch
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from rollstream.errors import RollstreamError
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import folder_of_run, write_configuration
from rollstream.storage.stores.connect import open_store
from rollstream.streams.bus import AppendEntry
from rollstream.streams.kafka.address import parse_kafka_url, read_secrets
from rollstream.streams.kafka.bus import KafkaBus
from rollstream.streams.records import Position
from rollstream.streams.topics import Topic, catalogue
from testbed.run_process import SETTINGS
from testbed.servers import free_ports
from testbed.waiting import WAIT_S, wait_for
from tests.access.policies import iam_policy, rights
from tests.access.secured import BUCKET, RUN, Secured, secured

MODULE = (sys.executable, "-m", "rollstream")
STEPS = 8
COMMANDS = ("prompts", "dispatch", "train", "rollout", "score", "relay", "archive", "eval")
HANDLED = {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"}
UNUSED = {  # rights that this run has no occasion for, and what needs them
    "dispatch": {"roles/rollouts/*", "blobs/*"},  # names that are retired; assignments above 1 MiB
    "prompts": {"blobs/prompts/*"},  # a prompt above 1 MiB
    "train": {"model/*", "blobs/ledger/*"},  # a trainer that has the model itself; a large take
    "rollout": {"blobs/trajectories/*", "blobs/partials/*"},  # an answer above 1 MiB
    "score": {"blobs/annotations/*"},  # an annotation above 1 MiB
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as both:
        yield both


@dataclass
class Roles:
    """The processes of a run, each as its own user; `logs` has their output."""

    servers: Secured
    configuration: Path
    logs: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, role: str) -> None:
        ending = () if role in ("train", "eval") else ("--until-complete",)
        with (self.logs / f"{role}.log").open("ab") as output:
            self.processes[role] = subprocess.Popen(
                [*MODULE, role, str(self.configuration), *ending],
                env=self.servers.environment(role),
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def run(self, user: str, *words: str) -> str:
        done = subprocess.run(
            [*MODULE, *words],
            env=self.servers.environment(user),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def describe(self) -> str:
        return "\n".join(f"{p.name}:\n{p.read_text()[-2500:]}" for p in self.logs.glob("*.log"))


def bus_of(servers: Secured, user: str) -> KafkaBus:
    address = parse_kafka_url(servers.settings[0].partition("=")[2])
    return KafkaBus(address, read_secrets(address, servers.environment(user)), answer_s=20.0)


def refusal(attempt: Callable[[], object]) -> str:
    """The error of an attempt; "" if it succeeds."""
    try:
        attempt()
    except RollstreamError as error:
        return f"{error} {error.__cause__!r}"
    return ""


@pytest.mark.slow
def test_no_user_writes_a_topic_that_is_not_its_own(servers: Secured) -> None:
    """All pairs of user and topic; nothing lands, so the run after it can be audited."""
    landed: list[tuple[str, str, str]] = []
    for user, own in rights().items():
        bus = bus_of(servers, user)
        for topic in catalogue():
            if topic.name in own["writes"]:
                continue
            entry = AppendEntry(b"k", b"v", partition=0)
            why = refusal(partial(bus.append, topic.name, [entry]))
            is_stated = "the broker refuses it" in why or not own["writes"]
            if "Authorization" not in why or not is_stated:
                landed.append((user, topic.name, why))
        bus.close()
    assert landed == []
    look = bus_of(servers, "look")
    assert {t.name: sum(look.end(t.name).values()) for t in catalogue()} == {
        t.name: 0 for t in catalogue()
    }
    look.close()


def test_no_role_makes_a_topic_and_a_rollout_moves_no_positions_of_others(servers: Secured) -> None:
    """A position of the group `truncated` would hide records from all readers."""
    bus = bus_of(servers, "rollout")
    assert "Authorization" in refusal(partial(bus.create, [Topic("another")]))
    for group in ("truncated", "dispatch", "archive"):
        move = partial(bus.commit, group, "trajectories", {0: Position(0)})
        assert "Authorization" in refusal(move), group
    bus.close()


def test_no_user_writes_a_key_that_is_not_its_own(
    servers: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pairs of user and a key of each pattern; the probe of conditional writes is left out."""
    url = servers.settings[1].partition("=")[2]
    patterns = {pattern for own in rights().values() for pattern in own["puts"]}
    written: list[tuple[str, str, str]] = []
    for user, own in rights().items():
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name, raising=False)
        for name, value in servers.environment(user).items():
            if name.startswith("AWS_") and value:
                monkeypatch.setenv(name, value)
        store = open_store(url)
        for pattern in sorted(patterns):
            key = pattern.replace("*", "tried")
            attempts = {
                "puts": partial(store.put, key, b"x"),
                "deletes": partial(store.delete, key),
            }
            for right, attempt in attempts.items():
                if any(fnmatch.fnmatch(key, one) for one in own[right]):
                    continue
                why = refusal(attempt)
                if "denied" not in why.lower():
                    written.append((user, key, why))
    assert written == []


@pytest.mark.slow
def test_a_run_needs_these_rights_and_shows_no_secret(
    servers: Secured, tmp_path: Path, model: Path
) -> None:
    """Invariant 1 by the audit. Each role has its user; the object store's log and the broker's
    show what was asked for.
    """
    folder, logs = tmp_path / "run", tmp_path / "logs"
    logs.mkdir()
    (port,) = free_ports(1)
    more = [
        f"trainer.steps={STEPS}", "task.reward=late", "relay.enabled=true", f"relay.port={port}",
        f"relay.folder={tmp_path / 'relay'}", "evaluation.enabled=true", "evaluation.every=4",
        "evaluation.prompts=4", f"folder={folder}", f"model.path={model}",
    ]  # fmt: skip
    roles = Roles(servers, _configuration(tmp_path, [*SETTINGS, *more, *servers.settings]), logs)
    calls_before = len(servers.calls.read_text().splitlines())
    denied_before = servers.broker.log().count("is Denied")
    hidden = servers.all_secrets()
    roles.run("warmup", "put-model", str(model), str(roles.configuration))
    try:
        for role in COMMANDS:
            roles.start(role)
        seen_in_a_list: set[str] = set()

        def has_ended() -> bool:
            seen_in_a_list.update(s for s in hidden if any(s in c for c in _command_lines()))
            return all(p.poll() is not None for p in roles.processes.values())

        wait_for(has_ended, None, roles.describe)
        codes = {role: process.returncode for role, process in roles.processes.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{roles.describe()}"
    finally:
        for process in roles.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(WAIT_S)
    shown = [
        roles.run("look", "audit", str(folder)),
        roles.run("look", "report", str(folder)),
        roles.run("look", "top", str(folder), "--once", "--json"),
        roles.run("look", "config", str(folder)),
    ]
    assert seen_in_a_list == set()
    places = [*tmp_path.rglob("*"), *(servers.objects.folder / "data").rglob("*"), servers.calls]
    for file in (place for place in places if place.is_file()):
        text = file.read_bytes()
        assert not [s for s in hidden if s.encode() in text], file
    assert not [s for s in hidden if any(s in text for text in [*shown, servers.broker.log()])]
    assert servers.broker.log().count("is Denied") == denied_before, _denied(servers)
    _compare_calls(servers.calls.read_text().splitlines()[calls_before:])


def _configuration(tmp_path: Path, settings: list[str]) -> Path:
    """The run's own configuration, which every role starts from."""
    file = tmp_path / "run.toml"
    file.write_text(f'run = "{RUN}"\n')
    loaded = load(file, settings, {})
    folder = folder_of_run(loaded)
    write_configuration(folder, loaded)
    return folder.path / "config.json"


def _command_lines() -> list[str]:
    found: list[str] = []
    for place in Path("/proc").iterdir():
        if place.name.isdecimal() and int(place.name) != os.getpid():
            try:
                found.append((place / "cmdline").read_text(errors="replace"))
            except OSError:
                continue
    return found


def _denied(servers: Secured) -> str:
    return "\n".join(line for line in servers.broker.log().splitlines() if "is Denied" in line)


def _compare_calls(lines: list[str]) -> None:
    """Compares the recorded requests with the policies: none was refused, and each right to write
    was used, but for `UNUSED`.
    """
    used: Counter[tuple[str, str, str]] = Counter()
    refused: list[str] = []
    for line in lines:
        _, _, after = line.partition("] ")
        _, requester, _, operation, key, _, status, code, *_ = after.split(" ")
        if code == "AccessDenied" or status == "403":
            refused.append(line)
        used[requester, operation.removeprefix("s3_"), key.removeprefix(f"{RUN}/")] += 1
    assert refused == []
    for role, own in rights().items():
        put = {key for who, what, key in used if who == role and what in HANDLED}
        unused = {p for p in own["puts"] if not fnmatch.filter(put, p)}
        assert unused == UNUSED.get(role, set()), (role, unused, sorted(put))
    allowed = {a for s in iam_policy("train", BUCKET, RUN)["Statement"] for a in s["Action"]}
    assert allowed == {
        *("s3:ListBucket", "s3:GetObject", "s3:PutObject", "s3:DeleteObject"),
        "s3:AbortMultipartUpload",
    }
