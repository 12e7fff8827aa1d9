"""Any schedule of submit, poll, abort and update against recomputing everything from scratch."""

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from rollstream.producers.engines.base import WeightUpdate
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.sampling import draw_tokens, plan_sampling
from rollstream.streams.values import Sampling, Tokens, Version
from tests.support.engine_samples import (
    Gained,
    ask,
    gather,
    open_torch,
    prompt,
    resumed,
    tiny_model,
)

MODELS = {number: tiny_model("qwen3", number) for number in (1, 2)}
SAMPLING = Sampling(temperature=0.9, tokens_max=80, stop=(2,))


def reference(name: str, start: Tokens, versions: list[int]) -> tuple[list[int], list[float]]:
    """Token by token from scratch, each under its version (as after a recompute)."""
    tokens, logprobs = start.tolist(), []
    plan = plan_sampling([SAMPLING], torch.device("cpu"))
    key = np.array([trajectory_key(7, name)], np.uint64)
    for version in versions:
        with torch.inference_mode():
            logits = MODELS[version](torch.tensor([tokens])).logits[:, -1]
        drawn = torch.from_numpy(uniforms(key, np.array([len(tokens)])))[:, None]
        token, logprob = draw_tokens(logits, plan, drawn)
        tokens.append(int(token))
        logprobs.append(float(logprob))
    return tokens[len(start) :], logprobs


def check_schedule(
    engine: TorchEngine,
    actions: list[tuple[str, int]],
    prompt_seeds: int = 10,
    on_switch: Callable[[], None] = lambda: None,
) -> None:
    """Runs the actions and compares all generated tokens with recomputing; prompts are drawn from
    so many seeds.
    """
    requests, gained = {}, {}
    for number, (action, pick) in enumerate(actions):
        names = engine.running()
        if action == "submit":
            name = f"t{number}"
            requests[name] = ask(name, prompt(1 + pick, pick % prompt_seeds), SAMPLING)
            engine.submit(requests[name])
        elif action == "poll":
            for _ in range(1 + 2 * pick):
                gather(gained, engine.poll(0.0))
        elif action == "move" and names:
            name = names[pick % len(names)]
            rest = engine.abort(name)
            gather(gained, [rest] if rest else [])
            engine.submit(resumed(requests[name], gained.get(name, Gained())))
        elif action == "update":
            version = 1 + pick % 2
            tensors = MODELS[version].state_dict()
            engine.update(WeightUpdate(Version(version, 1), tensors), "in_flight_recompute")
        elif action == "switch":
            on_switch()
    while emissions := engine.poll(10.0):
        gather(gained, emissions)
    assert not engine.running()
    for name, mine in gained.items():
        versions = [version.number for version, count in mine.spans for _ in range(count)]
        tokens, logprobs = reference(name, requests[name].tokens, versions)
        assert mine.tokens == tokens
        np.testing.assert_allclose(mine.logprobs, logprobs, atol=1e-4, rtol=0)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["submit", "poll", "poll", "move", "update"]), st.integers(0, 9)),
        min_size=8,
        max_size=40,
    )
)
def test_any_schedule_equals_recomputing_everything(actions: list[tuple[str, int]]) -> None:
    """Invariants 3 and 10 under submits, moves to the same engine and updates in any order."""
    engine = open_torch(MODELS[1], slots=3, context_max=96, emit_every=7)
    check_schedule(engine, actions)
