"""`rollstream checkpoints`: the stored checkpoints, on a real store."""

import json
from pathlib import Path

import pytest
import torch

from rollstream.consumers.trainer.checkpoint import CheckpointGroup, TrainerState
from rollstream.run.cli.main import main
from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.checkpoints import write_checkpoint
from rollstream.streams.records import Fence, Position
from rollstream.streams.values import Address

TENSORS = {"masters.a": torch.ones(3, 5), "optimiser.counters": torch.tensor([4, 4])}


def state(step: int) -> TrainerState:
    at = {"0": Position(7, Fence(2, 5)), "1": Position(9)}
    group = CheckpointGroup(Address(0, 3), (Address(1, 2), Address(1, 4)), ())
    ledger = Position(40 + step, Fence(2, 30))
    return TrainerState(step, step, ledger, {"trajectories": at}, (group,), {"late": 2}, "hash")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two whole checkpoints and an incomplete one."""
    store = FileStore(tmp_path / "run" / "store")
    for step, term in ((10, 1), (20, 2)):
        write_checkpoint(store, step, term, TENSORS, state(step).encode())
    store.put("checkpoints/s00000030-t0002/state-00001-of-00001.safetensors", b"half")
    (tmp_path / "run" / "config.json").write_text("{}")
    return tmp_path / "run"


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_list_marks_whole_and_unfinished_checkpoints(run: Path, capsys):
    assert main(["checkpoints", "list", str(run), "--json"]) == 0
    found = lines(capsys)
    assert [(one["step"], one["state"]) for one in found] == [
        (10, "whole"),
        (20, "whole"),
        (30, "unfinished"),
    ]
    assert found[0]["open_groups"] == 1
    assert found[0]["bytes"] > 3 * 5 * 4
    assert main(["checkpoints", "list", str(run)]) == 0
    assert "s00000030-t0002\tunfinished" in capsys.readouterr().out


def test_a_damaged_one_is_named_and_shown_by_the_exit_code(run: Path, capsys):
    (run / "store" / "checkpoints" / "s00000010-t0001" / "state.json").write_text("{}")
    assert main(["checkpoints", "list", str(run), "--json"]) == 1
    reported = capsys.readouterr()
    assert '"damaged"' in reported.out.splitlines()[0]
    assert "s00000010-t0001/state.json differs" in reported.err


def test_show_prints_positions_groups_and_files(run: Path, capsys):
    assert main(["checkpoints", "show", "latest", str(run), "--json"]) == 0
    (found,) = lines(capsys)
    assert found["checkpoint"] == "s00000020-t0002"
    assert found["positions"]["trajectories"]["0"] == {"offset": 7, "term": 2, "next": 5}
    assert found["positions"]["ledger"]["0"]["offset"] == 60
    assert found["groups"] == [{"admitted": 3, "arrived": 2, "annotations": 0}]
    assert found["counts"] == {"late": 2}
    for name in ("10", "s00000010-t0001"):
        assert main(["checkpoints", "show", name, str(run)]) == 0
        assert "s00000010-t0001" in capsys.readouterr().out


def test_a_missing_checkpoint_is_reported(run: Path, tmp_path: Path, capsys):
    assert main(["checkpoints", "show", "30", str(run)]) == 1
    assert "kept are: s00000010-t0001, s00000020-t0002" in capsys.readouterr().err
    assert main(["checkpoints", "show", "soon", str(run)]) == 2
    assert "is not a checkpoint" in capsys.readouterr().err
    (tmp_path / "empty" / "store" / "weights").mkdir(parents=True)
    assert main(["checkpoints", "list", str(tmp_path / "empty")]) == 1
    assert "no checkpoint is kept" in capsys.readouterr().err
