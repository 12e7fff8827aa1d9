"""`rollstream explore` as a user starts it: it prints its URL, serves and leaves nothing behind."""

import os
import queue
import signal
import subprocess
import sys
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollstream.run.cli.look.explore import open_browser
from testbed.repository import ROOT
from testbed.waiting import WAIT_S
from tests.explorer.conftest import EXAMPLE


def started(folder: Path, *more: str, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rollstream", "explore", str(EXAMPLE), "--no-browser"]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), **environment}
    return subprocess.Popen(
        [*command, "--port", "0", *more], env=given, stdout=subprocess.PIPE, text=True
    )


def printed(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().removeprefix("explorer: ").strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal_and_deletes_its_index(tmp_path, number):
    with started(tmp_path) as process:
        url = printed(process)
        assert url.startswith("http://127.0.0.1:")
        assert urllib.request.urlopen(f"{url}api/runs", timeout=WAIT_S).status == 200
        assert list(tmp_path.glob("rollstream-explorer-*"))
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
    assert not list(tmp_path.glob("rollstream-explorer-*"))


def test_beyond_loopback_a_token_is_made_and_printed_once(tmp_path):
    with started(tmp_path, "--host", "0.0.0.0") as process:
        url = printed(process)
        base, _, token = url.partition("?token=")
        assert len(token) >= 40
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"{base}api/runs", timeout=WAIT_S)
        assert refused.value.code == 401
        request = urllib.request.Request(
            f"{base}api/runs", headers={"Authorization": f"Bearer {token}"}
        )
        assert urllib.request.urlopen(request, timeout=WAIT_S).status == 200
        process.terminate()
        assert process.wait(WAIT_S) == 0


def test_a_given_token_is_needed_also_on_loopback(tmp_path):
    given = "a-token-of-some-length-123"
    with started(tmp_path, ROLLSTREAM_EXPLORER_TOKEN=given) as process:
        assert printed(process).endswith(f"?token={given}")
        process.terminate()
        assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(("name", "opens"), [("w3m", False), ("firefox", True)])
def test_a_browser_of_the_terminal_is_not_started(monkeypatch, name, opens):
    opened: queue.SimpleQueue[str] = queue.SimpleQueue()
    browser = SimpleNamespace(name=f"/usr/bin/{name}", open=opened.put)
    monkeypatch.setattr(webbrowser, "get", lambda: browser)
    open_browser("http://127.0.0.1:7461/")
    if opens:
        assert opened.get(timeout=WAIT_S) == "http://127.0.0.1:7461/"
    else:
        assert opened.empty()
