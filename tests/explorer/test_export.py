"""A static export holds every answer of the run under its canonical key, and stands alone."""

import json

import pyarrow.parquet as pq
import pytest

from rollstream.errors import ConfigurationError
from rollstream.look.explorer.assets import SOURCE_META
from rollstream.look.explorer.serving.export import export
from rollstream.look.query.locate import locate_run


@pytest.fixture(scope="module")
def exported(asked_folders, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    export([locate_run(str(asked_folders["archived"]))], folder, lambda text: None)
    return folder


def answers(folder):
    table = pq.read_table(folder / "data" / "responses.parquet")
    return dict(zip(table["key"].to_pylist(), table["body"].to_pylist(), strict=True))


def test_answers_are_those_of_the_server(exported, asked_folders):
    from testbed.explorer_server import serving

    found = answers(exported)
    assert json.loads(found["runs"])["static"] is True
    with serving([str(asked_folders["archived"])]) as server:
        for key in (
            "r/0/steps/2", "r/0/groups/1", "r/0/trajectories/1.0", "r/0/groups", "r/0/map/lag",
            "r/0/steps", "r/0/settings",
        ):  # fmt: skip
            assert json.loads(found[key]) == server.json(key), key


def test_every_trajectory_group_and_step_is_there(exported):
    found = answers(exported)
    for name in ("0.0", "0.1", "1.0", "1.1", "2.0", "2.1", "3.0", "3.1"):
        assert f"r/0/trajectories/{name}" in found
    assert {f"r/0/groups/{group}" for group in range(4)} <= found.keys()
    assert {"r/0/steps/1", "r/0/steps/2"} <= found.keys()
    assert [key for key in found if key.startswith("r/0/lanes?i=")]
    assert json.loads(found["r/0/audit"])["state"] == "done"


def test_keys_are_sorted_and_each_row_group_states_its_range(exported):
    file = pq.ParquetFile(exported / "data" / "responses.parquet")
    keys = file.read()["key"].to_pylist()
    assert keys == sorted(keys, key=str.encode)
    start = 0
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        statistics = group.column(0).statistics
        assert (statistics.min, statistics.max) == (keys[start], keys[start + group.num_rows - 1])
        start += group.num_rows


def test_the_table_of_trajectories_has_rows_with_texts(exported):
    line = json.loads((exported / "data" / "static.json").read_text())
    table = pq.read_table(exported / "data" / line["trajectories"]["0"])
    rows = {row["trajectory"]: row for row in table.to_pylist()}
    assert len(rows) == 7
    assert "531=531" in rows["1.0"]["answer"]
    assert "118%83" in rows["1.0"]["prompt"]
    assert (rows["1.0"]["reward"], rows["1.0"]["step"]) == (0.5, 2)


def test_the_page_reads_files_and_names_no_other_host(exported):
    page = (exported / "index.html").read_text()
    assert SOURCE_META not in page
    assert 'content="static"' in page
    assert "http://" not in page
    assert "https://" not in page


def test_a_folder_with_other_files_is_refused(asked_folders, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="not empty"):
        export([locate_run(str(asked_folders["archived"]))], tmp_path, lambda text: None)
    assert (tmp_path / "mine.txt").read_text() == "mine"
