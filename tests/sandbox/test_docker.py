"""The back end `docker`, on a real daemon: the same verbs, bounds and attempts."""

import pytest

from rollstream.producers.sandbox.base import (
    SandboxFileError,
    SandboxLimits,
    SandboxOptions,
    SandboxRefused,
)
from rollstream.producers.sandbox.docker import DockerBackend, docker_command
from testbed.escapes.attempts import LIMITS, escaped
from testbed.servers import docker_daemon

LONG = SandboxLimits(time_s=300.0)


@pytest.fixture(scope="module")
def backend() -> DockerBackend:
    docker_daemon.daemon()
    return DockerBackend(SandboxOptions(image=docker_daemon.IMAGE))


@pytest.mark.long
def test_a_container_serves_the_three_verbs_within_its_bounds(backend: DockerBackend):
    with backend.open(LONG) as one:
        one.write("a/b", b"text")
        assert one.exec(["sh", "-c", "cat a/b; sleep 999 & exit 3"]).text == "text"
        assert one.read("a/b") == b"text"
        one.exec(["ln", "-s", "/etc/hostname", "link"])
        with pytest.raises(SandboxFileError):
            one.read("link")
    short = SandboxLimits(time_s=0.5)
    assert backend.run_once(["sleep", "999"], b"", {}, short).ended == "time"
    assert backend.report()["memory"] == "control group of the container"


@pytest.mark.long
def test_no_attempt_leaves_the_container(backend: DockerBackend):
    assert escaped(backend, LIMITS) == []


def test_the_command_has_every_bound():
    words = docker_command("docker", "name", SandboxOptions("image", ("/opt/x",)), SandboxLimits())
    text = " ".join(words)
    for wanted in (
        "--network none", "--read-only", "--cap-drop ALL", "--security-opt no-new-privileges",
        "--user 65534:65534", "--pids-limit 33", "--memory 536870912",
        "--memory-swap 536870912", "/work:rw,exec,nosuid,nodev,size=67108864",
        "--volume /opt/x:/opt/x:ro", "--pull never",
    ):  # fmt: skip
        assert wanted in text


def test_a_machine_without_docker_or_an_image_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(SandboxRefused, match=r"set task\.sandbox\.image"):
        DockerBackend(SandboxOptions(), "docker")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SandboxRefused, match="there is no program `docker`"):
        DockerBackend(SandboxOptions(image="x"))
