"""`examples/gsm8k-qwen.toml` without its model and its data: the configuration is valid, and its
reward reads GSM8K's answers.
"""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.verifiers import final_number
from rollstream.producers.dialogue.text_tokenizer import byte_tokenizer
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import load
from rollstream.run.config.settings import Configuration
from testbed.repository import ROOT

SOLUTION = "Natalia sold 48/2 = <<48/2=24>>24 clips in May.\nAltogether 48+24 = 72.\n#### 72"


@pytest.fixture
def configuration(tmp_path: Path) -> Configuration:
    """A folder with the model's place filled in."""
    fields = {"model_type": "qwen2", "max_position_embeddings": 32_768}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return load(ROOT / "examples/gsm8k-qwen.toml", [f"model.path={tmp_path}"], {})


def test_it_is_coherent(configuration: Configuration):
    c = configuration
    assert (c.rollouts.engine, c.rollouts.vllm.head_float32) == ("vllm", True)
    assert c.trainer.compute == c.weights.dtype == "bfloat16"
    assert c.trainer.gradient_checkpointing
    assert c.trainer.device == "cuda"
    engines = c.rollouts.count + c.evaluation.enabled
    assert engines * c.rollouts.vllm.memory_share <= 0.7, "the trainer needs the rest of the card"


def test_its_columns_are_those_of_the_data_set(tmp_path: Path, configuration: Configuration):
    """Two Parquet files in the data set's format, and the built-in tokenizer."""
    for name, count in (("train", 5), ("test", 3)):
        asked = [
            f"{name}: Natalia sold clips to {index} friends. How many?" for index in range(count)
        ]
        table = pa.table({"question": asked, "answer": [SOLUTION] * count})
        pq.write_table(table, tmp_path / f"{name}.parquet")
    files = {"path": str(tmp_path / "train.parquet"), "held_out": str(tmp_path / "test.parquet")}
    options = {**configuration.task.options, **files}
    task = load_task(configuration.task.model_copy(update={"options": options}))
    asked = task.prompt(0, 0)
    text = byte_tokenizer().decode(list(asked.tokens), skip_special_tokens=True)
    assert "Natalia sold clips" in text
    assert "End with ####" in text
    assert len(task.held_out(3)) == 3
    assert json.loads(asked.reference) == SOLUTION


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("48 + 24 = 72\n#### 72", 1.0),
        ("#### 72.0", 1.0),
        ("#### $72", 1.0),
        ("So she sold 72", 1.0),
        ("#### 73", 0.0),
        ("72 is not it\n#### 24", 0.0),
        ("#### ", 0.0),
        ("", 0.0),
    ],
)
def test_the_number_is_what_counts(answer: str, reward: float):
    got, scores = final_number(answer, SOLUTION)
    assert got == reward
    assert scores["marked"] == float("####" in answer)


def test_thousands_and_signs():
    assert final_number("#### 1,234,000", "#### 1234000")[0] == 1
    assert final_number("#### -5", "#### 5")[0] == 0
