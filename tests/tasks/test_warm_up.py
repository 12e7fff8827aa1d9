"""A tiny warm-up writes a folder that transformers loads, whole or not at all."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollstream.errors import ConfigurationError
from rollstream.producers.tasks.remainder import Remainder
from rollstream.producers.tasks.scripted import Scripted
from rollstream.run.warmup.warmup import (
    SftSchedule,
    batches,
    is_warmed_up,
    learning_rate_share,
    train_sft,
    warm_up,
)
from rollstream.storage.settings import ModelSettings
from rollstream.storage.starting_model.models import build_model

TINY = ModelSettings(
    config={"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
)
SMALL = {"vocab_size": 18, "num_attention_heads": 4, "num_key_value_heads": 2}
SHORT = SftSchedule(documents=200, steps=6)


def test_the_folder_is_an_ordinary_checkpoint_with_a_summary(tmp_path: Path):
    seen: list[tuple[int, int]] = []
    folder = tmp_path / "warm"
    warm_up(Remainder(), TINY, 0, folder, 1, lambda *at: seen.append(at[:2]), SHORT)
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.eos_token_id == tokenizer.eos_token_id == 2
    assert model.config.vocab_size == len(tokenizer) == 18
    summary = json.loads((folder / "warmup.json").read_text())
    assert summary["documents"] == 200
    assert summary["steps"] == 6
    assert sum(summary["shares"].values()) == pytest.approx(1)
    assert math.isfinite(summary["loss"])
    assert seen == [(done, 6) for done in range(1, 7)]


def test_it_learns(tmp_path: Path):
    schedule = SftSchedule(documents=200, steps=60, ramp_steps=5)
    losses: list[float] = []
    warm_up(Remainder(), TINY, 0, tmp_path / "w", 1, lambda *at: losses.append(at[2]), schedule)
    assert np.mean(losses[-10:]) < 0.9 * np.mean(losses[:3])


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        warm_up(Remainder(), TINY, seed, tmp_path / name, 1, schedule=SHORT)
    bytes_of = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert bytes_of["a"] == bytes_of["b"]
    assert bytes_of["a"] != bytes_of["c"]


def test_a_warm_up_that_is_there_is_kept(tmp_path: Path):
    folder = tmp_path / "warm"
    warm_up(Remainder(), TINY, 0, folder, 1, schedule=SHORT)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    warm_up(Remainder(), TINY, 5, folder, 1, schedule=SHORT)
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


KILLED = """
import sys
from pathlib import Path
from rollstream.producers.tasks.remainder import Remainder
from rollstream.run.warmup.warmup import SftSchedule
from rollstream.run.warmup.warmup import warm_up
from rollstream.storage.settings import ModelSettings
model, schedule = ModelSettings.model_validate_json(sys.argv[2]), SftSchedule(200, 100_000)
warm_up(Remainder(), model, 0, Path(sys.argv[1]), 1, lambda *at: print(at[0], flush=True), schedule)
"""


def test_a_killed_warm_up_leaves_nothing_half_and_restarts(tmp_path: Path):
    folder = tmp_path / "warm"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(folder), TINY.model_dump_json()],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"1\n"  # it is in the middle of training
    process.kill()
    process.communicate()
    assert not folder.exists()
    warm_up(Remainder(), TINY, 0, folder, 1, schedule=SHORT)
    assert is_warmed_up(folder)
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


def test_batches_are_bounded_mix_lengths_and_hold_every_document_once_per_epoch():
    documents = Remainder().documents(0, 300)
    epoch: list[bytes] = []
    for batch in batches(documents, 512, np.random.default_rng(0)):
        assert sum(len(sample) for sample in batch) <= 512
        epoch += [sample.tokens.tobytes() for sample in batch]
        if len(epoch) >= 300:
            break
        assert len({len(sample) for sample in batch}) > 1
    wanted = [np.array(one.prompt + one.response, np.uint32).tobytes() for one in documents]
    assert Counter(wanted) <= Counter(epoch)  # the last batch has some of the next epoch


def test_the_loss_is_that_of_the_responses_alone():
    documents = Remainder().documents(0, 8)
    model = build_model("Qwen3ForCausalLM", {**TINY.config, **SMALL}, seed=0)
    total, count = 0.0, 0
    for one in documents:
        tokens = torch.tensor([one.prompt + one.response])
        logits = model(input_ids=tokens).logits[0, len(one.prompt) - 1 : -1]
        total += cross_entropy(logits, torch.tensor(one.response), reduction="sum").item()
        count += len(one.response)
    schedule = SftSchedule(steps=1, batch_tokens=100_000)
    losses = train_sft(model, documents, schedule, 0, 1, lambda *at: None)
    assert losses == [pytest.approx(total / count, rel=1e-5)]


def test_one_thread_and_two_give_the_same_bits(tmp_path: Path):
    for threads in (1, 2):
        warm_up(Remainder(), TINY, 0, tmp_path / str(threads), threads, schedule=SHORT)
    one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in "12")
    assert one == two


def test_the_learning_rate_rises_to_its_peak_and_falls_to_its_floor():
    schedule = SftSchedule(steps=800)
    rates = [learning_rate_share(step, schedule) for step in range(schedule.steps)]
    assert rates[0] == pytest.approx(1 / 30, rel=0.01)
    assert max(rates) == rates[29] == pytest.approx(1, abs=0.04)
    assert rates[-1] == pytest.approx(schedule.lr_final)
