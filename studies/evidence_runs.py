"""`python -m studies.evidence_runs`: makes runs of the evidence, one after the other, and writes
a row for each (`studies/evidence/rows.py`). A finished one is not repeated, an interrupted one
continues; `python -m benchmarks evidence` prints what the rows say.

A run takes about 40 s of one idle core. Any number can be made at any time, in any order and by
several processes: seeds of all arms of one choice first, so that every new run gives a new pair.
"""

import argparse
import fcntl
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from studies.evidence.arms import ARMS, MADE, WORLDS
from studies.evidence.pieces import Piece, replayed_hash, run_piece
from studies.evidence.rows import by_seed, read_rows

SCRATCH = Path(tempfile.gettempdir()) / "rollstream-evidence"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m studies.evidence_runs",
        description="Make runs of the evidence that have no row yet.",
        epilog="example: python -m studies.evidence_runs --arms lag0 lag8 --seeds 5 --runs 2",
    )
    parser.add_argument("--worlds", nargs="+", choices=WORLDS, default=list(WORLDS)[:1])
    arms = [arm.name for arm in MADE]
    parser.add_argument("--arms", nargs="+", choices=arms, default=["lag0", "lag8"])
    parser.add_argument("--seeds", type=int, default=5, help="seeds 0 to N − 1 (default 5)")
    parser.add_argument("--first", type=int, default=0, help="leave out seeds below this one")
    parser.add_argument("--runs", type=int, default=None, help="end after so many new runs")
    parser.add_argument("--scratch", type=Path, default=SCRATCH, help=f"default {SCRATCH}")
    parser.add_argument("--replay", action="store_true", help="train the committed logs again")
    parser.add_argument("--list", action="store_true", help="print what is done and what is not")
    chosen = parser.parse_args(arguments)
    pieces = [
        Piece(WORLDS[world], ARMS[arm], seed)
        for seed in range(chosen.first, chosen.seeds)
        for world in chosen.worlds
        for arm in chosen.arms
    ]
    if chosen.list:
        print("\n".join(f"{'done' if one.is_done() else 'open'} {one.name}" for one in pieces))
        return
    if chosen.replay:
        sys.exit(replay([one for one in pieces if one.has_log and one.is_done()], chosen.scratch))
    made = 0
    for piece in pieces:
        with claimed(piece, chosen.scratch) as is_ours:
            if is_ours and not piece.is_done() and made != chosen.runs:
                began_s = time.monotonic()
                path = run_piece(piece, chosen.scratch, lambda line: print(line, flush=True))
                print(f"{piece.name}: {path}, {time.monotonic() - began_s:.0f} s", flush=True)
                made += 1


def replay(pieces: Sequence[Piece], scratch: Path) -> int:
    """Train the log of each piece, and print whether the hash is its row's; returns how many are
    not.
    """
    rows, differing = list(read_rows()), 0
    for piece in pieces:
        expected = by_seed(rows, piece.world.name, piece.arm.name)[piece.seed].state_hash
        is_same = replayed_hash(piece, scratch) == expected
        differing += not is_same
        print(f"{piece.name}: {'the same' if is_same else 'another'} hash", flush=True)
    return differing


@contextmanager
def claimed(piece: Piece, scratch: Path) -> Generator[bool]:
    """Yields whether no other process on this machine makes the piece, and holds it meanwhile."""
    scratch.mkdir(parents=True, exist_ok=True)
    with (scratch / f"{piece.name.replace(' ', '-')}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


if __name__ == "__main__":
    main()
