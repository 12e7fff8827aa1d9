"""The process in which a task's own code runs: questions arrive on a pipe, answers leave in the
same order.

It ends when its parent ends, for whatever reason: a thread sees the pipe close even while a
judgement hangs, and a CPU-time alarm ends code that also holds the interpreter's lock.
`rollstream.producers.rewards.pool` starts it as `python -m rollstream.producers.rewards.reward_process SETTINGS [FUNCTION]`, with the
task's settings as JSON.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import msgspec

from rollstream.producers.rewards.process import RewardAnswer, RewardQuestion, answer_question
from rollstream.producers.scoring.function import load_function
from rollstream.producers.tasks.described import PlainTask
from rollstream.producers.tasks.registry import load_task
from rollstream.errors import ConfigurationError


def _read_questions(source: int) -> Iterator[RewardQuestion]:
    """Yield the questions that arrive on the pipe; the process exits at the pipe's end."""
    arrived: SimpleQueue[bytes] = SimpleQueue()

    def read() -> None:
        with open(source, "rb") as lines:
            for line in lines:
                arrived.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    decoder = msgspec.json.Decoder(RewardQuestion)
    while True:
        yield decoder.decode(arrived.get())


def _claim_pipes() -> tuple[int, int]:
    """Move the pipes to other descriptors. The task's prints go to stderr, and its
    stdin is empty.
    """
    source, sink = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    return source, sink


def main(settings: str, function_path: str = "") -> None:
    """Write a greeting once the task is built, or the reason why it cannot be built. Then answer
    until the pipe closes.
    """
    description = msgspec.json.decode(settings, type=PlainTask)
    source, sink = _claim_pipes()
    encode = msgspec.json.Encoder().encode
    with open(sink, "wb", buffering=0) as out:
        try:
            task = load_task(description)
            function = load_function(function_path) if function_path else None
        except ConfigurationError as error:
            out.write(encode(RewardAnswer("failed", reason=str(error))) + b"\n")
            return
        out.write(encode(RewardAnswer("score")) + b"\n")
        for question in _read_questions(source):
            # CPU seconds, twice the parent's limit: it takes effect only after the parent's death.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * description.reward_timeout_s + 1)
            out.write(encode(answer_question(task, function, question)) + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
