"""The plain loop, to which whole runs are compared, trains a model with tied embeddings."""

from pathlib import Path

from benchmarks.pipeline.plain_loop import run
from benchmarks.runs.quickstart import QUICKSTART
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.config import load
from rollstream.run.roles.context import prompt_tokens_max
from rollstream.run.warmup.warmup import untrained_model
from tests.benchmarks.test_evidence import TINY


def test_it_trains_the_configured_steps(tmp_path: Path) -> None:
    values = [*TINY, "trainer.steps=2", "model.config.tie_word_embeddings=true"]
    c = load(QUICKSTART, values)
    untrained_model(c.model, load_task(c.task, prompt_tokens_max(c)), seed=0).save_pretrained(
        tmp_path
    )
    measured = run(load(QUICKSTART, [*values, f"model.path={tmp_path}"]), threads=1)
    assert measured["tokens"] > 2 * 4, "more than a token for each of the samples"
    assert measured["seconds"] > 0
