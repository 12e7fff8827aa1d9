"""Kills processes of agents' runs at random moments and counts what was lost, trained twice, or
sampled again after it was answered (`agents_kills`).

For each seed whole runs lose 25 processes in all: some with an outside service behind the role
`endpoint`, some with a function beside the rollout. Rollout, endpoint, agent and sandbox are
killed. At the end of each the audit and a recount of the log must be clean, no trajectory may be
dead, and each answer that a program of the last try noted must be in the trained record. A further
piece asks one rollout for many turns, so that more of its kills meet a turn that is generated.

Each piece takes a few minutes, and its result is kept in a folder of the system's temporary ones
until all are measured: an interrupted benchmark resumes. `python -m benchmarks.agents.kills 1`
measures the next piece.
"""

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.kept import kept, kept_folder
from testbed.agents.process import killed_episodes
from testbed.agents.run import killed_run

SEEDS = 3
SERVICE, FUNCTION, WANDERING, ROLLOUT = "service", "function", "wandering", "rollout"
PIECES = ((SERVICE, 7), (SERVICE, 6), (FUNCTION, 6), (WANDERING, 6), (ROLLOUT, 25))
QUICK_PIECES = ((SERVICE, 4), (WANDERING, 4), (ROLLOUT, 3))


@dataclass(frozen=True, slots=True)
class Piece:
    """One run or rollout that loses `kills` processes; `kind` names its program."""

    kind: str
    kills: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.seed:03d}-{self.kind}-{self.kills}.json"


@dataclass(frozen=True, slots=True)
class PieceCounts:
    """Counts of one piece."""

    wrong: int
    answers: int
    retried: int = 0
    abandoned: int = 0
    kills: dict[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])


def pieces(quick: bool) -> list[Piece]:
    """Returns all pieces; each has a seed of its own."""
    chosen, seeds = (QUICK_PIECES, 1) if quick else (PIECES, SEEDS)
    return [
        Piece(kind, kills, 10 * seed + number)
        for seed in range(seeds)
        for number, (kind, kills) in enumerate(chosen)
    ]


def measured(piece: Piece, folder: Path) -> PieceCounts:
    """Returns the counts of a piece: those that are kept, or new ones, which are kept then."""
    return PieceCounts(**kept(folder / piece.name, lambda: asdict(_measure(piece))))


def _measure(piece: Piece) -> PieceCounts:
    with tempfile.TemporaryDirectory() as folder:
        if piece.kind == ROLLOUT:
            found = killed_episodes(Path(folder), piece.kills, piece.seed, turns=20)
            killed = {ROLLOUT: found.kills}
            return PieceCounts(found.wrong, found.turns, kills=killed, notes=found.notes)
        run = killed_run(
            Path(folder), piece.kills, piece.seed, piece.kind == SERVICE, piece.kind == WANDERING
        )
        return PieceCounts(
            run.wrong, run.answers, run.retried, run.abandoned, dict(run.kills), run.notes
        )


def cases(quick: bool) -> Iterator[Case]:
    """Three seeds (quick: one, with fewer kills)."""
    folder = kept_folder("agents-kills", quick)
    found = [measured(piece, folder) for piece in pieces(quick)]
    killed: Counter[str] = Counter()
    for one in found:
        killed.update(one.kills)
    kinds = ", ".join(f"{count} of the {kind}" for kind, count in sorted(killed.items()))
    note = (
        f"{killed.total()} kills ({kinds}), {sum(one.answers for one in found)} answers, "
        f"{sum(one.retried for one in found)} failed tries, "
        f"{sum(one.abandoned for one in found)} turns of programs that took another way"
    )
    notes = [text for one in found for text in one.notes]
    wrong = sum(one.wrong for one in found)
    text = "; ".join([note, *notes[:5]])
    yield alone("agents_kills", wrong, "episodes and answers", at_most=0, note=text)
    shutil.rmtree(folder)


def main(most: int) -> None:
    """Measure the next pieces, at most this many, and print all that are kept."""
    folder = kept_folder("agents-kills", quick=False)
    missing = [piece for piece in pieces(quick=False) if not (folder / piece.name).exists()]
    for piece in missing[:most]:
        measured(piece, folder)
    for piece in pieces(quick=False):
        if (folder / piece.name).exists():
            print(piece.name, measured(piece, folder), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS * len(PIECES))
