"""Entropy and mismatch in the answer about a trajectory: from the file beside the run, or the way
to get them.
"""

import shutil
from contextlib import closing

import numpy as np
import pytest

from rollstream.look.query.token_scores import ScoredTrajectory, text_hash, write_token_scores
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Trajectory
from testbed.explorer_server import serving
from tests.analysis.asked_run import make_run, open_log


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "asked")


def record_of(folder, name: str) -> Trajectory:
    with closing(open_log(folder)) as bus:
        reader = TopicReader(bus, "trajectories", from_begin(bus, "trajectories"))
        found = [one.record for one in reader.read_to(bus.end("trajectories"))]
    return next(r for r in found if isinstance(r, Trajectory) and r.trajectory == name)


def write_scores(folder, name: str, lost: int = 0) -> None:
    """Entropies 0, .1, .2 …; the trainer is .001 above the rollout; the first `lost` are gone."""
    record = record_of(folder, name)
    logprobs = (record.logprobs + 0.001).astype(np.float32)
    entropy = (np.arange(len(logprobs)) / 10).astype(np.float32)
    logprobs[:lost] = entropy[:lost] = np.nan
    row = ScoredTrajectory(name, record.group, text_hash(record), logprobs, entropy)
    write_token_scores(folder / "token-scores.parquet", [row])


def test_the_command_is_named_until_the_file_is_there(folder) -> None:
    (folder / "store" / "weights").mkdir()
    with serving([str(folder)]) as server:
        found = server.json("r/0/trajectories/1.0")
        assert found["tokens"]["entropy"] is found["tokens"]["mismatch"] is None
        assert found["missing"]["command"] == (
            "rollstream replay asked --token-scores --where trajectory=1.0"
        )
        write_scores(folder, "1.0")
        found = server.json("r/0/trajectories/1.0")
    assert found["missing"] is None
    assert found["tokens"]["entropy"] == [None] * 7 + [round(n / 10, 5) for n in range(9)]
    assert found["tokens"]["mismatch"][:7] == [None] * 7
    assert found["tokens"]["mismatch"][7:] == pytest.approx([0.001] * 9, abs=1e-6)


def test_no_command_is_named_for_a_run_without_weights(living) -> None:
    missing = living.json("r/0/trajectories/1.0")["missing"]
    assert missing["command"] == ""
    assert missing["note"].endswith("the run has no weights.")


def test_tokens_of_versions_that_are_gone_are_counted(folder) -> None:
    write_scores(folder, "1.0", lost=2)
    with serving([str(folder)]) as server:
        found = server.json("r/0/trajectories/1.0")
        assert found["tokens"]["entropy"][7:10] == [None, None, 0.2]
        assert found["missing"]["note"].startswith("2 tokens have no entropy")
        assert "(v0)" in found["missing"]["note"]
        assert server.json("r/0/trajectories/3.1")["missing"]["command"] == ""
        assert "failed" in server.json("r/0/trajectories/3.0")["missing"]["note"]


def test_a_file_that_cannot_be_read_is_named_and_hides_nothing_else(folder) -> None:
    (folder / "token-scores.parquet").write_bytes(b"PAR1 no parquet PAR1")
    with serving([str(folder)]) as server:
        found = server.json("r/0/trajectories/1.0")
    assert "token-scores.parquet cannot be read" in found["missing"]["note"]
    assert found["tokens"]["logprob"][8] is not None


def test_an_archive_shows_the_scores_of_its_folder(folder, asked_folders, tmp_path) -> None:
    write_scores(folder, "1.0")
    archived = shutil.copytree(asked_folders["archived"], tmp_path / "archived")
    shutil.copy(folder / "token-scores.parquet", archived)
    with serving([str(archived)]) as server:
        assert server.json("r/0/trajectories/1.0")["tokens"]["entropy"][8] == 0.1
