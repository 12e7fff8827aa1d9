"""Each route answers for a run whose every count is known, from its log and from its archive."""

import math
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from rollstream.look.explorer.answers.sheet import RunSheets
from rollstream.look.explorer.answers.weights import StoredWeights
from rollstream.look.explorer.explored_run import CORE_SHARE, ExploredRun
from rollstream.look.query.locate import locate_run
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.named_streams import WeightStream
from testbed.explorer_server import serving
from testbed.memory import MemoryBus
from testbed.versions import publish_small
from testbed.waiting import wait_for
from tests.analysis.asked_run import RUN, make_run


def test_runs_are_named_with_their_state(asked):
    (run,) = asked.json("runs")["runs"]
    assert (run["name"], run["step"], run["has_text"]) == ("asked", 2, True)
    assert run["index"] == {"trajectories": run["index"]["total"], "total": 9, "complete": True}


def figures(node: Any) -> list[tuple[str, str]]:
    """The figures that a part of a page shows, each with its text."""
    if isinstance(node, str):
        return []
    own = node[1].get("data-figure")
    return [(own, text(node))] if own else [pair for child in node[2] for pair in figures(child)]


def text(node: Any) -> str:
    return node if isinstance(node, str) else "".join(map(text, node[2]))


def test_the_sheet_counts_how_groups_ended(asked):
    parts = asked.json("r/0/sheet")["parts"]
    (card,) = (part for part in parts if part[1].get("aria-label", "").startswith("Every admitted"))
    counts = {"admitted": 4, "trained": 2, "filtered": 1, "expired": 0, "dead": 0, "open": 1}
    shown = dict(figures(card))
    assert {name: int(shown[f"run.groups_{name}"]) for name in counts} == counts
    assert (shown["run.trajectories_dead"], shown["run.trajectories_stop"]) == ("1", "6")
    assert "filtered: all rewards are 11" in text(card), "once"


def drawn(node: Any) -> list[dict[str, str]]:
    """The attributes of every curve in a part of a page."""
    if isinstance(node, str):
        return []
    own = [node[1]] if "data-x" in node[1] else []
    return own + [found for child in node[2] for found in drawn(child)]


def test_the_sheet_has_the_curves_of_the_report_and_can_be_narrowed(asked):
    found = asked.json("r/0/sheet")
    assert found["parts"][0][0] == "header"
    curves = [curve for part in found["parts"] for curve in drawn(part)]
    (reward,) = (curve for curve in curves if curve["data-name"] == "mean reward")
    assert reward["data-x"] == "1 2"
    narrow = asked.json("r/0/sheet?steps=2-9")["parts"]
    curves = [curve for part in narrow for curve in drawn(part)]
    assert "2" in {curve["data-x"] for curve in curves}
    assert "1 2" not in {curve["data-x"] for curve in curves}
    assert narrow[1] == found["parts"][1], "tiles are of the whole run"
    assert asked.get("/api/r/0/sheet?steps=two").status == 400


def test_what_takes_queries_and_other_metrics_are_parts_of_their_own(asked):
    assert asked.get("/api/r/0/metrics/mislaid").status == 404
    for name in asked.json("r/0/sheet")["metrics"][:1]:
        (part,) = asked.json(f"r/0/metrics/{quote(name, safe='')}")["parts"]
        assert [curve["data-name"] for curve in drawn(part)] == [name]
    bias, *_ = (part for part in asked.json("r/0/learned")["parts"] if part[0] == "section")
    assert bias[1]["aria-label"] == "Length and difficulty of what is trained"


def test_several_runs_are_lines_of_the_same_curves(asked_folders):
    with serving([str(folder) for folder in asked_folders.values()]) as server:
        parts = server.json("compare/sheet?runs=1,0")["parts"]
    names = [curve["data-name"] for part in parts for curve in drawn(part)]
    assert len(set(names)) == 2
    assert names.count(names[0]) == names.count(names[1])


def test_the_sheet_of_a_living_run_is_renewed_no_sooner_than_its_cost_permits(asked_folders):
    times_s = iter([0.0, 1.0, 50.0, 70.0, 70.0])
    location = locate_run(str(asked_folders["living"]))
    with ExploredRun(0, location, lambda *event: None, time.time) as run:
        wait_for(lambda: run.index.progress.complete and run.snapshot is not None)
        run.phase = lambda: "training"
        sheets = RunSheets(run, lambda: next(times_s))
        first = sheets.show({})
        kept = sheets.show({})
        assert kept["parts"] is first["parts"]
        assert kept["again_s"] == pytest.approx(1.0 / CORE_SHARE - 50.0)
        assert sheets.show({})["parts"] is not first["parts"]


