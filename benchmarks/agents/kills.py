"""Kills processes of agents' runs at random moments and counts what was lost, trained twice, or
sampled again after it was answered (`agents_kills`).

For each seed two whole runs lose 25 processes in all: one with an outside service behind the role
`endpoint`, one with a function beside the rollout. Rollout, endpoint, agent and sandbox are killed.
At the end the audit and a recount of the log must be clean, no trajectory may be dead, and each
answer that a program of the last try noted must be in the trained record. A third part asks one
rollout for many turns, so that more of its kills meet a turn that is generated.
"""

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, alone
from testbed.agents.process import killed_episodes
from testbed.agents.run import killed_run

SEEDS = 3
SERVICE_KILLS, FUNCTION_KILLS = 13, 12
ROLLOUT_KILLS = 25


def cases(quick: bool) -> Iterator[Case]:
    """Three seeds (quick: one, with four kills a run)."""
    wrong = answers = retried = 0
    killed: Counter[str] = Counter()
    notes: list[str] = []
    for seed in range(1 if quick else SEEDS):
        for is_service, kills in ((True, SERVICE_KILLS), (False, FUNCTION_KILLS)):
            with tempfile.TemporaryDirectory() as folder:
                run = killed_run(Path(folder), 4 if quick else kills, seed, is_service)
            wrong, answers, retried = (
                wrong + run.wrong,
                answers + run.answers,
                retried + run.retried,
            )
            killed += run.kills
            notes += run.notes
        with tempfile.TemporaryDirectory() as folder:
            found = killed_episodes(Path(folder), 3 if quick else ROLLOUT_KILLS, seed, turns=20)
        wrong, answers = wrong + found.wrong, answers + found.turns
        killed["rollout"] += found.kills
        notes += found.notes
    kinds = ", ".join(f"{count} of the {kind}" for kind, count in sorted(killed.items()))
    note = f"{killed.total()} kills ({kinds}), {answers} answers, {retried} failed tries"
    text = "; ".join([note, *notes[:5]])
    yield alone("agents_kills", wrong, "episodes and answers", at_most=0, note=text)
