"""Drafts from shared memory change no token, under any memory contents (invariant 10)."""

import mmap
import threading
from pathlib import Path

import numpy as np
import pytest

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.history import AnswerHistory, prompt_key
from rollstream.producers.drafts.node import CombinedSource, NodeHistory
from rollstream.streams.values import Sampling
from tests.engines.torch.test_engine_drafts import asked, assert_same, drafting
from tests.support.engine_samples import run_all, tiny_model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_are_the_same_while_the_memory_is_scribbled_over(
    tmp_path: Path, temperature: float
) -> None:
    """Half of the stored answers are wrong, so that some drafts are accepted and some not."""
    model, requests = tiny_model("qwen3"), asked(Sampling(temperature, stop=(2,)))
    plain = run_all(drafting(model, AnswerHistory(64), gate=DraftGate(forced=False)), requests)
    node, drawn = NodeHistory(tmp_path / "node", 1 << 13), np.random.default_rng(0)
    history = node.take_over()
    assert history is not None
    for request in requests:
        answer = np.array(plain[request.trajectory].tokens, np.uint32)
        if drawn.random() < 0.5:
            answer = drawn.integers(0, 200, len(answer)).astype(np.uint32)
        tokens = np.concatenate((request.tokens, answer))
        key = prompt_key(request.tokens, request.sources)
        history.insert(key, request.group, tokens, len(answer), 1.0)
    source, over = CombinedSource(node, AnswerHistory(1024)), threading.Event()
    whole = run_all(drafting(model, source), requests)  # pyright: ignore[reportArgumentType]
    scribbler = threading.Thread(target=scribble, args=(node.path, over))
    scribbler.start()
    torn = run_all(drafting(model, source), requests)  # pyright: ignore[reportArgumentType]
    over.set()
    scribbler.join()
    for request in requests:
        wanted = plain[request.trajectory].tokens
        for drafted in (whole, torn):
            assert_same(model, request, wanted, drafted[request.trajectory].tokens)
    node.leave()


def scribble(path: Path, over: threading.Event) -> None:
    """Random bytes over table and ring, a few at a time, so that some drafts survive."""
    drawn, size = np.random.default_rng(1), path.stat().st_size
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        while not over.is_set():
            start = int(drawn.integers(0, size - 64))
            memory[start : start + 64] = drawn.bytes(64)
