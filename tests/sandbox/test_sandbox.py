"""A sandbox keeps its bounds and its three verbs, also among hostile programs."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.import_path import module_environment
from rollstream.producers.sandbox import inside
from rollstream.producers.sandbox.base import (
    Sandbox,
    SandboxFailed,
    SandboxFileError,
    SandboxLimits,
    SandboxOptions,
    SandboxRefused,
)
from rollstream.producers.sandbox.bubblewrap import Bubblewrap, own_user
from rollstream.producers.sandbox.control_groups import find_control_groups
from testbed.repository import ROOT
from testbed.servers import bubblewrap

LONG = SandboxLimits(time_s=300.0)
SHORT = SandboxLimits(time_s=0.5)


@pytest.fixture(scope="module")
def backend() -> Bubblewrap:
    return Bubblewrap(SandboxOptions(), str(bubblewrap.program()))


@pytest.fixture
def sandbox(backend: Bubblewrap) -> Iterator[Sandbox]:
    with backend.open(LONG) as one:
        yield one


def python(text: str) -> list[str]:
    return ["python3", "-c", text]


def test_a_program_gets_stdin_and_files_and_gives_output_and_code(backend: Bubblewrap):
    text = "import sys; print(open('a/b').read() + sys.stdin.read()); sys.exit('bad')"
    result = backend.run_once(python(text), b"in", {"a/b": b"file "}, LONG)
    assert (result.ended, result.code, result.ok) == ("exit", 1, False)
    assert (result.text, result.errors) == ("file in\n", "bad\n")


@pytest.mark.parametrize("is_session", [False, True])
def test_programs_end_at_their_bounds(backend: Bubblewrap, is_session: bool):
    def ended(text: str, limits: SandboxLimits) -> str:
        if not is_session:
            return backend.run_once(python(text), b"", {}, limits).ended
        with backend.open(limits) as one:
            return one.exec(python(text)).ended

    assert ended("while True: pass", SHORT) == "time"
    assert ended("import time; time.sleep(1000)", SHORT) == "time"
    assert ended("while True: print('x' * 9999)", SandboxLimits(300.0, 50_000)) == "output"
    if find_control_groups() is not None:
        tight = SandboxLimits(300.0, memory_bytes=64 << 20)
        assert ended("x = bytearray(300 << 20); x[::4096] = x[::4096]", tight) == "memory"


def test_output_up_to_its_bound_is_kept(backend: Bubblewrap):
    limits = SandboxLimits(300.0, output_bytes=1000)
    result = backend.run_once(python("print('x' * 5000)"), b"", {}, limits)
    assert (result.ended, result.stdout) == ("output", b"x" * 1000)


def test_a_program_that_cannot_start_has_a_code_of_its_own(backend: Bubblewrap, sandbox: Sandbox):
    assert backend.run_once(["no-such-program"], b"", {}, LONG).code == 127
    result = sandbox.exec(["no-such-program"])
    assert (result.code, "cannot start no-such-program" in result.errors) == (127, True)


def test_a_signal_is_a_code_as_a_shell_shows_it(backend: Bubblewrap, sandbox: Sandbox):
    crash = python("import os; os.kill(os.getpid(), 11)")
    assert backend.run_once(crash, b"", {}, LONG).code == 139
    assert sandbox.exec(crash).code == 139


def test_files_stay_between_calls_and_no_process_does(sandbox: Sandbox):
    sandbox.write("folder/a.txt", b"one")
    result = sandbox.exec(
        ["sh", "-c", "cat folder/a.txt; echo two > b; sleep 999 & setsid sleep 999 &"]
    )
    assert result.text == "one"
    assert sandbox.read("/work/b") == b"two\n"
    listed = python("import os; print(sorted(int(p) for p in os.listdir('/proc') if p.isdigit()))")
    assert len(sandbox.exec(listed).text.split(",")) == 2  # process 1 and this one


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "", ".", "a/../../x", "a\0b", "x" * 2000])
def test_a_path_out_of_the_work_folder_is_refused_by_the_host(sandbox: Sandbox, path: str):
    with pytest.raises(SandboxFileError):
        sandbox.read(path)
    with pytest.raises(SandboxFileError):
        sandbox.write(path, b"")


def test_links_pipes_folders_and_large_files_are_refused(backend: Bubblewrap):
    limits = SandboxLimits(300.0, output_bytes=1000)
    with backend.open(limits) as one:
        one.exec(["sh", "-c", "ln -s /etc/passwd l; ln -s / r; mkfifo p; mkdir d; seq 9999 > big"])
        for path in ("l", "r/etc/passwd", "p", "d", "big", "none"):
            with pytest.raises(SandboxFileError):
                one.read(path)
        for path in ("l", "r/work/x", "p", "d"):
            with pytest.raises(SandboxFileError):
                one.write(path, b"x")
        one.write("big", b"small")
        assert one.read("big") == b"small"


HOSTILE = """\
import ctypes, os, signal
for number in range(1, 65):
    try:
        os.kill(1, number)
    except (OSError, ValueError):
        pass
libc = ctypes.CDLL(None)
print(libc.ptrace(16, 1, 0, 0))
for path in ("mem", "environ", "fd/0", "fd/1", "fd/3", "fd/4", "fd/5", "oom_score_adj"):
    try:
        os.write(os.open("/proc/1/" + path, os.O_WRONLY), b"forged")
        print("forged", path)
    except OSError:
        pass
