"""The server is closed by default: methods, Host, Origin, token, headers, bounds."""

import json
import socket
import sys
import threading

import pytest

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.serving import security
from rollstream.look.explorer.serving.events import CLIENTS_MAX
from testbed.explorer_server import parse_answer, serving
from tests.explorer.conftest import EXAMPLE

TOKEN = "a-token-of-some-length-123"
STRICT = "default-src 'self'"


@pytest.fixture(scope="module")
def locked(asked_folders):
    """A server that needs a token."""
    with serving([str(asked_folders["living"])], token=TOKEN) as server:
        yield server


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_served(living, method):
    for path in ("/", "/api/runs", "/api/events"):
        found = living.get(path, method=method)
        assert (found.status, found.headers["allow"]) == (405, "GET, HEAD")


def test_head_has_no_body(living):
    found = living.get("/api/runs", method="HEAD")
    assert found.status == 200
    assert int(found.headers["content-length"]) > 0
    assert found.body == b""


@pytest.mark.parametrize(
    "host", ["evil.example", "192.0.2.2:{port}", "gpu-server:{port}", "localhost.evil.example", ""]
)
def test_another_host_is_refused(living, host):
    host = host.format(port=living.port)
    found = living.raw("GET /api/runs HTTP/1.1", f"Host: {host}")
    assert found.status in (400, 403)
    assert f"--allow-host {host}".encode() in found.body


def test_two_hosts_are_refused(living):
    right = f"Host: 127.0.0.1:{living.port}"
    found = living.raw("GET /api/runs HTTP/1.1", right, "Host: evil.example")
    assert found.status in (400, 403)


@pytest.mark.parametrize("host", ["localhost:{port}", "localhost:8080", "127.0.0.1:8080"])
def test_loopback_is_served_also_at_the_port_of_a_tunnel(living, host):
    host = host.format(port=living.port)
    own = (f"Host: {host}", f"Origin: http://{host}")
    assert living.raw("GET /api/runs HTTP/1.1", *own).status == 200


@pytest.mark.parametrize("host", ["192.0.2.2:7461", "gpu-server:7461", "run.example.org"])
def test_with_a_token_addresses_and_listed_names_are_served(monkeypatch, host):
    monkeypatch.setenv("ROLLSTREAM_ALLOWED_HOSTS", "run.example.org")
    rule = security.access_rule("0.0.0.0", 7461, (), TOKEN).pages
    assert rule.refusal([host], [f"http://{host}"]) == ""
    refusal = rule.refusal(["evil.example"], [])
    assert refusal.endswith("--allow-host evil.example")
    assert rule.refusal([host], ["http://evil.example"])


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "https://127.0.0.1:{port}", "http://127.0.0.1"]
)
def test_another_origin_is_refused(living, origin):
    found = living.get("/api/runs", f"Origin: {origin.format(port=living.port)}")
    assert found.status == 403


def test_the_pages_own_origin_is_served_without_cors_headers(living):
    found = living.get("/api/runs", f"Origin: http://127.0.0.1:{living.port}")
    assert found.status == 200
    assert not [name for name in found.headers if name.startswith("access-control")]


def test_other_sites_may_navigate_but_not_read(living):
    assert living.get("/api/runs", "Sec-Fetch-Site: cross-site").status == 403
    navigation = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert living.get("/", *navigation).status in (200, 404)


def test_every_response_has_the_policy_also_an_error(living, locked):
    answers = [
        living.get("/api/runs"), living.get("/api/none"), living.get("/none"),
        living.get("/", method="POST"), locked.get("/api/runs"),
        living.raw("GET / HTTP/1.1", "Host: evil.example"),
    ]  # fmt: skip
    for found in answers:
        policy = found.headers["content-security-policy"]
        assert policy.startswith(STRICT)
        assert "unsafe" not in policy
        assert found.headers["x-content-type-options"] == "nosniff"
        assert found.headers["referrer-policy"] == "no-referrer"


def test_a_body_is_refused(living):
    assert living.get("/api/runs", "Content-Length: 5").status == 413
    assert living.get("/api/runs", "Transfer-Encoding: chunked").status == 413


def test_no_file_outside_of_the_page_is_sent(living):
    for path in (
        "/page/../server.py", "/page/%2e%2e/server.py", "/page/..%2fserver.py",
        "/page//etc/passwd", "/page/%00", "/../../etc/passwd",
    ):  # fmt: skip
        found = living.get(path)
        assert found.status in (400, 404), path
        assert b"root:" not in found.body


def test_without_the_token_nothing_is_sent(locked):
    for path in ("/", "/api/runs", "/api/events", "/page/app.js"):
        assert locked.get(path).status == 401
    assert locked.get("/?token=wrong").status == 401
    assert locked.get("/api/runs", "Authorization: Bearer wrong").status == 401
    assert locked.get("/api/runs", "Cookie: rollstream_explorer=" + TOKEN).status == 401


