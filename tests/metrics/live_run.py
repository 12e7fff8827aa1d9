"""A small real run with every role in its own process, on a random model."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from producers.settings import TaskSettings
from producers.tasks.registry import load_task
from storage.model import build_model
from streams.connect import open_bus
from streams.reader import TopicReader, from_begin
from streams.records import Record

WAIT_S = 150.0
SIZES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = [
    "warmup.enabled=false", "trainer.groups_per_step=4", "trainer.samples_per_group=4",
    "trainer.workers=1", "checkpoints.every=4", "rollouts.slots=8", "rollouts.count=1",
    "rollouts.context_max=128", "sampling.tokens_max=40", "dispatch.heartbeat_timeout_s=2",
    "dispatch.max_lag=2", "evaluation.every=2", "evaluation.prompts=2", "evaluation.samples=1",
    "evaluation.slots=4",
]  # fmt: skip


def make_model(folder: Path) -> Path:
    """Nothing is to be learnt here."""
    tokenizer = load_task(TaskSettings()).tokenizer()
    sizes = SIZES | {"vocab_size": tokenizer.size} | dict(tokenizer.special)
    build_model("Qwen3ForCausalLM", sizes, seed=0).save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@contextmanager
def started(
    folder: Path, model: Path, *settings: str, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`rollstream run`; ended by its id whatever the test does."""
    (folder.parent / "tiny.toml").write_text('run = "tiny"\n')
    line = [sys.executable, "-m", "rollstream", "run", str(folder.parent / "tiny.toml")]
    line += ["--run", str(folder)]
    for setting in (*SETTINGS, f"model.path={model}", *settings):
        line += ["--set", setting]
    with (folder.parent / "output.txt").open("ab") as output:
        process = subprocess.Popen(
            line, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(30)


def records(folder: Path, topic: str, kind: type[Record]) -> list:
    if not (folder / "bus" / f"{topic}.db").exists():
        return []
    bus = open_bus(f"sqlite:{folder / 'bus'}")
    try:
        reader = TopicReader(bus, topic, from_begin(bus, topic))
        return [r.record for r in reader.read_to(bus.end(topic)) if isinstance(r.record, kind)]
    finally:
        bus.close()


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + WAIT_S
    while not condition():
        assert process.poll() is None, "the run ended early"
        assert time.monotonic() < give_up, "it did not come true in time"
        time.sleep(0.1)
