"""A run whose model vLLM cannot compute: its rollout is started once more, then the run ends."""

from pathlib import Path

import pytest

from rollstream.storage.metrics_file import read_metrics
from testbed.run_process import started

pytestmark = pytest.mark.slow


def test_a_model_that_vllm_refuses_twice_ends_the_run(tmp_path: Path, model: Path) -> None:
    """Its heads are 8 wide, which vLLM's kernels for the CPU cannot compute."""
    folder = tmp_path / "run"
    with started(folder, model, ["rollouts.engine=vllm", "rollouts.count=1"]) as run:
        run.newest().wait(code=1)
        output = run.newest().text
    assert "rollstream: rollout-0 refused to start: engine 'vllm' cannot serve this run's" in output
    events = read_metrics(folder / "metrics" / "supervisor.jsonl")
    deaths = [one for one in events if one["event"] == "death"]
    assert [(one["role"], one["code"]) for one in deaths] == [("rollout-0", 3), ("rollout-0", 3)]
