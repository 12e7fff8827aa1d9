"""The remainder task with a reward that fails for every second prompt: by raising, hanging or
NaN.
"""

import json
from dataclasses import replace

from rollstream.producers.tasks.base import Score, TaskPrompt, Turns
from rollstream.producers.tasks.remainder import Remainder
from testbed.waiting import let_pass


class Failing(Remainder):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        prompt = super().prompt(seed, position)
        reference = json.dumps({"of": prompt.reference, "fails": position % 2})
        return replace(prompt, reference=reference)

    def judge(self, reference: str, turns: Turns) -> Score:
        asked = json.loads(reference)
        if asked["fails"] and self.fault == "raises":
            raise ValueError("no reward today")
        if asked["fails"] and self.fault == "hangs":
            let_pass(60)
        if asked["fails"]:
            return Score(float("nan"))
        return super().judge(asked["of"], turns)
