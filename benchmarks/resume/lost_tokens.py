"""Tokens lost with a killed rollout: generated, but in no partial and no completion.

The rollout reports in its status how many tokens it has generated; those in the log are subtracted.
Tokens since its last status (`rollouts.status_s`) are not counted.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

from rollstream.streams.records import Partial, RolloutStatus, Trajectory
from testbed.run_process import read


@dataclass(frozen=True, slots=True)
class Lost:
    """The lost tokens, and the trajectories that the rollout had running."""

    tokens: int
    running: int

    def __str__(self) -> str:
        each = self.tokens / self.running if self.running else 0.0
        return (
            f"generation lost after a rollout kill: {self.tokens} tokens of {self.running} running "
            f"trajectories, {each:.0f} each"
        )


def tokens_lost(folder: Path, rollout: psutil.Process) -> Lost:
    """Kills the first rollout of that name in this run."""
    name = next(word for word in rollout.cmdline() if word.startswith("rollout-"))
    rollout.kill()
    reported = [
        s for s in read(folder, "status", RolloutStatus) if (s.rollout, s.term) == (name, 1)
    ]
    last = max(reported, key=lambda status: status.time_s)
    done = _tokens(read(folder, "trajectories", Trajectory), name)
    begun = _tokens(read(folder, "partials", Partial), name)
    kept = sum(done.values()) + sum(n for one, n in begun.items() if one not in done)
    return Lost(max(0, last.tokens_total - kept), last.running)


def _tokens(records: list[Trajectory] | list[Partial], name: str) -> dict[str, int]:
    """Generated tokens by trajectory, of the rollout's first term; partials are summed."""
    found: dict[str, int] = {}
    for record in records:
        if (record.rollout, record.rollout_term) == (name, 1):
            generated = len(record.logprobs)
            found[record.trajectory] = found.get(record.trajectory, 0) + generated
    return found
