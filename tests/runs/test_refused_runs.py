"""A run whose model no rollout can serve is refused; one whose rollout merely died continues."""

from pathlib import Path

import pytest

from rollstream.storage.metrics_file import read_metrics
from rollstream.storage.starting_model.models import build_model
from testbed.run_process import SIZES, STEPS, assert_the_log_adds_up, started


@pytest.fixture(scope="module")
def unserved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the trainer takes; its rope depends on the batch, so none of our engines
    does.
    """
    from rollstream.producers.settings import TaskSettings
    from rollstream.producers.tasks.registry import load_task

    folder = tmp_path_factory.mktemp("unserved")
    tokenizer = load_task(TaskSettings()).tokenizer()
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    sizes = SIZES | {"vocab_size": tokenizer.size, "rope_parameters": rope}
    model = build_model("Qwen3ForCausalLM", sizes | dict(tokenizer.special), seed=0)
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


def deaths_of_rollouts(folder: Path) -> list[int]:
    events = read_metrics(folder / "metrics" / "supervisor.jsonl")
    return [one["code"] for one in events if one["event"] == "death" and "rollout" in one["role"]]


@pytest.mark.slow
def test_a_model_that_no_rollout_serves_is_refused_before_the_start(
    tmp_path: Path, unserved: Path
) -> None:
    folder = tmp_path / "run"
    with started(folder, unserved, ["rollouts.count=1"]) as run:
        run.newest().wait(code=2)
        printed = run.newest().text
    assert "rope type 'dynamic' depends on the batch" in printed
    assert "(model.path)" in printed
    assert not folder.exists()


@pytest.mark.long
def test_a_killed_rollout_is_no_refusal(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "run"
    with started(folder, model, ["rollouts.count=1"]) as run:
        for steps in (0, 3):
            run.role("rollout-0")  # the log exists
            run.wait_for_step(steps)
            run.kill("rollout-0")
        run.wait_complete()
    assert deaths_of_rollouts(folder) == [-9, -9]
    assert_the_log_adds_up(folder, STEPS)
