"""A task whose reference names the fault of its reward; imported by reward processes too."""

import math
import os
import re
from pathlib import Path

import numpy as np

from rollstream.producers.tasks.base import Score, TaskPrompt, Turns
from rollstream.producers.tasks.remainder import Remainder
from testbed.waiting import let_pass


class Odd(Remainder):
    """`reference` names the fault; anything else is scored 1."""

    name = "odd"

    def prompt(self, seed: int, position: int) -> TaskPrompt:
        return TaskPrompt((1,), "fine")

    def judge(self, reference: str, turns: Turns) -> Score:
        if reference == "raise":
            raise ZeroDivisionError("no such reward")
        if reference == "hang":
            let_pass(3600)
        if reference == "hang with the interpreter's lock":
            re.match(r"(a+)+$", "a" * 64 + "b")
        if reference == "exit":
            os._exit(7)
        if reference == "print":
            print("on standard output", flush=True)
        values = {"nan": math.nan, "infinite": math.inf, "none": None, "text": "1"}
        values["numpy"] = np.float32(0.5)
        if reference == "nothing":
            return None  # pyright: ignore
        if reference.startswith("/"):
            Path(reference).write_text(str(os.getpid()))
            let_pass(3600)
        if reference == "environment":
            return Score(1.0, {f"{name}={value}": 1.0 for name, value in os.environ.items()})
        return Score(values.get(reference, 1.0), {"length": float(len(turns[-1]))})  # pyright: ignore


class Unready(Odd):
    """Ends the process that builds it."""

    def __init__(self) -> None:
        os._exit(3)
