"""A planner that moves all that it can and postpones some, so that moves meet crashes and
completions in every phase.
"""

import random
from collections import Counter
from dataclasses import dataclass

from rollstream.consumers.dispatch.assignments import is_serving, release_record
from rollstream.consumers.dispatch.lengths import LengthHistory
from rollstream.consumers.dispatch.moves import RepackPlan, RepackPlanner, is_generating
from rollstream.consumers.dispatch.state import DispatchState
from rollstream.streams.records import Assignment


@dataclass(slots=True, kw_only=True)
class Restless(RepackPlanner):
    """Asks one in three running trajectories back at each look."""

    random: random.Random
    asked: Counter[str]

    def plan(self, state: DispatchState, lengths: LengthHistory, now_s: float) -> RepackPlan:
        begun = [t for t, o in sorted(state.assignments.items()) if is_generating(state, t, o)]
        chosen = [t for t in begun if self.random.random() < 0.3]
        restarts = tuple(t for t in chosen if self.random.random() < 0.2)
        releases = [self._release(state, t) for t in chosen if t not in restarts]
        self.asked.update({"asked back": len(releases), "put off": len(restarts)})
        return RepackPlan(tuple(r for r in releases if r is not None), restarts)

    def _release(self, state: DispatchState, trajectory: str) -> Assignment | None:
        """Moves to any serving rollout; the rollout itself must detect another version."""
        order, group = state.assignments[trajectory], state.groups[int(trajectory.split(".")[0])]
        others = [n for n, s in sorted(state.rollouts.items()) if is_serving(s)]
        if group.prompt is None or not others:
            return None
        return release_record(group.prompt, trajectory, order, self.random.choice(others))
