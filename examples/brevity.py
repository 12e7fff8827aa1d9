"""A scorer's function: right answers are worth 1, and short ones a little more.

`rollstream score` calls it with each finished trajectory, in a process of its own.
"""

import json

from rollstream.api import Finished

LONG = 120  # characters of an answer that earns nothing for brevity


def score(finished: Finished) -> dict[str, float]:
    """A number for each of `scoring.names`."""
    answer = finished.answer
    wanted = json.loads(finished.reference)["answer"]
    right = finished.facts.finish == "stop" and answer.rpartition("=")[1:] == ("=", wanted)
    return {"reward": float(right), "brevity": max(0.0, 1 - len(answer) / LONG)}
