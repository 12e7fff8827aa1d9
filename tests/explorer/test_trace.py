"""`rollstream trace --perfetto` writes a trace that the trace events' own rules hold for."""

import gzip
import json
import shutil
from collections import defaultdict
from contextlib import closing
from itertools import pairwise

from rollstream.look.explorer.answers.trace import write_trace
from rollstream.look.query.locate import locate_run
from rollstream.run.cli.main import main
from tests.analysis.asked_run import make_run, open_log
from tests.explorer.conftest import EXAMPLE


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_trace_has_every_trajectory_and_step_once(asked_folders, tmp_path):
    path = tmp_path / "trace.json.gz"
    count = write_trace(locate_run(str(asked_folders["living"])), path)
    events = read(path)
    assert len(events) == count
    slices = [event for event in events if event["ph"] == "X"]
    assert sorted(e["name"] for e in slices if e["cat"] == "remainder") == [
        "0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0",
    ]  # fmt: skip
    assert [e["name"] for e in slices if e["cat"] == "step"] == ["step 1", "step 2"]
    assert all(event["ts"] >= 0 and event["dur"] >= 0 for event in slices)


def test_slices_of_one_row_do_not_overlap(tmp_path):
    path = tmp_path / "trace.json.gz"
    assert main(["trace", str(EXAMPLE), "--perfetto", str(path)]) == 0
    rows = defaultdict(list)
    events = read(path)
    for event in events:
        if event["ph"] == "X" and event["cat"] not in ("step", "move"):
            rows[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert sum(map(len, rows.values())) == 1312
    for slices in rows.values():
        ordered = sorted(slices)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "trainer", 2: "rollout-0", 3: "rollout-1"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} <= tracks.keys()
    first = [name for (pid, _), name in tracks.items() if pid == 2][:3]
    assert first == ["moves", "row 1", "row 2"]
    assert len({tid for _, tid in tracks}) == len(tracks), "as threads of one machine"
    assert {0, *names}.isdisjoint(event["tid"] for event in events), "they mean others"
    assert min(event["ts"] for event in events if "ts" in event) == 0


def test_a_killed_run_is_traced_from_what_its_kill_left(tmp_path):
    made, killed = make_run(tmp_path / "made"), tmp_path / "killed"
    with closing(open_log(made)):  # a log that was never closed has its newest pages beside it
        shutil.copytree(made, killed)
    assert list((killed / "bus").glob("*-wal"))
    line = json.dumps({"time_s": 1_700_000_100.0, "event": "death", "role": "rollout-0"})
    (killed / "metrics" / "supervisor.jsonl").write_text(f'{line}\n{{"time_s": 17')
    path = tmp_path / "trace.json.gz"
    write_trace(locate_run(str(killed)), path)
    events = read(path)
    assert [e["name"] for e in events if e.get("cat") == "step"] == ["step 1", "step 2"]
    assert sum(e.get("cat") == "remainder" for e in events) == 7
    assert any("rollout-0" in e["name"] and e["ph"] == "i" for e in events)