def test_a_step_shows_its_takes_groups_and_what_it_dropped(asked):
    found = asked.json("r/0/steps/2")
    (take,) = found["takes"]
    assert [member["trajectory"] for member in take["members"]] == ["1.0", "1.1"]
    assert all(member["row"]["step"] == 2 for member in take["members"])
    assert [group["group"] for group in found["groups"]] == [1]
    assert [(one["group"], one["reason"]) for one in found["dropped"]] == [(2, "filtered")]
    assert found["previous"] == 1
    assert found["next"] is None
    assert found["step"]["state_hash"]


def test_steps_come_newest_first_and_page(asked):
    first = asked.json("r/0/steps?limit=1")
    assert [step["step"] for step in first["steps"]] == [2]
    rest = asked.json(f"r/0/steps?limit=1&cursor={first['next']}")
    assert [step["step"] for step in rest["steps"]] == [1]


def test_a_group_shows_its_samples_side_by_side(asked):
    found = asked.json("r/0/groups/0")
    assert [sample["trajectory"] for sample in found["samples"]] == ["0.0", "0.1"]
    assert [sample["row"]["reward"] for sample in found["samples"]] == [1.0, 0.0]
    assert "531=531" in found["samples"][0]["answer"]
    assert "118%83" in found["prompt"]
    assert [take["step"] for take in found["takes"]] == [1]


def test_an_open_group_lists_samples_that_still_run(asked):
    found = asked.json("r/0/groups/3")
    assert found["group"]["ended"] == "open"
    assert [sample["row"] is None for sample in found["samples"]] == [False, True]


def test_groups_are_filtered_by_their_end(asked):
    assert [g["group"] for g in asked.json("r/0/groups?ended=filtered")["groups"]] == [2]
    assert [g["group"] for g in asked.json("r/0/groups?ended=open")["groups"]] == [3]
    assert asked.json("r/0/groups")["total"] == 4


def test_an_episode_shows_the_times_of_its_turns(asked):
    first, answer = asked.json("r/0/trajectories/2.0")["turns"]
    assert (first["kind"], first["wait_s"], first["seconds"]) == ("prompt", 0.5, None)
    assert (answer["kind"], answer["wait_s"], answer["seconds"]) == ("generated", None, 1.5)
    assert (answer["depth"], answer["fork"]) == (0, "")


def test_a_trajectory_shows_text_version_and_lag_of_each_token(asked):
    found = asked.json("r/0/trajectories/1.0")
    tokens = found["tokens"]
    assert "".join(tokens["piece"]).replace("<bos>", "").startswith("118%83>531=531")
    assert tokens["version"] == [None] * 7 + [0] * 2 + [1] * 7
    assert tokens["lag"] == [None] * 7 + [1] * 2 + [0] * 7
    assert len(tokens["logprob"]) == found["total"] == 16
    assert [turn["kind"] for turn in found["turns"]] == ["prompt", "generated"]
    assert [(v["version"], v["start"], v["end"]) for v in found["versions"]] == [
        (0, 7, 9), (1, 9, 16),
    ]  # fmt: skip
    assert found["row"]["reward"] == 0.5  # of the scorer's first valid annotation
    assert found["annotations"][0]["name"] == "reward"
    assert any(one["kind"] == "take" and one["step"] == 2 for one in found["chain"])
    assert found["neighbours"] == {"previous": "0.1", "next": "1.1"}


def test_accepted_draft_tokens_are_marked(asked):
    tokens = asked.json("r/0/trajectories/1.0")["tokens"]
    assert sum(flag or 0 for flag in tokens["accepted"]) == 6


def test_a_page_of_tokens_is_cut_where_it_was_asked(asked):
    found = asked.json("r/0/trajectories/1.0?from=5&limit=4")
    assert (found["from"], found["cut"], len(found["tokens"]["id"])) == (5, True, 4)
    assert found["tokens"]["version"] == [None, None, 0, 0]


def test_a_chain_shows_partials_while_the_log_has_them(living):
    found = living.json("r/0/trajectories/0.0")
    kinds = [one["kind"] for one in found["chain"]]
    assert kinds == ["partial", "completion", "take"]
    assert found["chain_complete"] is True


def test_lanes_show_trajectories_in_a_tile_of_their_time(asked):
    first, last = asked.json("runs")["runs"][0]["span"]
    z = math.ceil(math.log2(max(last - first, 1)))
    tiles = {math.floor(first / 2**z), math.floor(last / 2**z)}
    found = [asked.json(f"r/0/lanes?i={tile}&z={z}") for tile in tiles]
    shown = {item[5] for tile in found for item in tile["items"]}
    assert {"0.0", "0.1", "1.0", "1.1", "2.0", "2.1"} <= shown
    assert all(tile["detail"] == "items" for tile in found)


