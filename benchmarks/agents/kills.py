"""Kills a rollout at random moments while programs ask it for turns, and counts episodes or answers
that were lost, answered turns that were sampled again, and answers that the trained record has
otherwise than the program saw (`agents_kills`).
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.agent_process import killed_episodes

SEEDS, KILLS = 3, 25


def cases(quick: bool) -> Iterator[Case]:
    seeds, kills = (1, 3) if quick else (SEEDS, KILLS)
    wrong = turns = retries = killed = 0
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as folder:
            found = killed_episodes(Path(folder), kills, seed, turns=20)
        wrong += found.wrong
        turns += found.turns
        retries += found.retries
        killed += found.kills
    note = f"{killed} kills of the rollout, {turns} turns, {retries} requests repeated by programs"
    yield alone("agents_kills", wrong, "episodes and answers", at_most=0, note=note)
