"""Ranks of a sharded learner as processes of a test, on free ports of 127.0.0.1."""

import json
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testbed.repository import ROOT
from testbed.servers import free_ports
from testbed.waiting import WAIT_S
from tests.trainer.sharded.forked_ranks import ForkedRank

NO_ENVIRONMENTS: Mapping[int, Mapping[str, str]] = {}


@contextmanager
def ranks(
    folder: Path,
    size: int,
    jobs: Sequence[str],
    timeout_s: float = 120.0,
    environments: Mapping[int, Mapping[str, str]] = NO_ENVIRONMENTS,
    **changed: object,
) -> Generator[list[ForkedRank]]:
    """The processes, rank 0 first, each writing to FOLDER/rank-N.log; none is left afterwards.
    `environments` holds variables of single ranks.
    """
    folder.mkdir(exist_ok=True)
    started: list[ForkedRank] = []
    port = str(free_ports(1)[0])
    words = [str(folder), str(timeout_s), json.dumps(changed), *jobs]
    try:
        for rank in range(size):
            environment = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environments.get(rank, {}),
            }  # fmt: skip
            started.append(ForkedRank(folder / f"rank-{rank}.log", environment, words))
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait(WAIT_S)


def run_ranks(folder: Path, size: int, jobs: Sequence[str], **changed: object) -> dict[str, Any]:
    """Waits until all have ended well; returns rank 0's results."""
    with ranks(folder, size, jobs, **changed) as started:  # pyright: ignore[reportArgumentType]
        for rank, process in enumerate(started):
            assert process.wait(WAIT_S) == 0, rank_output(folder, rank)
    return found(folder)


def found(folder: Path) -> dict[str, Any]:
    """By rank 0."""
    return json.loads((folder / "result.json").read_text())


def rank_output(folder: Path, rank: int) -> str:
    return (folder / f"rank-{rank}.log").read_text()
