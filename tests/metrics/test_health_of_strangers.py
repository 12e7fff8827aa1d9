"""`rollstream health` takes no other program's answer for that of a process of a run."""

import json

import pytest

from rollstream.run.cli.main import main
from tests.foreign_server import foreign_server


def answer(body: bytes, status: str = "200 OK") -> bytes:
    return f"HTTP/1.0 {status}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


STATE = json.dumps({"run": "r", "role": "train", "state": "stalled"}).encode()


@pytest.mark.parametrize("words", [(), ("--json",)])
@pytest.mark.parametrize(
    "given",
    [
        answer(b'{"status": "ok"}'),
        answer(b"[1]"),
        answer(b"<html>\xff</html>"),
        answer(b"nothing here", "404 Not Found"),
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"",
    ],
    ids=["other-json", "list", "page", "missing", "other-protocol", "closed"],
)
def test_another_program_is_no_healthy_process(given: bytes, words: tuple[str, ...], capsys):
    with foreign_server(given) as port:
        assert main(["health", "--port", str(port), *words]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"127.0.0.1:{port}/healthz" in printed.err


def test_a_process_that_listens_on_one_address_is_asked_there(capsys):
    with foreign_server(answer(STATE)) as port:
        assert main(["health", "--port", str(port), "--host", "localhost"]) == 0
        assert main(["health", "--port", str(port), "--host", "127.0.0.2"]) == 1
    assert f"http://127.0.0.2:{port}/healthz" in capsys.readouterr().err


def test_a_stalled_process_is_named_by_its_state(capsys):
    with foreign_server(answer(STATE, "503 Service Unavailable")) as port:
        assert main(["health", "--port", str(port)]) == 1
    assert capsys.readouterr().out == "stalled\n"
