"""`kill -9` of a rollout whose engine writes arrays: real processes. The trajectories resume
elsewhere from their partials with every row, the trainer computes the engine's probabilities, and
archive, audit, replay and queries have them.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from rollstream.run.cli.main import main
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import store_url
from rollstream.storage.identity import read_identity
from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import GENERATED, Assignment, Trajectory
from rollstream.streams.token_arrays import arrays_of
from testbed.explorer_server import serving
from testbed.kills.aims import Aim, AimFolder
from testbed.run_process import random_model, read, tiny
from tests.support import masked_engine

STEPS = 4
MORE = [
    "rollouts.count=2", "rollouts.partial_tokens=4",
    f"trainer.steps={STEPS}", "archive.roll_s=0.5", "truncate=false",
]  # fmt: skip


def finish_with_a_kill(base: Path) -> Path:
    """A run under its supervisor, to its end; a rollout dies after its first partials."""
    folder, aims = base / "run", AimFolder(base / "aims")
    aims.aim(Aim("rollout-0", "append partials", "after"))
    with tiny(folder, random_model(base / "model"), MORE, aims) as run:
        run.module = masked_engine.MODULE
        run.start()
        run.wait_complete()
    assert all(aims.fired())
    return folder


@pytest.mark.slow
def test_a_killed_rollouts_arrays_are_resumed_row_by_row_and_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = finish_with_a_kill(tmp_path)
    records = [one for one in read(folder, "trajectories", Trajectory) if one.finish != "dead"]
    orders = [one for one in read(folder, "assignments", Assignment) if one.partial is not None]
    resumed = {(one.trajectory, one.attempt) for one in orders}
    assert resumed & {(one.trajectory, one.attempt) for one in records}
    for record in records:
        array = arrays_of(record).get("allowed", "uint8")
        assert array is not None
        generated = np.flatnonzero(record.sources == GENERATED)
        assert array.tokens.tolist() == generated.tolist()
        vocabulary = array.values.shape[1] * 8
        rows = masked_engine.allowed_tokens(generated, vocabulary)
        bits = np.unpackbits(array.values, axis=1, bitorder="little").astype(np.bool_)
        assert (bits[:, :-8] == rows[:, :-8]).all()
        assert record.needs == ("arrays/allowed",)
    # The trainer's probabilities at lag 0 are the engine's: only over the allowed tokens.
    gaps = [line["mismatch_max"] for line in read_metrics(folder / "metrics" / "trainer.jsonl")
            if line.get("mismatch_tokens")]  # fmt: skip
    assert gaps
    assert max(gaps) < 0.02
    store = open_store(store_url(load(folder / "config.json"), folder))
    identity = read_identity(store)
    assert identity is not None
    assert "arrays/allowed" in identity.needs
    assert main(["audit", str(folder)]) == 0
    assert main(["replay", str(folder), "--from-step", "0", "--out", str(tmp_path / "again")]) == 0
    capsys.readouterr()
    query = "SELECT count(*) AS n FROM trajectories WHERE list_contains(needs, 'arrays/allowed')"
    assert main(["query", str(folder), query, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["n"] == len(records)
    with serving([str(folder)]) as server:
        shown = server.json(f"r/0/trajectories/{records[0].trajectory}")
    assert len(shown["tokens"]["id"]) == len(records[0].tokens)
