"""AdamW with moments of 8 bits: near AdamW, and the same bits after a restart and in a replay.

The slow tests need the extra `lowbit`, which `make test-slow` installs.
"""

import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.learn.learner import TorchLearner
from rollstream.errors import ConfigurationError
from rollstream.run.cli.main import main
from rollstream.run.sizes import arithmetic as sums
from rollstream.run.sizes.shapes import SHAPES
from tests.runs.test_resume import UNEVEN, hashes, train_until
from tests.support import tiny_run as tiny
from tests.support.kept_run import STEPS, made
from tests.trainer.learn.test_learner_updates import stream, train
from tests.trainer.learning_reference import build, settings
from tests.trainer.test_objectives_of_runs import forget_checkpoints

LOW = {"optimiser": "adamw_8bit", "lr": 1e-2}
CODED = "transformer.h.0.mlp.c_fc.weight"
"""A tensor of 4096 numbers, the fewest that have moments of 8 bits."""


@pytest.fixture
def library() -> None:
    pytest.importorskip("bitsandbytes", reason="the extra `lowbit` is not installed")


def learner(**chosen: object) -> TorchLearner:
    return TorchLearner(build("gpt2"), settings(**{**LOW, **chosen}))


def trained(learner: TorchLearner, updates: object) -> dict[str, Tensor]:
    train(learner, updates)
    learner.close()
    return learner.state()


def test_without_its_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'rollstream\[lowbit\]'"):
        learner()


def test_the_plan_counts_moments_of_a_byte():
    shape = SHAPES["qwen2.5-1.5b"]

    def state_of(optimiser: str) -> float:
        form = sums.form_of(TrainerSettings.model_validate({"optimiser": optimiser}), 1)
        (line,) = [one for one in sums.trainer_lines(shape, form) if one.what == sums.STATE]
        return line.bytes / shape.parameters

    assert state_of("adamw") == 16
    assert state_of("adamw_8bit") == pytest.approx(4 + 4 + 2 * (1 + 4 / 256))


@pytest.mark.slow
def test_updates_are_those_of_adamw_but_for_the_rounding_of_moments(library: None):
    updates = stream(4)
    begin = learner(optimiser="adamw").state()
    for count, bound in ((1, 1e-5), (4, 0.1)):  # the first update uses moments not yet rounded
        plain = trained(learner(optimiser="adamw", weight_decay=0.1), updates[:count])
        rounded = trained(learner(weight_decay=0.1), updates[:count])
        name = f"masters.{CODED}"
        moved = (plain[name] - begin[name]).norm()
        assert 0 <= (plain[name] - rounded[name]).norm() < bound * moved
    assert not torch.equal(plain[name], rounded[name])
    assert rounded[f"optimiser.mean_codes.{CODED}"].dtype == torch.uint8
    assert rounded[f"optimiser.mean_scales.{CODED}"].shape == (16,)
    small = "transformer.h.0.mlp.c_fc.bias"
    assert rounded[f"optimiser.mean.{small}"].dtype == torch.float32
    assert f"optimiser.mean.{CODED}" not in rounded


@pytest.mark.slow
def test_a_restart_resumes_bit_for_bit_from_safetensors(library: None, tmp_path: Path):
    """Also where an update was skipped, which the bias correction does not count."""
    updates = stream(4)

    def skipped_first() -> TorchLearner:
        made = learner(workers=3)
        assert made.finish_update()["updates_skipped"] == 1
        return made

    whole = skipped_first()
    trained(whole, updates)
    save_file(trained(skipped_first(), updates[:2]), tmp_path / "state.safetensors")
    second = learner()
    second.load_state(load_file(tmp_path / "state.safetensors"))
    trained(second, updates[2:])
    assert second.state_hash() == whole.state_hash()
    assert second.state_bytes < 0.8 * learner(optimiser="adamw").state_bytes


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["adamw", "adamw_8bit"])
def test_the_state_of_the_other_optimiser_is_refused(library: None, saved: str):
    state = trained(learner(optimiser=saved), stream(1))
    other = "adamw" if saved == "adamw_8bit" else "adamw_8bit"
    with pytest.raises(ConfigurationError, match=r"optimiser\.mean.*is missing"):
        learner(optimiser=other).load_state(state)


@pytest.fixture
def larger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny runs whose largest matrices have moments of 8 bits."""
    monkeypatch.setitem(tiny.SIZES, "intermediate_size", 256)


@pytest.mark.slow
def test_a_resumed_run_equals_one_that_was_never_stopped(
    library: None, larger: None, tmp_path: Path
):
    with tiny.tiny_run(
        tmp_path, trainer={"steps": 6, **LOW}, checkpoint_every=2, task=UNEVEN
    ) as run:
        run.start_all()
        train_until(run, term=1, steps=3)
        assert run.train(term=2)
        whole = hashes(run)
        assert [len(found) for found in whole.values()] == [1] * 6
        forget_checkpoints(run, but=4)
        trainer = run.build_trainer(term=3)
        assert trainer.step == 4
        assert trainer.run(threading.Event())
        assert hashes(run) == whole


@pytest.mark.slow
def test_a_replay_recomputes_every_step(
    library: None, larger: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = made(tmp_path / "run", **LOW)
    for first in ("0", "5"):
        out = tmp_path / first
        assert main(["replay", str(run), "--out", str(out), "--from-step", first, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["differing"], found["compared"]) == ([], STEPS if first == "0" else 2)
