"""Scorer's functions that the tests give to real scoring processes."""

import os
from pathlib import Path

from rollstream.producers.scoring.functions import Finished
from testbed.waiting import let_pass


def facts(finished: Finished) -> dict[str, float]:
    """Scores made of every argument that a function gets."""
    return {
        "length": float(len(finished.answer)),
        "group": float(finished.facts.group),
        "asked": float(finished.prompt == "336%68"),
        "right": float(finished.reference == "right"),
    }


def lone(finished: Finished) -> float:
    return 2.5


async def later(finished: Finished) -> float:
    return 1.0


def paired(finished: Finished) -> object:
    return 1.0, {"quality": 0.5}


def misbehaves(finished: Finished) -> object:
    """Returns the score that the reference names. For `hangs PATH` it makes that file first."""
    if finished.reference == "raises":
        raise ZeroDivisionError("no such quality")
    if finished.reference.startswith("hangs "):
        Path(finished.reference.partition(" ")[2]).touch()
        let_pass(600)
    if finished.reference == "exits":
        os._exit(9)
    results = {
        "text": "good",
        "nan": float("nan"),
        "huge": 1e300,
        "wide": -2e6,
        "less": {"other": 1.0},
    }
    return results.get(finished.reference, {"quality": 1.0, "other": 0.5})


def waits_for_file(finished: Finished) -> float:
    """Writes a note, and ends when a file appears: the reference is a folder."""
    folder = Path(finished.reference)
    (folder / "began").touch()
    while not (folder / "end").exists():
        let_pass(0.01)
    return 1.0
