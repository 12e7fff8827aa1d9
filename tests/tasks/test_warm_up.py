"""A tiny warm-up writes a folder that transformers loads, whole or not at all."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from producers.tasks.remainder import Remainder
from producers.tasks.scripted import Scripted
from rollstream.warmup import Course, batches, is_warm, rate, warm_up
from storage.settings import ModelSettings
from streams.errors import ConfigurationError

TINY = ModelSettings(
    config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
)
SHORT = Course(documents=200, steps=6)


def test_the_folder_is_an_ordinary_checkpoint_with_an_account(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "warm"
    warm_up(Remainder(), TINY, 0, folder, 1, lambda *at: seen.append(at[:2]), SHORT)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.vocab_size == len(tokenizer) == 18
    account = json.loads((folder / "warmup.json").read_text())
    assert account["documents"] == 200
    assert account["steps"] == 6
    assert sum(account["shares"].values()) == pytest.approx(1)
    assert math.isfinite(account["loss"])
    assert seen == [(done, 6) for done in range(1, 7)]


def test_it_learns(tmp_path: Path):
    course = Course(documents=200, steps=60, ramp_steps=5)
    losses: list[float] = []
    warm_up(Remainder(), TINY, 0, tmp_path / "w", 1, lambda *at: losses.append(at[2]), course)
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:3])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        warm_up(Remainder(), TINY, seed, tmp_path / name, 1, course=SHORT)
    bytes_of = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert bytes_of["a"] == bytes_of["b"]
    assert bytes_of["a"] != bytes_of["c"]


def test_a_warm_up_that_is_there_is_kept(tmp_path: Path):
    folder = tmp_path / "warm"
    warm_up(Remainder(), TINY, 0, folder, 1, course=SHORT)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    warm_up(Remainder(), TINY, 5, folder, 1, course=SHORT)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_killed_warm_up_leaves_nothing_half_and_starts_again(tmp_path: Path):
    folder = tmp_path / "warm"
    spec = {"task": {}, "model": TINY.model_dump(), "seed": 0, "folder": str(folder), "threads": 1}
    process = subprocess.Popen(
        [sys.executable, "-m", "rollstream.warmup", json.dumps(spec)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    first = json.loads(process.stdout.readline())  # it is in the middle of training
    process.kill()
    process.communicate()
    assert 0 < first["done"] < first["steps"]
    assert not folder.exists()
    warm_up(Remainder(), TINY, 0, folder, 1, course=SHORT)
    assert is_warm(folder)
    assert os.listdir(tmp_path) == ["warm"]


def test_a_failure_in_training_leaves_nothing_half(tmp_path: Path):
    def stop(done: int, steps: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm_up(Remainder(), TINY, 0, tmp_path / "warm", 1, stop, SHORT)
    assert not (tmp_path / "warm").exists()


def test_a_task_without_documents_is_refused(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"set model\.path"):
        warm_up(Scripted(), TINY, 0, tmp_path / "warm", 1)


def test_batches_hold_every_document_once_per_epoch_and_label_responses_only():
    documents = Remainder().documents(0, 300)
    endless = batches(documents, 512, np.random.default_rng(0))
    rows = 0
    labelled = 0
    while rows < len(documents):
        batch = next(endless)
        assert batch.tokens.numel() <= 512
        rows += len(batch.tokens)
        known = batch.labels >= 0
        labelled += int(known.sum())
        assert torch.equal(batch.labels[:, :-1][known[:, :-1]], batch.tokens[:, 1:][known[:, :-1]])
    assert rows == len(documents)
    assert labelled == sum(len(one.response) for one in documents)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor():
    course = Course(steps=1_100)
    rates = [rate(step, course) for step in range(course.steps)]
    assert rates[0] == pytest.approx(1 / 30, rel=0.01)
    assert max(rates) == pytest.approx(1, abs=0.03)
    assert rates[-1] == pytest.approx(course.lr_final)
