"""Roles of a stack as processes on the daemon's machine, in no container (`processes`): the same
programs from the same image, over the same broker, object store and volume. They share the
daemon's network and this machine's processes, and have no cgroup and no filter of system calls.
"""

import json
import os
import signal
import subprocess
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from testbed.stack.compose import PROJECT, Stack
from testbed.stack.daemon import StackDaemon
from testbed.waiting import WAIT_S

IMAGE, VOLUME = "rollstream", f"{PROJECT}_run"
USER = "1000:1000"  # the image's
ENTER = """
set -e
mount -t tmpfs tmp "$ROOT"
mkdir "$ROOT/upper" "$ROOT/work" "$ROOT/all"
mount -t overlay -o "lowerdir=$LAYERS,upperdir=$ROOT/upper,workdir=$ROOT/work" all "$ROOT/all"
cd "$ROOT/all"
cp "$HOSTS" etc/hosts
mount --rbind /dev dev
mount -t proc proc proc
mount --bind "$VOLUME" run/rollstream
exec chroot --userspec="$OWNER" . env -C /app -i "$@"
"""


@contextmanager
def processes(
    stack: Stack, services: Sequence[str]
) -> Generator[dict[str, subprocess.Popen[bytes]]]:
    """One process for each of these services, with the command and environment that compose gives
    its container; killed at the end of the block. Broker and object store must be up.
    """
    folder = stack.daemon.folder / "processes"
    folder.mkdir(exist_ok=True)
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n" + "".join(_host_lines(stack)))
    described = stack.described()
    started: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for number, service in enumerate(services):
            given: dict[str, str] = described[service]["environment"]
            own = {**given, "ROLLSTREAM_METRICS_PORT": str(9500 + number)}
            words = [word.replace("$$", "$") for word in described[service]["command"]]
            started[service] = _start(stack.daemon, folder, hosts, service, own, words)
        yield started
    finally:
        for process in started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(WAIT_S)


def _start(
    daemon: StackDaemon,
    folder: Path,
    hosts: Path,
    name: str,
    environment: dict[str, str],
    words: Sequence[str],
) -> subprocess.Popen[bytes]:
    (image,) = json.loads(daemon.docker("image", "inspect", IMAGE))
    data = image["GraphDriver"]["Data"]
    root = folder / name
    root.mkdir(exist_ok=True)
    variables = {
        **os.environ,
        "LAYERS": f"{data['UpperDir']}:{data['LowerDir']}",
        "ROOT": str(root),
        "VOLUME": daemon.docker("volume", "inspect", "-f", "{{.Mountpoint}}", VOLUME).strip(),
        "HOSTS": str(hosts),
        "OWNER": USER,
    }
    given = ["HOME=/home/rollstream", *image["Config"]["Env"]]
    given += [f"{key}={value}" for key, value in environment.items()]
    line = [*daemon.inside("--net"), "unshare", "--mount", "sh", "-c", ENTER, "sh"]
    with (folder / f"{name}.log").open("wb") as output:
        return subprocess.Popen(
            [*line, *given, *words],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def _host_lines(stack: Stack) -> list[str]:
    """The addresses of broker and object store, by the names that roles know them by."""
    lines: list[str] = []
    for container in stack.containers("kafka", "object-store"):
        form = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        address = stack.daemon.docker("inspect", "-f", form, container.id).strip()
        lines.append(f"{address} {container.service}\n")
    return lines
