"""A whole run with drafts: its rollouts share one history, one of them is killed, none is left."""

import socket
from pathlib import Path

import pytest

from rollstream.producers.drafts.shared_memory import segment_folder
from testbed.run_process import assert_the_log_adds_up, random_model, started

pytestmark = pytest.mark.long
WRITES = "this process fills the history"


def test_rollouts_of_a_run_share_a_history_that_survives_its_writer(tmp_path: Path) -> None:
    folder, steps = tmp_path / "run", 60
    history = segment_folder("tiny", folder, socket.gethostname())
    settings = ["rollouts.drafts=history", "rollouts.count=2", f"trainer.steps={steps}"]
    with started(folder, random_model(tmp_path / "model"), settings) as run:
        run.wait_for_step(2)
        assert [path.name for path in history.iterdir()] == ["history"]
        logs = [folder / "logs" / f"rollout-{number}.log" for number in range(2)]
        (writer,) = [log.stem for log in logs if WRITES in log.read_text()]
        run.kill(writer)
        run.wait_for(lambda: sum(log.read_text().count(WRITES) for log in logs) >= 2)
        run.wait_complete()
    assert_the_log_adds_up(folder, steps)
    assert not history.exists()
