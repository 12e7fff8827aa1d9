"""A process that ends by an error leaves no history in memory, and takes none from others."""

from pathlib import Path

import pytest

from testbed.waiting import WAIT_S, wait_for
from tests.drafts.drafts_log import answer, append_records, asked, log_in
from tests.drafts.test_draft_processes import NodeRollout, rollouts


def end_by_an_error(rollout: NodeRollout) -> None:
    assert rollout.process.stdin is not None
    rollout.process.stdin.write("no JSON\n")
    rollout.process.stdin.close()
    assert rollout.process.wait(WAIT_S) == 1


@pytest.mark.slow
def test_rollouts_that_end_by_an_error_let_go_of_the_history(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    bus = log_in(tmp_path)
    append_records(bus, answer(7, [4, 5, 6, 7, 8]))
    bus.close()
    with rollouts(tmp_path / "bus", folder, 2) as both:
        for one in both:
            wait_for(lambda: one.drafts(7, asked(7)) == [4, 5, 6, 7, 8])  # noqa: B023
        end_by_an_error(both[0])
        wait_for(lambda: both[1].ask("writes") is True)
        assert both[1].drafts(7, asked(7)) == [4, 5, 6, 7, 8]
        end_by_an_error(both[1])
    assert not folder.exists()