def test_maps_count_every_scored_trajectory(asked):
    for kind in ("lag", "length"):
        found = asked.json(f"r/0/map/{kind}")
        assert found["total"] == sum(cell[2] for cell in found["cells"])
        assert len(found["points"]["trajectory"]) == found["total"]
    assert asked.json("r/0/map/lag")["total"] == 6


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("reward_min=1", {"0.0", "2.0", "2.1"}),
        ("group=1&order=reward", {"1.0", "1.1"}),
        ("finish=dead", {"3.0"}),
        ("step=1", {"0.0", "0.1"}),
        ("name=1.", {"1.0", "1.1"}),
        ("ended=filtered", {"2.0", "2.1"}),
        ("group_reward_min=0.6&group_reward_max=0.7", {"1.0", "1.1"}),
        ("q=531%3D&group=0", {"0.0", "0.1"}),
        (f"mode=re&q={quote('53[0-9]=5')}&group=2", {"2.0", "2.1"}),
        ("q=118&in=prompt&group=0", {"0.0", "0.1"}),
        ("q=nothing+has+this", set()),
    ],
)
def test_search_finds_by_fields_and_text(asked, query, names):
    found = asked.json(f"r/0/search?{query}")
    assert {row["trajectory"] for row in found["rows"]} == names
    assert found["complete"]


def test_search_pages_without_gap_or_repeat(asked):
    seen, cursor, matched = [], "", 0
    while cursor is not None:
        found = asked.json(f"r/0/search?limit=2&order=tokens&cursor={quote(cursor)}")
        seen += [row["trajectory"] for row in found["rows"]]
        cursor, matched = found["next"], found["matched"]
    assert len(seen) == len(set(seen)) == matched == 7


def test_a_record_names_what_it_links(asked):
    takes = asked.json("r/0/groups/1")["takes"]
    place = f"{takes[0]['partition']}/{takes[0]['offset']}"
    found = asked.json(f"r/0/records/ledger/{place}")
    assert found["schema"] == "take/1"
    assert {"text": "trajectory 1.0", "to": "trajectories/1.0"} in found["links"]


def test_what_does_not_exist_is_a_404_that_names_it(asked):
    for path in ("r/0/groups/77", "r/0/trajectories/x", "r/0/steps/9", "r/7/sheet", "other"):
        found = asked.get(f"/api/{path}")
        assert found.status == 404, path
        assert found.json()["error"]["message"]


def test_wrong_parameters_are_refused_with_a_sentence(asked):
    for path in (
        "r/0/search?reward_min=high", "r/0/search?order=random", "r/0/lanes?z=99&i=0",
        "r/0/lanes", "r/0/search?q=a&mode=sql", "r/0/search?mode=re&q=(", "r/0/steps?limit=a",
        "r/0/groups?ended=foo", "r/0/groups?limit=-5", "r/0/steps?limit=0", "r/0/search?in=foo",
    ):  # fmt: skip
        found = asked.get(f"/api/{path}")
        assert found.status == 400, (path, found)
        assert found.json()["error"]["message"]


def test_the_audit_runs_once_and_ends_with_a_verdict(living):
    living.json("r/0/audit")
    run = living.explorer.runs[0]
    living.explorer.verdicts[run.number].wait(600.0)
    found = living.json("r/0/audit")
    assert found["state"] == "done"
    assert {one["invariant"] for one in found["invariants"]} >= {1, 2, 7}


def test_two_runs_are_compared_by_settings_and_states(asked_folders):
    from testbed.explorer_server import serving

    named = [str(asked_folders["living"]), str(asked_folders["archived"])]
    with serving(named) as server:
        found = server.json("compare")
        assert found["common_steps"] == [1, 2]
        assert found["first_difference"] is None
        step = server.json("compare/steps/1?runs=0,1")
        assert step["same_state"] is True
        assert step["same_members"] is True
        assert [one["trajectory"] for one in step["trajectories"]] == ["0.0", "0.1"]


def test_the_example_archive_has_advantages_by_the_trainers_function(example):
    (group,) = example.json("r/0/groups?limit=1&ended=trained")["groups"]
    found = example.json(f"r/0/groups/{group['group']}")
    values = [sample["advantage"] for sample in found["samples"]]
    assert None not in values
    assert abs(sum(values)) < 1e-6
    tokens = example.json(f"r/0/trajectories/{group['group']}.0")["tokens"]
    assert set(tokens["mask"]) == {None, 1}


def test_named_weight_streams_have_their_newest_version_each(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    store = FileStore(folder / "store")
    for name, numbers in (("draft", [0, 4]), ("critic", [2])):
        publish_small(MemoryBus(), store, RUN, WeightStream(name), numbers)
    stored = StoredWeights(locate_run(str(folder)))
    lines = stored.lines()
    assert stored.streams == [
        {"name": "critic", "latest": 2, "versions": 1},
        {"name": "draft", "latest": 4, "versions": 2},
    ]
    assert all("streams" not in line["name"] for line in lines)
