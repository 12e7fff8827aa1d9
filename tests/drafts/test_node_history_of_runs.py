"""A whole run with drafts: its rollouts share one history, one of them is killed, none is left."""

import signal
import socket
from pathlib import Path

import pytest

from rollstream.producers.drafts.shared_memory import segment_folder
from testbed.run_process import (
    assert_the_log_adds_up,
    random_model,
    role,
    role_restarted,
    started,
    steps_done,
)
from testbed.waiting import WAIT_S, wait_for

pytestmark = pytest.mark.long
WRITES = "this process fills the history"


def test_rollouts_of_a_run_share_a_history_that_survives_its_writer(tmp_path: Path) -> None:
    run, steps = tmp_path / "run", 60
    folder = segment_folder("tiny", run, socket.gethostname())
    settings = ["rollouts.drafts=history", "rollouts.count=2", f"trainer.steps={steps}"]
    with started(run, random_model(tmp_path / "model"), settings) as process:
        wait_for(lambda: steps_done(run) >= 2, process)
        assert [path.name for path in folder.iterdir()] == ["history"]
        logs = [run / "logs" / f"rollout-{number}.log" for number in range(2)]
        (writer,) = [log.stem for log in logs if WRITES in log.read_text()]
        victim = role(process, writer)
        victim.send_signal(signal.SIGKILL)
        wait_for(lambda: role_restarted(process, writer, victim.pid), process)
        wait_for(lambda: sum(log.read_text().count(WRITES) for log in logs) >= 2, process)
        assert process.wait(WAIT_S) == 0
    assert_the_log_adds_up(run, steps)
    assert not folder.exists()
