"""Rollouts of a node as real processes: one history for all, whichever process dies."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from rollstream.producers.drafts.shared_memory import HistoryLayout
from rollstream.streams.bus import Bus
from testbed.waiting import WAIT_S, wait_for
from tests.drafts.drafts_log import answer, append_records, ask, asked, log_in, partial


class NodeRollout:
    """One such process."""

    def __init__(self, bus: Path, folder: Path) -> None:
        line = [sys.executable, "-m", "tests.drafts.node_rollout", f"sqlite:{bus}", str(folder)]
        self.process = subprocess.Popen(
            line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )  # fmt: skip

    def ask(self, *what: object) -> object:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def drafts(self, group: int, newest: Sequence[int]) -> object:
        return self.ask("draft", group, list(newest))

    def leave(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write('["leave"]\n')
        self.process.stdin.close()
        assert self.process.wait(WAIT_S) == 0

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def maps(self, path: Path) -> list[str]:
        """Inodes under which it has this file mapped."""
        lines = Path(f"/proc/{self.process.pid}/maps").read_text().splitlines()
        return [line.split()[4] for line in lines if line.endswith(str(path))]


@contextmanager
def rollouts(bus: Path, folder: Path, count: int) -> Generator[list[NodeRollout]]:
    """Starts so many of them, each answering; none is left afterwards."""
    started = [NodeRollout(bus, folder) for _ in range(count)]
    try:
        for one in started:
            one.ask("writes")
        yield started
    finally:
        for one in started:
            one.kill()


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    bus = log_in(tmp_path)
    yield bus
    bus.close()


def writer_of(some: Sequence[NodeRollout]) -> tuple[NodeRollout, NodeRollout]:
    """The writer, and the other one."""
    wait_for(lambda: [one.ask("writes") for one in some].count(True) == 1)
    first, second = some
    return (first, second) if first.ask("writes") else (second, first)


def test_rollouts_of_a_node_share_one_history_and_the_last_one_removes_it(
    tmp_path: Path, bus: Bus
) -> None:
    folder = tmp_path / "node"
    append_records(bus, answer(7, [4, 5, 6, 7, 8]))
    with rollouts(tmp_path / "bus", folder, 2) as both:
        writer, reader = writer_of(both)
        for one in both:
            wait_for(lambda: one.drafts(7, asked(7)) == [4, 5, 6, 7, 8])  # noqa: B023
        (segment,) = folder.iterdir()
        assert segment.stat().st_size == HistoryLayout(4096).bytes
        inode = str(segment.stat().st_ino)
        assert set(writer.maps(segment)) == set(reader.maps(segment)) == {inode}
        writer.leave()
        wait_for(lambda: reader.ask("writes") is True)
        assert reader.drafts(7, asked(7)) == [4, 5, 6, 7, 8]
        reader.leave()
    assert not folder.exists()


def test_when_the_writer_is_killed_another_one_continues_in_the_same_memory(
    tmp_path: Path, bus: Bus
) -> None:
    folder = tmp_path / "node"
    append_records(bus, answer(7, [4, 5, 6, 7, 8]))
    with rollouts(tmp_path / "bus", folder, 2) as both:
        writer, other = writer_of(both)
        wait_for(lambda: other.drafts(7, asked(7)) == [4, 5, 6, 7, 8])
        inode = (folder / "history").stat().st_ino
        writer.kill()
        assert other.drafts(7, asked(7)) == [4, 5, 6, 7, 8]  # while it takes over, too
        wait_for(lambda: other.ask("writes") is True)
        assert other.drafts(7, asked(7)) == [4, 5, 6, 7, 8]
        append_records(bus, answer(8, [9, 9, 3]))
        wait_for(lambda: other.drafts(8, asked(8)) == [9, 9, 3])
        assert (folder / "history").stat().st_ino == inode
        other.leave()
    assert not folder.exists()


@pytest.mark.slow
def test_a_sibling_that_runs_on_another_rollout_is_drafted_from(tmp_path: Path, bus: Bus) -> None:
    """Seer: no answer to this prompt is finished."""
    ask(bus, 4)
    with rollouts(tmp_path / "bus", tmp_path / "node", 2) as both:
        _, reader = writer_of(both)
        append_records(bus, partial(3, 3, [5, 6, 7, 8, 9], "g3-0"))
        wait_for(lambda: reader.drafts(3, asked(3)) == [5, 6, 7, 8, 9])
        append_records(bus, partial(3, 8, [4, 2], "g3-0"))
        wait_for(lambda: reader.drafts(3, [7, 8, 9]) == [4, 2])


@pytest.mark.slow
def test_what_a_killed_run_left_is_thrown_away(tmp_path: Path, bus: Bus) -> None:
    """No process was left to remove it; the next run of this name starts with its own log."""
    folder = tmp_path / "node"
    append_records(bus, answer(7, [4, 5, 6, 7, 8]))
    with rollouts(tmp_path / "bus", folder, 1) as (killed,):
        wait_for(lambda: killed.drafts(7, asked(7)) == [4, 5, 6, 7, 8])
    assert (folder / "history").exists()
    empty = tmp_path / "again"
    empty.mkdir()
    log_in(empty).close()
    with rollouts(empty / "bus", folder, 2) as both:
        writer, reader = writer_of(both)
        assert reader.drafts(7, asked(7)) == []
        assert writer.drafts(7, asked(7)) == []
        writer.leave()
        reader.leave()
    assert not folder.exists()
