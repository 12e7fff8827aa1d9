"""`make gpu-check` without a GPU, and its metrics from records; its whole dry run is among vLLM's
tests.
"""

import json
from pathlib import Path

import pytest

from rollstream.run.config.config import load
from studies.gpu_check.__main__ import PIECES, main
from studies.gpu_check.read import Seen
from studies.gpu_check.setup import DRY, TINY, configuration, make_model
from studies.gpu_check.whole_run import Check, report
from tests.support.planted_states import SAMPLES, done, finished


def test_without_a_gpu_one_sentence_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("There is no GPU here")
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("is_random", [True, False])
def test_its_configuration_is_coherent(tmp_path: Path, is_random: bool):
    model = make_model(TINY, tmp_path / "model")
    toml = tmp_path / "check.toml"
    toml.write_text(configuration(DRY, model, tmp_path, 0.4, is_random=is_random))
    c = load(toml, (), {})
    assert (c.rollouts.vllm.memory_share, c.trainer.compute) == (0.4, "bfloat16")
    assert c.task.name == ("numbered" if is_random else "dataset")


def test_its_lines_mark_unknown_values(tmp_path: Path):
    model = make_model(TINY, tmp_path / "model")
    check = Check(DRY, model, tmp_path, 0.4, is_random=False)
    answers = tuple(finished(0, index, 1.0) for index in range(SAMPLES))
    compared = {"mismatch_tokens": 50.0, "mismatch_kl": 2e-4, "mismatch_mean": 0.01}
    steps = tuple(done(step, None, None, **compared) for step in range(1, 5))
    lines = report(check, Seen(steps, answers, 900.0, 800.0, (0.5, 0.02, 0.04)), 1000.0)
    text = "\n".join(lines)
    assert "900 tokens/s (0.90 of bare vLLM) before" in text
    assert "MFU unknown" in text
    assert "30 ms (longest 40), 3 versions taken" in text
    assert "KL 2.00e-04, mean 1.00e-02 nats (200 tokens)" in text
    assert "reward        0.50 0.50 0.50 0.50" in text
    nothing = "\n".join(report(check, Seen((), answers, None, None, ()), None))
    assert "no update" in nothing
    assert "no token of lag 0" in nothing


OWN = [name for name, piece in PIECES.items() if not piece.package]


@pytest.mark.parametrize("name", OWN)
def test_each_piece_that_needs_no_other_package_runs_tiny(name: str, capsys):
    assert main(["--cpu-dry-run", "--only", name]) == 0
    text = "\n".join(json.loads(capsys.readouterr().out))
    wanted = {"repeat": "equal bits", "updates": "adapter: "}.get(name, "planned")
    assert wanted in text
    assert ("adapter of rank" in text) == (name == "train-1.5b-lora")


@pytest.mark.slow
def test_a_check_continues_with_the_pieces_that_are_missing(tmp_path: Path, capsys, monkeypatch):
    """A finished piece is not repeated, one whose package is missing is passed over by name."""
    monkeypatch.setattr("studies.gpu_check.__main__.installed_release", lambda: None)
    kept = {"date": "2026-01-01", "device": "a card", "lines": ["step 1 ms"]}
    for name in OWN[1:]:
        (tmp_path / f"{name}.json").write_text(json.dumps(kept))
    assert main(["--cpu-dry-run", "--out", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "run: passed over, vllm is not installed" in text
    assert f"{OWN[1]} · 2026-01-01 · a card" in text
    assert f"{OWN[0]} …" in text
    assert json.loads((tmp_path / f"{OWN[0]}.json").read_text())["device"] == "no GPU (dry run)"
    assert (tmp_path / "table.md").read_text() in text


def test_a_piece_that_fails_is_named_and_measured_again(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr("studies.gpu_check.__main__.PIECE_S", 0.01)
    monkeypatch.setattr("studies.gpu_check.__main__.installed_release", lambda: None)
    assert main(["--cpu-dry-run", "--out", str(tmp_path)]) == 1
    assert "train-0.5b failed" in capsys.readouterr().err
    assert "took longer" in (tmp_path / "train-0.5b.log").read_text()
    assert not list(tmp_path.glob("*.json"))
