"""Environments that answer later (`async def`), for runs and for the reward pool. What one does is
named in the prompt's reference or follows from it.
"""

import asyncio
import json
import os

from rollstream.producers.tasks.base import Reply, Score, TaskPrompt, Turns
from rollstream.producers.tasks.scripted import Scripted
from testbed.waiting import let_pass


class SlowScript(Scripted):
    """`scripted`, but each reply takes `reply_s`, and one of five answers hangs or makes the
    environment fail, as a function of the model's tokens.
    """

    name = "slow"

    def __init__(self, turns: int = 3, reply_s: float = 0.05, is_faulty: bool = True) -> None:
        super().__init__(turns)
        self._reply_s, self._is_faulty = reply_s, is_faulty
        # Every turn ends: a random model draws one of these soon.
        self.stop = tuple(range(0, self.tokenizer().size, 2))

    async def reply(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, reference: str, state: str, turns: Turns
    ) -> Reply:
        script = json.loads(reference)["script"]
        named = int(state or 1)
        if named >= len(script):
            return Reply(())
        fault = (sum(map(sum, turns)) + named) % 10 if self._is_faulty else 2
        if fault == 0:
            raise RuntimeError("the tool broke")
        await asyncio.sleep(60.0 if fault == 1 else self._reply_s)
        return Reply(tuple(self.tokenizer().encode(f"{script[named]}=")), str(named + 1))

    def judge(self, reference: str, turns: Turns) -> Score:
        return Score(float(sum(map(sum, turns)) % 3), {"turns": float(len(turns[::2]))})


class Faults(Scripted):
    """An environment whose reference names what its reply does."""

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        raise NotImplementedError("the pool's tests ask it directly")

    async def reply(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, reference: str, state: str, turns: Turns
    ) -> Reply:
        match reference:
            case "raise":
                raise ZeroDivisionError("one over nothing")
            case "hang":
                await asyncio.sleep(3600)
            case "time out":
                raise TimeoutError("the tool's own limit")
            case "cancel":
                raise asyncio.CancelledError
            case "block":
                let_pass(3600)
            case "die":
                os._exit(3)
            case "nothing":
                return None  # pyright: ignore[reportReturnType]
            case _:
                await asyncio.sleep(float(reference))
        return Reply((5,), state + "x")
