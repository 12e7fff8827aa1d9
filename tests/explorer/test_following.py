"""The explorer follows a living run: new records appear, and pages are told."""

import json
import re

from msgspec.structs import replace

from rollstream.look.explorer.explored_run import pause_s
from rollstream.run.cli.main import main
from rollstream.streams.topics import catalogue
from testbed.explorer_server import ServedRuns, serving
from testbed.waiting import wait_for
from tests.analysis import asked_run


def half_a_run(folder):
    """Writes the run up to step 1; returns its open log."""
    asked_run.make_run(folder)
    for path in (folder / "bus").glob("*"):
        path.unlink()
    bus = asked_run.open_log(folder)
    bus.create(catalogue(2))
    asked_run.publish_first(bus)
    return bus


def test_new_steps_and_trajectories_appear_and_pages_are_told(tmp_path):
    bus = half_a_run(tmp_path / "run")
    with serving([str(tmp_path / "run")]) as server:
        line = ("GET /api/events HTTP/1.1", f"Host: 127.0.0.1:{server.port}")
        with server.connected(*line) as connection:
            data = b""
            while b"event: index" not in data:
                data += connection.recv(65536)
            assert server.json("r/0/steps")["total"] == 1
            asked_run.publish_rest(bus)
            while b'"step":2' not in data:
                data += connection.recv(65536)
        assert server.json("r/0/steps")["total"] == 2
        assert server.json("r/0/groups/2")["group"]["ended"] == "filtered"
        event = data.partition(b"event: change\ndata: ")[2].partition(b"\n")[0]
        assert json.loads(event)["run"] == "0"
    bus.close()


def test_a_late_reward_reaches_a_trajectory_that_was_read_before(tmp_path):
    bus = half_a_run(tmp_path / "run")
    with serving([str(tmp_path / "run")]) as server:
        assert server.json("r/0/search?step=1&order=reward")["rows"][0]["reward"] == 0.0
        asked_run.publish(bus, "annotations", "0", asked_run.note("0.1", "reward", [0.25]))

        def reward():
            return server.json("r/0/search?step=1&order=reward")["rows"][0]["reward"]

        wait_for(lambda: reward() == 0.25)
    bus.close()


def curves(server: ServedRuns) -> list[str]:
    """The curves of the sheet, each by its name and steps."""
    text = json.dumps(server.json("r/0/sheet"))
    return [
        " ".join(found) for found in re.findall(r'"data-name": "(.*?)", "data-x": "(.*?)"', text)
    ]


def test_an_archive_without_its_log_is_followed(tmp_path):
    writing, seen = tmp_path / "run", tmp_path / "seen"
    bus = half_a_run(writing)
    asked_run.archive(writing)
    seen.mkdir()
    (seen / "store").symlink_to(writing / "store")
    assert main(["trust", str(seen), "--folder", str(writing / "store")]) == 0
    with serving([str(seen)]) as server:
        assert server.json("r/0/steps")["total"] == 1
        assert "mean reward 1" in curves(server)
        asked_run.publish_rest(bus)
        asked_run.archive(writing)
        wait_for(lambda: server.json("r/0/steps")["total"] == 2)
        with serving([str(seen)]) as opened_later:
            assert curves(server) == curves(opened_later)
            assert "mean reward 1 2" in curves(server)
            for path in ("steps", "groups", "search?step=2", "trajectories/1.0"):
                followed, whole = (one.json(f"r/0/{path}") for one in (server, opened_later))
                assert followed | {"seconds": 0} == whole | {"seconds": 0}, path
    bus.close()


def test_a_trajectory_that_still_runs_has_the_text_of_its_partials(tmp_path):
    folder = tmp_path / "run"
    asked_run.make_run(folder)
    for path in (folder / "bus").glob("*"):
        path.unlink()
    bus = asked_run.open_log(folder)
    bus.create(catalogue(2))
    dispatch = asked_run.FencedWriter(bus, "admissions", "dispatch", 1)
    dispatch.open()
    dispatch.append([("0", asked_run.admitted(0))])
    assignments = asked_run.FencedWriter(bus, "assignments", "dispatch", 1)
    assignments.open()
    assignments.append([("0.0", asked_run.order("start"), 1)])
    asked_run.publish(bus, "partials", "0.0", replace(asked_run.partial(), start=1))
    with serving([str(folder)]) as server:
        found = server.json("r/0/trajectories/0.0")
        assert (found["running"], found["row"], found["total"]) == (True, None, 4)
        assert "".join(found["tokens"]["piece"]).endswith(asked_run.ANSWER[:3])
        assert [one["kind"] for one in found["chain"]] == ["assignment", "partial"]
        assert found["chain_complete"] is True
        empty = server.json("r/0/trajectories/0.1")
        assert (empty["running"], empty["total"]) == (True, 0)
    bus.close()


def test_reads_that_cost_more_are_further_apart():
    """At most 1.5 % of a core, between one and ten seconds apart."""
    assert [pause_s(used) for used in (0.0, 0.01, 0.06, 3.0)] == [1.0, 1.0, 4.0, 10.0]
