"""A task whose environment sleeps and does nothing else (`Sleeping`), for runs on the engine
`paced`. `task.name = "benchmarks.agents.sleeping:Sleeping"`.

How long a reply takes, and whether an episode hangs, is a function of the prompt, the generated
tokens and the options, so both arms of a pair meet the same environments.
"""

import asyncio
import json
from collections.abc import Callable

import numpy as np
import xxhash

from rollstream.producers.tasks.base import Reply, Turns
from rollstream.producers.tasks.scripted import Numbered

HANG_S = 3600.0  # longer than any limit
PARETO = 1.5

SHAPES: dict[str, Callable[[np.random.Generator], float]] = {
    "gauss": lambda random: max(1.0, random.normal(10.0, 5.0)),
    # Of the same mean: x_m · 1.5 / 0.5 = 10 s.
    "pareto": lambda random: (10.0 / 3.0) * (1.0 + random.pareto(PARETO)),
    "fixed": lambda random: 10.0,
}
"""Latency of one reply in seconds."""


class Sleeping(Numbered):
    """The prompts and rewards of `numbered`, in dialogues of `turns` turns. A reply comes after a
    latency of the given shape times `scale`; a share `hang` of the episodes hangs at a turn.
    """

    def __init__(
        self,
        prompts: int = 4096,
        prompt_tokens: int = 16,
        turns: int = 2,
        shape: str = "gauss",
        scale: float = 1.0,
        hang: float = 0.0,
    ) -> None:
        super().__init__(prompts, prompt_tokens)
        self._turns, self._shape, self._scale, self._hang = turns, SHAPES[shape], scale, hang

    async def reply(self, reference: str, state: str, turns: Turns) -> Reply:
        """Sleep, then answer with one token; without tokens, at once, after the last turn."""
        replied = int(state or 0)
        if replied + 1 >= self._turns:
            return Reply(())
        answer = np.array([token for turn in turns for token in turn], "<u4").tobytes()
        seed = json.loads(reference)["number"]
        random = np.random.default_rng(xxhash.xxh3_64_intdigest(answer, seed=seed))
        is_hanging = random.random() < self._hang / max(1, self._turns - 1)
        await asyncio.sleep(HANG_S if is_hanging else self._shape(random) * self._scale)
        return Reply((7,), str(replied + 1))
