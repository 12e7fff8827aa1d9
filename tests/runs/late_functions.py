"""Scorer's functions of the late-reward tests."""

from zlib import crc32

from rollstream.producers.scoring.functions import Finished


def reward_and_length(finished: Finished) -> dict[str, float]:
    answer = finished.answer
    return {"reward": float("=" in answer), "length": float(len(answer))}


def by_name(finished: Finished) -> float:
    """Different within a group, the same at every call."""
    return crc32(finished.facts.trajectory.encode()) % 7 / 7


def fails_for_odd_groups(finished: Finished) -> float:
    if finished.facts.group % 2:
        raise RuntimeError("no reward today")
    return by_name(finished)