"""


def test_a_program_cannot_touch_the_process_that_serves_the_verbs(sandbox: Sandbox):
    result = sandbox.exec(python(HOSTILE))
    assert result.text == "-1\n"
    assert sandbox.exec(["echo", "unharmed"]).text == "unharmed\n"


def test_an_answer_that_breaks_the_protocol_ends_the_sandbox(backend: Bubblewrap):
    one = backend.open(LONG)
    os.set_blocking(one._process.pipes[0].fileno(), True)
    one._process.pipes[0].write(inside.FRAME.pack(3, 0) + b"[1]")  # ends the serving process
    with pytest.raises(SandboxFailed):
        one.exec(["true"])
    with pytest.raises(SandboxFailed, match="is closed"):
        one.exec(["true"])


def test_closing_removes_processes_and_control_groups(backend: Bubblewrap):
    one = backend.open(LONG)
    process = one._process
    group = process._group  # type: ignore[attr-defined]
    one.close()
    one.close()
    assert process._process.poll() is not None  # type: ignore[attr-defined]
    assert group is None or not group.memory.exists()


def test_sandboxes_of_many_threads_are_apart(backend: Bubblewrap):
    found: list[str] = []

    def run(number: int) -> None:
        text = f"import os; open('mine', 'w').write('{number}'); print(open('mine').read())"
        found.append(backend.run_once(python(text), b"", {}, LONG).text.strip())

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == list("012345")


def test_limits_of_processes_hold_without_control_groups():
    """As in a container where this process is not root."""
    one = Bubblewrap(SandboxOptions(), str(bubblewrap.program()), has_groups=False)
    limits = SandboxLimits(300.0, memory_bytes=256 << 20, processes=12)
    forks = (
        "import os, time\ncount = 0\ntry:\n  while True:\n    if os.fork() == 0: time.sleep(99)\n"
    )
    forks += "    count += 1\nexcept OSError: print(count)"
    assert 5 <= int(one.run_once(python(forks), b"", {}, limits).text) <= 12
    held = one.run_once(python("x = bytearray(300 << 20)"), b"", {}, limits)
    assert "MemoryError" in held.errors
    assert "RLIMIT_AS" in one.report()["memory"]


def test_a_machine_without_namespaces_is_refused_with_a_remedy():
    """The kernel refuses namespaces in a namespace whose own limit of them is 0."""
    code = (
        "from rollstream.producers.sandbox import sandbox_report; from rollstream.errors import *\n"
        "try: print(sandbox_report())\n"
        "except ConfigurationError as error: print('REFUSED', error)"
    )
    bubblewrap.program()
    shell = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'
    done = subprocess.run(
        ["unshare", "-Ur", "sh", "-c", shell, "sh", sys.executable, "-c", code],
        env={**os.environ, **module_environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("REFUSED bubblewrap cannot make a sandbox here"), done
    assert "Nothing is run unconfined" in done.stdout


def test_what_a_sandbox_cannot_use_is_refused():
    with pytest.raises(SandboxRefused, match="readable"):
        Bubblewrap(SandboxOptions(readable=("relative",)), str(bubblewrap.program()))


def test_a_sandbox_has_a_user_of_its_own_where_the_host_allows_it():
    if os.geteuid() != 0:
        pytest.skip("only root may choose")
    whole, small, none = "0 0 4294967295", "0 100000 65536", "0 1000 1"
    assert own_user(1, whole) != own_user(2, whole)
    assert (own_user(1, whole) or 0) > 0x6000_0000 - 1
    assert 40_000 <= (own_user(1, small) or 0) < 65_536
    assert own_user(1, none) is None


V2 = "30 1 0:25 / {point} rw - cgroup2 cgroup2 rw\n"
V1 = "31 1 0:26 / {point}/memory rw - cgroup cgroup rw,memory\n32 1 0:27 / {point}/pids rw - cgroup cgroup rw,pids\n"  # noqa: E501


def test_a_group_of_version_2_is_made_where_its_parent_allows_it(tmp_path: Path):
    """Files stand for the kernel's; no group with processes may have limited children."""
    inner = tmp_path / "system" / "service"
    inner.mkdir(parents=True)
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory pids")
    (tmp_path / "system" / "cgroup.subtree_control").write_text("memory pids")
    (inner / "cgroup.subtree_control").write_text("")
    found = find_control_groups(V2.format(point=tmp_path), "0::/system/service\n", True)
    assert found is not None
    assert (found.version, found.memory) == (2, tmp_path / "system")
    group = found.make(1000, 5)
    assert (group.memory / "memory.max").read_text() == "1000"
    assert (group.pids / "pids.max").read_text() == "5"


def test_without_controllers_or_rights_there_is_no_group(tmp_path: Path):
    mounts = V2.format(point=tmp_path)
    assert find_control_groups(mounts, "0::/\n", True) is None
    (tmp_path / "cgroup.subtree_control").write_text("memory pids")
    assert find_control_groups(mounts, "0::/\n", False) is None
    assert find_control_groups(V1.format(point=tmp_path), "4:memory:/\n", True) is None
