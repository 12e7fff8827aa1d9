"""Parts of the game day (`testbed/oncall/game_day.py`) that can fail without its servers."""

import subprocess
import threading
from pathlib import Path

import pytest

from testbed.oncall.game_task import Judged
from testbed.oncall.operator_shell import serve_words
from testbed.waiting import WAIT_S, wait_for


def test_the_operators_shell_gets_the_answer_to_each_word(tmp_path: Path) -> None:
    """Arguments arrive as they are, an answer that raises is told, and `finish` ends it."""
    (tmp_path / "credentials.sh").write_text("export KEY=1\n")
    words = {"game-join": lambda *given: "|".join(given), "game-fail": lambda: str(1 // 0)}
    serving = threading.Thread(target=serve_words, args=(tmp_path, words, lambda: None))
    serving.start()
    wait_for((tmp_path / "env.sh").exists)
    script = f". {tmp_path}/env.sh; game-join 'a b' '' '*'; game-fail; game-join $KEY; finish"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=True
    )
    failed = "failed: ZeroDivisionError: integer division or modulo by zero"
    assert done.stdout.splitlines() == ["a b||*", failed, "1", "finished"]
    serving.join(WAIT_S)
    assert not serving.is_alive()


def test_about_half_of_the_answers_are_right_while_the_service_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("testbed.oncall.game_task.PAUSE_S", 0.0)
    task, answers = Judged(str(tmp_path / "down")), [((n, n + 1),) for n in range(100)]
    rewards: list[float] = [task.judge("", one).reward for one in answers]
    assert {*rewards} == {0.0, 1.0}
    assert 30 < sum(rewards) < 70
    (tmp_path / "down").touch()
    with pytest.raises(ConnectionError):
        task.judge("", answers[0])
