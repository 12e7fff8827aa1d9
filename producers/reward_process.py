"""The process in which a task's own code runs: questions come in on a pipe, answers go out, in the
same order.

It ends when its parent does, however that ended: a thread sees the pipe close even while a
judgement hangs, and code that also holds the interpreter's lock runs out of the CPU time of its
alarm. Started by `producers.rewards` as
`python -m producers.reward_process SETTINGS [FUNCTION]`, SETTINGS the task's as JSON.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import msgspec

from producers.reward_answers import Answer, Question, answer
from producers.scoring.function import load_function
from producers.tasks.described import PlainTask
from producers.tasks.registry import load_task
from streams.errors import ConfigurationError


def _questions(source: int) -> Iterator[Question]:
    """What arrives on the pipe; the process exits at its end."""
    arrived: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    decoder = msgspec.json.Decoder(Question)
    while True:
        yield decoder.decode(arrived.get())


def _own_pipes() -> tuple[int, int]:
    """Keep the pipes under other numbers: what a task prints goes to stderr, what it reads is
    empty.
    """
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def main(settings: str, function_path: str = "") -> None:
    """Greet (or say why not) once the task is built, then answer until the pipe closes."""
    asked = msgspec.json.decode(settings, type=PlainTask)
    source, sink = _own_pipes()
    encode = msgspec.json.Encoder().encode
    with open(sink, "wb", buffering=0) as out:
        try:
            task = load_task(asked)
            function = load_function(function_path) if function_path else None
        except ConfigurationError as error:
            out.write(encode(Answer("failed", reason=str(error))) + b"\n")
            return
        out.write(encode(Answer("score")) + b"\n")
        for question in _questions(source):
            # CPU seconds, twice what the parent grants: it matters only when there is no parent any
            # more.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * asked.reward_timeout_s + 1)
            out.write(encode(answer(task, function, question)) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
