"""Counts the tokens in the KV cache of a simulated replica."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rollstream.simulator.workload import SimulatedTrajectory

PromptKey = tuple[int, int] | str
"""The trajectory's name if prompts are not shared."""


@dataclass(slots=True, eq=False)
class KvCache:
    """With `shares_prompts` a group's prompt is prefilled and cached once under each version, as in
    engines with a prefix cache. The caller adds generated tokens.
    """

    shares_prompts: bool = False
    tokens: int = 0
    prompts: Counter[PromptKey] = field(default_factory=Counter[PromptKey])
    """By prompt, the number of cached trajectories that use it."""

    def missing(self, trajectory: SimulatedTrajectory, version: int) -> int:
        """The trajectory's tokens that are not in the cache of this version."""
        if trajectory.is_held:
            return 0
        has_prompt = self.prompts[self._key(trajectory, version)] > 0
        return trajectory.done + (0 if has_prompt else trajectory.prompt)

    def add(self, trajectory: SimulatedTrajectory, version: int) -> int:
        """Returns the tokens to prefill, 0 if it is still held."""
        tokens = self.missing(trajectory, version)
        if not trajectory.is_held:
            trajectory.cached_under = version
            self.prompts[self._key(trajectory, version)] += 1
            self.tokens += tokens
        trajectory.is_held = False
        return tokens

    def remove(self, trajectory: SimulatedTrajectory) -> None:
        """Removes it, and the prompt if no other trajectory uses it."""
        key = self._key(trajectory, trajectory.cached_under)
        self.tokens -= trajectory.done
        self.prompts[key] -= 1
        if not self.prompts[key]:
            del self.prompts[key]
            self.tokens -= trajectory.prompt
        trajectory.is_held = False

    def compute_again(self, trajectories: Iterable[SimulatedTrajectory], version: int) -> None:
        """Replaces the content by these trajectories, computed under this version."""
        self.tokens = 0
        self.prompts.clear()
        for trajectory in trajectories:
            was_held, trajectory.is_held = trajectory.is_held, False
            self.add(trajectory, version)
            trajectory.is_held = was_held

    def _key(self, trajectory: SimulatedTrajectory, version: int) -> PromptKey:
        return (trajectory.group, version) if self.shares_prompts else trajectory.name
