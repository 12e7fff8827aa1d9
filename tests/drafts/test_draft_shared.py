"""The history in shared memory: one writer, readers without locks, under any memory contents.

Locks belong to open files, so two parts in one process are to each other what two processes are.
"""

import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollstream.errors import StoreError
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.drafts.node import (
    CombinedSource,
    NodeHistory,
    SharedHistory,
    running_tokens,
)
from rollstream.producers.drafts.shared_memory import (
    HEAD_WORD,
    WRITER_WORD,
    HistoryLayout,
    lock_folder,
    make_segment,
    map_segment,
    segment_folder,
)
from rollstream.producers.drafts.speculation import Speculation
from tests.drafts.test_draft_history import SEQUENCES, tokens

ANSWER = tokens(1, 2, 3, 4, 5, 6, 7, 8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "node"


def writing(folder: Path, tokens_max: int = 1000) -> tuple[NodeHistory, AnswerHistory]:
    node = NodeHistory(folder, tokens_max)
    history = node.take_over()
    assert history is not None
    return node, history


@settings(max_examples=30, deadline=None)
@given(SEQUENCES, st.integers(0, 2**32))
def test_readers_draft_what_the_writer_drafts(
    tmp_path_factory: pytest.TempPathFactory,
    inserted: list[tuple[int, list[int], float]],
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("run") / "node"
    node, history = writing(folder, 64)
    reader, drawn = SharedHistory(node.path), np.random.default_rng(seed)
    for group, (prompt, values, reward) in enumerate(inserted):
        history.insert(prompt, group, tokens(*values), len(values) - 1, reward)
        newest = drawn.integers(0, 4, 9).tolist() if group % 2 else values[:-1]
        assert reader.draft(prompt, newest, 5) == history.draft(prompt, newest, 5)
    reader.close()
    node.leave()


def test_only_one_writes_and_the_others_see_what_it_writes(folder: Path) -> None:
    node, history = writing(folder)
    others = [NodeHistory(folder, 1000) for _ in range(3)]
    assert [other.take_over() for other in others] == [None] * 3
    history.insert(1, 0, ANSWER, 7)
    for other in others:
        assert not other.is_writer
        assert CombinedSource(other, AnswerHistory(64)).draft(1, [1, 2, 3], 8).tokens == [
            4,
            5,
            6,
            7,
            8,
        ]
    assert [path.name for path in folder.iterdir()] == ["history"]
    for each in (node, *others):
        each.leave()
    assert not folder.exists()


def test_a_reader_cannot_write(folder: Path) -> None:
    node, _ = writing(folder)
    segment = map_segment(node.path)
    assert segment is not None
    with pytest.raises(TypeError):
        segment.memory.words[HEAD_WORD] = 0
    segment.close()
    node.leave()


def test_the_next_writer_continues_where_the_others_draft(folder: Path) -> None:
    """Old occurrences stay until a better one comes, whatever their rank was."""
    node, history = writing(folder)
    history.insert(1, 50, ANSWER, 7, reward=9.0)
    other = NodeHistory(folder, 1000)
    assert other.take_over() is None
    reader = SharedHistory(node.path)
    assert reader.draft(1, [1, 2, 3], 2).tokens == [4, 5]
    node.leave()
    assert reader.draft(1, [1, 2, 3], 2).tokens == [4, 5]
    again = other.take_over()
    assert again is not None
    assert reader.draft(1, [1, 2, 3], 2).tokens == [4, 5]
    again.insert(1, 0, tokens(1, 2, 3, 9, 9), 2, reward=-3.0)
    assert reader.draft(1, [1, 2, 3], 2).tokens == [9, 9]
    reader.close()
    other.leave()
    assert not folder.exists()


def test_an_unused_history_is_not_continued(folder: Path) -> None:
    """A killed run leaves its memory; its locks are freed with it."""
    lock = lock_folder(folder)
    left = make_segment(folder, HistoryLayout(1000))
    AnswerHistory(1000, memory=left.memory).insert(1, 0, ANSWER, 7)
    left.memory.words[WRITER_WORD] = 2**22 + 5  # above the largest process id
    left.close()
    reader = NodeHistory(folder, 1000)
    assert reader.take_over() is None, f"the lock {lock} is held"
    assert not CombinedSource(reader, AnswerHistory(64)).draft(1, [1, 2, 3], 8).tokens
    assert lock is not None
    os.close(lock)
    assert reader.take_over() is not None
    assert not CombinedSource(reader, AnswerHistory(64)).draft(1, [1, 2, 3], 8).tokens
    reader.leave()


def test_what_other_runs_left_is_swept_up_and_what_they_use_is_not(tmp_path: Path) -> None:
    """Memory outlives a process; a killed run may never be resumed."""
    left, used, mine = (segment_folder(run, tmp_path, "n") for run in ("left", "used", "mine"))
    left, used, mine = (tmp_path / folder.name for folder in (left, used, mine))
    lock = lock_folder(left)
    assert lock is not None
    make_segment(left, HistoryLayout(1000)).close()
    os.close(lock)
    other, history = writing(used)
    history.insert(1, 0, ANSWER, 7)
    node, _ = writing(mine)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([used.name, mine.name])
    assert SharedHistory(other.path).draft(1, [1, 2, 3], 2).tokens == [4, 5]
    other.leave()
    node.leave()
    assert not list(tmp_path.iterdir())


def test_a_history_of_another_size_is_replaced_and_readers_follow(folder: Path) -> None:
    node, history = writing(folder)
    history.insert(1, 0, ANSWER, 7)
    larger = NodeHistory(folder, 2000)
    assert larger.take_over() is None
    reader = SharedHistory(node.path)
    assert reader.draft(1, [1, 2, 3], 2).tokens == [4, 5]
    node.leave()
    again = larger.take_over()
    assert again is not None
    again.insert(1, 0, tokens(1, 2, 3, 9, 9), 2)
    reader.refresh()
    assert reader.draft(1, [1, 2, 3], 2).tokens == [9, 9]
    reader.close()
    larger.leave()
    assert not folder.exists()


def test_readers_find_a_new_segment_by_themselves(folder: Path) -> None:
    reader = SharedHistory(folder / "history")
    assert not reader.draft(1, [1, 2, 3], 2).tokens
    node, history = writing(folder)
    history.insert(1, 0, ANSWER, 7)
    found = [bool(reader.draft(1, [1, 2, 3], 2).tokens) for _ in range(300)]
    assert found[-1]
    assert found == sorted(found)
    reader.close()
    node.leave()


def test_a_reader_that_does_not_hold_the_file_does_not_prevent_its_removal(folder: Path) -> None:
    """An engine's process may end after its rollout closed the history; its mapping stays valid."""
    node, history = writing(folder)
    history.insert(1, 0, ANSWER, 7)
    reader = SharedHistory(node.path)
    assert reader.draft(1, [1, 2, 3], 2).tokens == [4, 5]
    node.leave()
    assert not folder.exists()
    assert reader.draft(1, [1, 2, 3], 2).tokens == [4, 5]
    reader.close()
    assert not reader.draft(1, [1, 2, 3], 2).tokens


def test_the_name_has_run_folder_and_node(tmp_path: Path) -> None:
    names = {
        segment_folder(run, folder, node)
        for run in ("a", "b")
        for folder in (tmp_path / "x", tmp_path / "y")
        for node in ("m", "n")
    }
    assert len(names) == 8
    assert segment_folder("a", tmp_path / "x", "m") in names


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\0" * 10_000, bytes(range(256)) * 90])
def test_what_is_no_history_is_none(folder: Path, content: bytes) -> None:
    folder.mkdir()
    path = folder / "history"
    path.write_bytes(content)
    assert map_segment(path) is None
    assert not SharedHistory(path).draft(1, [1, 2, 3], 2).tokens
    node, history = writing(folder)
    history.insert(1, 0, ANSWER, 7)
    assert SharedHistory(path).draft(1, [1, 2, 3], 2).tokens == [4, 5]
    node.leave()


def test_a_segment_that_was_cut_short_is_none(folder: Path) -> None:
    node, _ = writing(folder)
    with node.path.open("r+b") as file:
        file.truncate(5000)
    assert map_segment(node.path) is None


def test_without_room_a_process_keeps_its_own_history(folder: Path) -> None:
    folder.write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot be used"):
        lock_folder(folder)
    node, history = writing(folder)
    history.insert(1, 0, ANSWER, 7)
    assert not node.is_writer
    assert CombinedSource(node, AnswerHistory(64)).draft(1, [1, 2, 3], 8).tokens == [4, 5, 6, 7, 8]
    node.leave()
    assert folder.read_text().startswith("a file")


def test_what_runs_here_comes_first_and_stays_here(folder: Path) -> None:
    node, history = writing(folder)
    here, there = (CombinedSource(node, AnswerHistory(64)) for _ in range(2))
    history.insert(1, 0, ANSWER, 7)
    here.add_running(1, 1, tokens(1, 2, 3, 9, 9), 2)
    assert here.draft(1, [1, 2, 3], 8).tokens == [9, 9]
    assert there.draft(1, [1, 2, 3], 8).tokens == [4, 5, 6, 7, 8]
    assert here.draft(1, [1, 2, 3, 4], 8).tokens == [5, 6, 7, 8]  # more is recognised
    node.leave()


@pytest.mark.parametrize(("slots", "wanted"), [(8, 4096), (512, 65_536), (1, 1024)])
def test_what_runs_takes_a_full_batch_at_most(slots: int, wanted: int) -> None:
    assert running_tokens(slots, 512, 262_144) == wanted


# ---- torn memory -----------------------------------------------------------------------------


@pytest.fixture
def scribbled(folder: Path) -> Iterator[tuple[NodeHistory, AnswerHistory]]:
    """A history of 200 answers over whose memory a thread writes random bytes, the header's
    included.
    """
    node, history = writing(folder, 1 << 14)
    drawn = np.random.default_rng(0)
    for group in range(200):
        history.insert(group % 20, group, drawn.integers(0, 50, 60).astype(np.uint32), 57)
    over = threading.Event()
    with node.path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        thread = threading.Thread(target=scribble, args=(memory, over))
        thread.start()
        yield node, history
        over.set()
        thread.join()


def scribble(memory: mmap.mmap, over: threading.Event) -> None:
    drawn, size = np.random.default_rng(1), len(memory)
    while not over.is_set():
        for start in (0, int(drawn.integers(0, size - 4096))):
            count = int(drawn.integers(1, 4096 if start else 256))
            memory[start : start + count] = drawn.bytes(count)


def test_torn_memory_gives_drafts_of_the_vocabulary_or_none(
    scribbled: tuple[NodeHistory, AnswerHistory],
) -> None:
    node, _ = scribbled
    reader, drawn = SharedHistory(node.path), np.random.default_rng(2)
    engines = [
        Speculation(s, DraftGate(), 50) for s in (reader, CombinedSource(node, AnswerHistory(64)))
    ]
    for _ in range(5000):
        newest = drawn.integers(0, 50, drawn.integers(0, 12)).tolist()
        prompt, most = int(drawn.integers(0, 20)), int(drawn.integers(1, 33))
        for engine in engines:
            draft = engine.look_up(prompt, newest, most)
            assert len(draft.tokens) <= most
            assert all(0 <= token < 50 for token in draft.tokens)
            assert bool(draft.tokens) == bool(draft.matched)


def test_a_writer_over_torn_memory_continues(scribbled: tuple[NodeHistory, AnswerHistory]) -> None:
    _, history = scribbled
    drawn = np.random.default_rng(3)
    for group in range(200, 400):
        history.insert(group % 20, group, drawn.integers(0, 50, 60).astype(np.uint32), 57)
        history.draft(group % 20, drawn.integers(0, 50, 7).tolist(), 8)
    assert history.inserted == 400 * 57


def test_the_next_writer_makes_torn_memory_good(folder: Path) -> None:
    node, history = writing(folder, 1 << 12)
    other = NodeHistory(folder, 1 << 12)
    assert other.take_over() is None
    drawn = np.random.default_rng(4)
    for group in range(40):
        history.insert(group, group, drawn.integers(0, 50, 60).astype(np.uint32), 57)
    segment = map_segment(node.path, writes=True)
    assert segment is not None
    for view in (segment.memory.keys, segment.memory.places, segment.memory.ranks):
        noise = drawn.bytes(view.nbytes // 2)
        view.cast("B")[: len(noise)] = noise
    segment.memory.words[HEAD_WORD] = -5
    segment.close()
    node.leave()
    again = other.take_over()
    assert again is not None
    for group in range(100):
        newest = drawn.integers(0, 50, 60).astype(np.uint32)
        again.insert(group, group, newest, 57)
        assert list(again.draft(group, newest[:30].tolist(), 8).tokens) == newest[30:38].tolist()
    other.leave()
