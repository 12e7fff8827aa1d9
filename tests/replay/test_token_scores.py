"""`replay --token-scores` on a real run: the torch engine's log-probabilities are the trainer's,
the entropy is that of a float64 computation, and the run itself stays unchanged.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from rollstream.errors import ConfigurationError
from rollstream.look.query.token_scores import (
    ScoredTrajectory,
    read_token_scores,
    text_hash,
    write_token_scores,
)
from rollstream.run.cli.main import main
from rollstream.storage.settings import LoraSettings
from rollstream.storage.starting_model.models import load_model
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.fetch import fetch_tensors
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import GENERATED, Trajectory
from rollstream.streams.values import Version
from tests.replay.test_replay_of_runs import contents
from tests.support.kept_run import made


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("run"))


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copied"))


def score(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    capsys.readouterr()
    assert main(["replay", str(folder), "--token-scores", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def finished(folder: Path) -> list[Trajectory]:
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    reader = TopicReader(bus, "trajectories", from_begin(bus, "trajectories"))
    found = [one.record for one in reader.read_to(bus.end("trajectories"))]
    bus.close()
    return [record for record in found if isinstance(record, Trajectory)]


def scores_of(folder: Path, record: Trajectory) -> ScoredTrajectory:
    found = read_token_scores(folder / "token-scores.parquet", record)
    assert found is not None
    return found


def in_float64(folder: Path, record: Trajectory, version: Version) -> tuple[np.ndarray, np.ndarray]:
    """The log-probability and entropy of the generated tokens, by transformers' own forward."""
    _, tensors = fetch_tensors(open_store(f"file:{folder / 'store'}"), version)
    model = load_model(str(folder / "model"))
    model.load_state_dict(tensors, strict=False)
    tokens = torch.from_numpy(record.tokens.astype(np.int64))
    with torch.no_grad():
        logits = model.double()(input_ids=tokens[None]).logits[0] / record.temperature
    every = torch.log_softmax(logits, -1)
    entropy = -(every.exp() * every).sum(-1)
    at = np.flatnonzero(record.sources == GENERATED)
    return every[at - 1, tokens[at]].numpy(), entropy[at - 1].numpy()


def test_trainer_and_engine_agree_and_the_run_is_unchanged(copied, capsys) -> None:
    before = contents(copied)
    found = score(copied, capsys)
    records = finished(copied)
    assert found["missing_versions"] == {}
    assert found["trajectories"] + found["refused"] == len(records)
    assert found["tokens"] == sum(len(r.logprobs) for r in records if r.finish != "dead")
    assert found["mismatch_tokens"] > 100
    assert 0 < found["mismatch_mean"] <= found["mismatch_max"] < 1e-4
    assert contents(copied) == before


def test_scores_are_those_of_float64_under_the_version_that_sampled(copied, capsys) -> None:
    score(copied, capsys)
    records = [r for r in finished(copied) if r.finish != "dead" and len(r.spans) == 1]
    versions = {record.spans[0].version: record for record in records}
    assert len(versions) >= 3, "the run must have versions that differ"
    for version, record in versions.items():
        logprobs, entropy = in_float64(copied, record, version)
        stored = scores_of(copied, record)
        assert np.abs(stored.logprobs - logprobs).max() < 1e-5
        assert np.abs(stored.entropy - entropy).max() < 1e-5
    one = next(iter(versions.values()))
    other = max(versions)
    wrong, _ = in_float64(copied, one, other)
    assert np.abs(scores_of(copied, one).logprobs - wrong).max() > 1e-4


def test_what_the_file_has_is_kept_and_not_computed_again(copied, capsys) -> None:
    records = [record for record in finished(copied) if record.finish != "dead"]
    first, second = records[0], records[-1]
    assert score(copied, capsys, "--where", f"trajectory={first.trajectory}")["trajectories"] == 1
    path = copied / "token-scores.parquet"
    held = path.read_bytes()
    assert score(copied, capsys, "--where", f"trajectory={first.trajectory}")["before"] == 1
    assert path.read_bytes() == held
    assert read_token_scores(path, second) is None
    step = score(copied, capsys, "--where", "step=2")
    assert step["trajectories"] > 1
    rest = score(copied, capsys)
    assert rest["before"] >= step["trajectories"]
    assert all(read_token_scores(path, record) is not None for record in records)


def test_versions_that_are_gone_are_counted_and_leave_gaps(copied, capsys) -> None:
    records = [record for record in finished(copied) if record.finish != "dead"]
    newest = max(span.version for record in records for span in record.spans)
    shutil.rmtree(copied / "store" / "weights" / str(newest))
    found = score(copied, capsys)
    lost = {
        record.trajectory: span
        for record in records
        for span in record.spans
        if span.version == newest
    }
    assert found["missing_versions"] == {
        str(newest): sum(span.end - span.start for span in lost.values())
    }
    for record in records:
        is_lost = np.isnan(scores_of(copied, record).entropy)
        span = lost.get(record.trajectory)
        assert is_lost.sum() == (0 if span is None else span.end - span.start)


def test_without_any_version_the_command_fails_and_says_why(copied, capsys) -> None:
    shutil.rmtree(copied / "store" / "weights")
    assert main(["replay", str(copied), "--token-scores"]) == 1
    assert "the store keeps none of the versions" in capsys.readouterr().err


def test_an_adapter_is_scored_over_its_base(tmp_path, capsys) -> None:
    folder = made(tmp_path, lora=LoraSettings(rank=2, alpha=4))
    assert 0 < score(folder, capsys)["mismatch_max"] < 1e-4


def test_a_failure_leaves_the_file_and_another_format_is_refused(tmp_path, run) -> None:
    record = finished(run)[0]
    path = tmp_path / "token-scores.parquet"
    values = np.zeros(len(record.logprobs), np.float32)
    row = ScoredTrajectory(record.trajectory, record.group, text_hash(record), values, values)
    write_token_scores(path, [row])

    def failing():
        yield ScoredTrajectory("other", 0, "", values, values)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_token_scores(path, failing())
    assert read_token_scores(path, record) is not None
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigurationError, match="delete it"):
        read_token_scores(path, record)


def test_scores_never_appear_beside_another_text(tmp_path, run) -> None:
    one, other = finished(run)[:2]
    path = tmp_path / "token-scores.parquet"
    values = np.zeros(len(one.logprobs), np.float32)
    write_token_scores(
        path, [ScoredTrajectory(other.trajectory, other.group, text_hash(one), values, values)]
    )
    assert read_token_scores(path, other) is None


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--where", "trajectory=none"), "no such finished trajectory"),
        (("--out", "x"), "--out has no meaning with --token-scores"),
    ],
)
def test_a_wrong_request_is_refused(run, capsys, words, reason) -> None:
    assert main(["replay", str(run), "--token-scores", *words]) == 2
    assert reason in capsys.readouterr().err
