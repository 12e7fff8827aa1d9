"""The node's history as vLLM's core in its own process sees it, beside running sequences."""

from pathlib import Path

import numpy as np

from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.node import (
    REFRESH_EVERY_LOOKUPS,
    CombinedSource,
    NodeHistory,
    SharedHistory,
)

PROMPT = 7
FIRST, SECOND = list(range(10, 40)), list(range(50, 80))


def mapped(path: Path) -> CombinedSource:
    return CombinedSource(SharedHistory(str(path)), AnswerHistory(1 << 10))


def insert_answer(history: AnswerHistory | None, answer: list[int]) -> None:
    assert history is not None
    history.insert(PROMPT, 0, np.array(answer, np.uint32), len(answer))


def drafted(seen: CombinedSource, answer: list[int]) -> list[int]:
    """The draft by the time at which it has refreshed."""
    guesses = [seen.draft(PROMPT, answer[:7], 8).tokens for _ in range(REFRESH_EVERY_LOOKUPS + 1)]
    return list(guesses[-1])


def test_it_is_empty_until_there_is_a_file_and_follows_its_replacement(
    tmp_path: Path,
) -> None:
    node = NodeHistory(tmp_path / "node", 1 << 12)
    seen = mapped(node.path)
    assert drafted(seen, FIRST) == []
    insert_answer(node.take_over(), FIRST)
    assert drafted(seen, FIRST) == FIRST[7:15]
    node.leave()
    assert not node.path.exists(), "who only looks keeps nothing from being removed"
    assert drafted(seen, FIRST) == FIRST[7:15], "what was mapped stays readable"
    following = NodeHistory(tmp_path / "node", 1 << 12)
    insert_answer(following.take_over(), SECOND)
    assert drafted(seen, SECOND) == SECOND[7:15]
    assert drafted(seen, FIRST) == []
    following.leave()


def test_running_trajectories_of_this_process_are_drafted_from(tmp_path: Path) -> None:
    seen = mapped(tmp_path / "none")
    seen.add_running(PROMPT, 0, np.array(FIRST, np.uint32), len(FIRST))
    assert drafted(seen, FIRST) == FIRST[7:15]


def test_a_file_that_is_none_of_ours_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history"
    path.write_bytes(b"rhymes/1" + bytes(5_000))
    assert drafted(mapped(path), FIRST) == []
