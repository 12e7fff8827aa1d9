"""The remainder task with rewards that are equal for every second prompt, whatever the answer."""

import json
from dataclasses import replace

from rollstream.producers.tasks.base import Score, TaskPrompt, Turns
from rollstream.producers.tasks.remainder import Remainder


class HalfEqual(Remainder):
    def prompt(self, seed: int, position: int) -> TaskPrompt:
        prompt = super().prompt(seed, position)
        return replace(prompt, reference=json.dumps({"equal": position % 2 == 0}))

    def judge(self, reference: str, turns: Turns) -> Score:
        if json.loads(reference)["equal"]:
            return Score(1.0)
        return Score(float(sum(map(sum, turns)) % 7))