def test_the_printed_url_exchanges_the_token_for_a_cookie(locked):
    found = locked.get(f"/?token={TOKEN}")
    assert (found.status, found.headers["location"]) == (303, "/")
    cookie = found.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert TOKEN not in cookie
    given = cookie.partition(";")[0]
    assert locked.get("/api/runs", f"Cookie: other=1; {given}").status == 200


def test_health_needs_no_token_and_shows_nothing(locked):
    found = locked.get("/health")
    assert (found.status, found.body) == (200, b"ok\n")


def test_a_further_host_is_served_only_if_it_is_allowed(asked_folders):
    with serving([str(asked_folders["living"])], allowed=("runs.example:80",)) as server:
        assert server.raw("GET /api/runs HTTP/1.1", "Host: runs.example:80").status == 200
        assert server.raw("GET /api/runs HTTP/1.1", "Host: other.example:80").status == 403


def test_no_secret_of_the_configuration_is_shown(asked_folders, tmp_path):
    import shutil

    folder = tmp_path / "secretive"
    shutil.copytree(asked_folders["archived"], folder)
    values = json.loads((folder / "config.json").read_text())
    secret = "s3cr3t-v4lue"
    values["bus"] = f"kafka://user:{secret}@broker:9092/run?password={secret}"
    values["store"] = "file:store"
    values["task"] = {"options": {"api_key": secret, "nested": {"token": secret}}}
    (folder / "config.json").write_text(json.dumps(values))
    with serving([str(folder)], wait=False) as server:
        for path in ("runs", "r/0/settings", "r/0/sheet", "compare"):
            assert secret.encode() not in server.get(f"/api/{path}").body, path


def test_code_that_a_configuration_names_is_not_imported(tmp_path, monkeypatch):
    """A colleague's archive may name any module of this machine as its advantage."""
    import shutil

    folder = tmp_path / "archive"
    shutil.copytree(EXAMPLE, folder)
    (tmp_path / "planted_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    values = json.loads((folder / "config.json").read_text())
    values["trainer"] |= {"advantage": "planted_module:f", "choose": "planted_module:f"}
    (folder / "config.json").write_text(json.dumps(values))
    with serving([str(folder)]) as server:
        found = server.json("r/0/groups/0")
        assert {sample["advantage"] for sample in found["samples"]} == {None}
        assert found["samples"][0]["answer"]
        server.json("r/0/audit")
        server.explorer.verdicts[server.explorer.runs[0].number].wait(600.0)
        assert server.json("r/0/audit")["state"] == "done"
        assert server.json("compare/steps/5")["trajectories"]
    assert "planted_module" not in sys.modules


def test_a_token_must_be_long_and_is_never_in_an_error(tmp_path):
    file = tmp_path / "token"
    file.write_text("short-one\n")
    with pytest.raises(ConfigurationError) as caught:
        security.read_token(str(file))
    assert "short-one" not in str(caught.value)
    assert security.read_token(None, {security.TOKEN_VARIABLE: TOKEN}) == TOKEN
    assert len(security.new_token()) >= 40


def test_only_loopback_needs_no_token():
    assert security.is_loopback("127.0.0.1")
    assert not security.is_loopback("0.0.0.0")
    assert not security.is_loopback("192.168.0.7")


def test_a_long_query_is_refused(living):
    assert living.get("/api/r/0/search?q=" + "a" * 9000).status in (400, 413)
    assert living.get("/api/r/0/search?q=" + "a" * 2000).status == 400


def test_event_streams_are_bounded_and_begin_with_the_present_state(living):
    line = ("GET /api/events HTTP/1.1", f"Host: 127.0.0.1:{living.port}")
    opened: list[socket.socket] = []
    managers = [living.connected(*line) for _ in range(CLIENTS_MAX)]
    try:
        for manager in managers:
            opened.append(manager.__enter__())
        for connection in opened:
            data = b""
            while b"event: index" not in data:
                data += connection.recv(65536)
            assert b"text/event-stream" in data
            assert b"event: change" in data
        assert living.get("/api/events").status == 429
    finally:
        for manager in managers:
            manager.__exit__(None, None, None)


def test_requests_beyond_the_bound_are_refused_and_later_served(living, monkeypatch):
    release = threading.Event()
    explorer = living.explorer
    answer = explorer.answer
    monkeypatch.setattr(explorer, "answer", lambda *a: (release.wait(60), answer(*a))[1])
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(living.get("/api/runs").status))
        for _ in range(24)
    ]
    for thread in threads:
        thread.start()
    from testbed.waiting import wait_for

    wait_for(lambda: len(statuses) >= 8)  # what the bound refuses is answered at once
    assert set(statuses) == {429}
    release.set()
    for thread in threads:
        thread.join()
    assert sorted(statuses) == [200] * 16 + [429] * 8


def test_garbage_is_refused(living):
    with socket.create_connection(("127.0.0.1", living.port), timeout=60) as connection:
        connection.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
        data = b""
        while part := connection.recv(4096):
            data += part
    assert parse_answer(data).status == 400
