"""Drafts change only the number of tokens per pass (invariant 10).

Tokens with and without drafts are compared as they are; where they differ, the difference must be
one of rounding: the uniform of that position is within 1e-5 of the boundary between both tokens. A
matrix product over several tokens rounds otherwise than over one, so nothing stricter is true.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import PreTrainedModel

from rollstream.producers.drafts.gate import MULTIPLICATIVE, DraftGate
from rollstream.producers.drafts.history import AnswerHistory, prompt_key
from rollstream.producers.engines.base import GenerationRequest, WeightUpdate
from rollstream.producers.engines.drafting import Draft
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.randomness import trajectory_key, uniforms
from rollstream.producers.engines.torch.draft_verify import BatchSpeculation
from rollstream.producers.engines.torch.engine import TorchEngine
from rollstream.producers.engines.torch.rows import TorchSequence
from rollstream.streams.values import Drafts, Sampling, Version, accepted_tokens, join_drafts
from tests.engines.torch.test_engine_schedules import MODELS, check_schedule
from tests.support.engine_samples import (
    V1,
    Gained,
    ask,
    chosen_logprobs,
    gather,
    plain_logprobs,
    prompt,
    run_all,
    tiny_model,
)


def drafting(
    model: PreTrainedModel,
    history: AnswerHistory,
    slots: int = 4,
    context_max: int = 96,
    emit_every: int = 64,
    gate: DraftGate | None = None,
) -> TorchEngine:
    return TorchEngine(
        model.config,
        model.state_dict(),
        V1,
        EngineOptions(
            slots, context_max, emit_every, drafts=history, gate=gate or DraftGate(forced=True)
        ),
    )


def history_of(
    requests: list[GenerationRequest], gained: dict[str, Gained], wrong: float = 0.0, seed: int = 0
) -> AnswerHistory:
    """The generated tokens, a share of them replaced by others."""
    history, drawn = AnswerHistory(1 << 14), np.random.default_rng(seed)
    for request in requests:
        answer = np.array(gained[request.trajectory].tokens, np.uint32)
        changed = drawn.random(len(answer)) < wrong
        answer[changed] = drawn.integers(0, 19, int(changed.sum()))
        tokens = np.concatenate((request.tokens, answer))
        key = prompt_key(request.tokens, request.sources)
        history.insert(key, request.group, tokens, len(answer), 1.0)
    return history


def asked(sampling: Sampling, count: int = 12) -> list[GenerationRequest]:
    """Several samples of a few prompts, of different lengths."""
    return [
        ask(
            f"t{i}", prompt(1 + i % 5, i // 3), sampling_of(sampling, 20 + 9 * i % 50), group=i // 3
        )
        for i in range(count)
    ]


def sampling_of(sampling: Sampling, tokens_max: int) -> Sampling:
    return Sampling(sampling.temperature, sampling.top_k, sampling.top_p, tokens_max, sampling.stop)


def assert_same(
    model: PreTrainedModel, request: GenerationRequest, plain: list[int], drafted: list[int]
) -> None:
    """Equal tokens, or a first difference that rounding explains."""
    if plain == drafted:
        return
    at = next(i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b)
    known = [*request.tokens.tolist(), *plain[:at]]
    logits = plain_logprobs(model, known)[-1] / (request.sampling.temperature or 1.0)
    edges = logits.double().softmax(-1).cumsum(-1)
    key = np.array([trajectory_key(request.seed, request.trajectory)], np.uint64)
    drawn = uniforms(key, np.array([len(known)]))[0]
    low, high = sorted((plain[at], drafted[at]))
    assert high == low + 1
    assert abs(float(edges[low]) - drawn) < 1e-5, f"token {at} of {request.trajectory} differs"


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "gpt2"])
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 1.5])
def test_tokens_with_drafts_are_those_without(family: str, temperature: float) -> None:
    """Invariant 10, with accepted and with rejected drafts."""
    model = tiny_model(family)
    requests = asked(Sampling(temperature, stop=(2,)))
    plain = run_all(drafting(model, AnswerHistory(64), gate=DraftGate(forced=False)), requests)
    for wrong in (0.0, 0.3, 1.0):
        drafted = run_all(drafting(model, history_of(requests, plain, wrong)), requests)
        for request in requests:
            mine, other = drafted[request.trajectory], plain[request.trajectory]
            assert_same(model, request, other.tokens, mine.tokens)
            assert mine.finish == other.finish


def test_log_probabilities_are_those_of_the_model() -> None:
    model = tiny_model("qwen3")
    requests = asked(Sampling(1.0, stop=(2,)))
    history = history_of(requests, run_all(drafting(model, AnswerHistory(64)), requests), wrong=0.2)
    for name, mine in run_all(drafting(model, history), requests).items():
        request = next(r for r in requests if r.trajectory == name)
        wanted = chosen_logprobs(model, request.tokens, mine.tokens)
        np.testing.assert_allclose(mine.logprobs, wanted.numpy(), atol=1e-4)


def test_right_drafts_come_many_per_pass_and_never_beyond_the_end() -> None:
    """A stop token and `tokens_max` end a sequence in the middle of a draft."""
    model = tiny_model("qwen3")
    requests = [ask("t0", prompt(5), Sampling(1.0, tokens_max=40))]
    plain = run_all(drafting(model, AnswerHistory(64)), requests)
    engine = drafting(model, history_of(requests, plain))
    assert run_all(engine, requests)["t0"].tokens == plain["t0"].tokens
    assert engine.stats().steps <= 10
    assert engine.stats().tokens == 40
    stop = plain["t0"].tokens[25]
    first = plain["t0"].tokens.index(stop)
    for sampling in (
        Sampling(1.0, tokens_max=40, stop=(stop,)),
        Sampling(1.0, tokens_max=first + 1),
    ):
        engine = drafting(model, history_of(requests, plain))
        short = run_all(engine, [ask("t0", prompt(5), sampling)])["t0"]
        assert short.tokens == plain["t0"].tokens[: first + 1]
        assert short.finish == ("stop" if sampling.stop else "length")


def test_emissions_mark_accepted_tokens() -> None:
    """They add up to the engine's counts; a token is marked where history had it."""
    model = tiny_model("qwen3")
    requests = asked(Sampling(1.0, stop=(2,)))
    plain = run_all(drafting(model, AnswerHistory(64), gate=DraftGate(forced=False)), requests)
    engine = drafting(model, history_of(requests, plain, 0.1), emit_every=7)
    parts: dict[str, list[tuple[int, Drafts | None]]] = {}
    for request in requests:
        engine.submit(request)
    while engine.running():
        for emission in engine.poll(0.0):
            part = (len(emission.tokens), emission.drafts)
            parts.setdefault(emission.trajectory, []).append(part)
    whole = {name: join_drafts(part) for name, part in parts.items()}
    reported = [drafts for drafts in whole.values() if drafts is not None]
    assert len(reported) == len(requests)
    assert max(map(len, parts.values())) > 1
    for name, drafts in whole.items():
        assert drafts is not None
        assert sum(drafts.runs) == len(plain[name].tokens)
    counted = engine.stats().drafts
    assert sum(map(accepted_tokens, reported)) == counted.accepted > 0
    assert sum(drafts.guessed for drafts in reported) == counted.proposed > counted.accepted
    assert sum(drafts.asked for drafts in reported) == counted.asked
    assert sum(drafts.found for drafts in reported) == counted.found
    assert sum(drafts.steps for drafts in reported) == counted.rows
    assert sum(drafts.lookup_s for drafts in reported) == pytest.approx(counted.lookup_s, rel=0.01)


def test_where_nothing_is_drafted_emissions_mark_nothing_or_zero() -> None:
    """Without drafts records have no draft fields; while the gate is off every token is the model's
    own.
    """
    model, request = tiny_model("qwen3"), ask("t0", prompt(5), Sampling(1.0, tokens_max=30))
    for drafts, wanted in ((None, None), (AnswerHistory(64), Drafts((30,), 30, 0, 0, 0, 0.0))):
        engine = TorchEngine(
            model.config, model.state_dict(), V1, EngineOptions(4, 96, drafts=drafts)
        )
        engine.submit(request)
        assert [emission.drafts for emission in engine.poll(60.0)] == [wanted]


def test_rows_drawn_differently_share_a_pass() -> None:
    model = tiny_model("qwen3")
    kinds = [Sampling(0.0), Sampling(0.5, top_k=4), Sampling(1.2, top_p=0.8), Sampling(1.0)]
    requests = [
        ask(f"t{i}", prompt(4, i), sampling_of(kinds[i % 4], 30 + i), group=i) for i in range(8)
    ]
    plain = run_all(drafting(model, AnswerHistory(64), slots=8), requests)
    drafted = run_all(drafting(model, history_of(requests, plain, 0.1), slots=8), requests)
    assert {k: v.tokens for k, v in drafted.items()} == {k: v.tokens for k, v in plain.items()}


@pytest.mark.parametrize("mode", ["in_flight", "in_flight_recompute"])
def test_updates_at_the_same_tokens_give_the_same_tokens(mode: str) -> None:
    """Weights change between two passes; a run without drafts that takes them after as many tokens
    of this trajectory, with its KV cache kept or recomputed, gives the same, spans included.
    """
    request = ask("t0", prompt(6), Sampling(0.9, tokens_max=80))
    plain = run_all(drafting(MODELS[1], AnswerHistory(64)), [request])
    history = history_of([request], plain, wrong=0.15)
    engine, gained = drafting(MODELS[1], history, slots=1), {}
    engine.submit(request)
    number = 1
    while engine.running():
        for _ in range(3):
            gather(gained, engine.poll(0.0))
        number += 1
        engine.update(updated(number), mode)  # pyright: ignore[reportArgumentType]
    gather(gained, engine.poll(0.0))
    spans = gained["t0"].spans
    assert len(spans) > 4
    assert replayed(request, spans, mode).tokens == gained["t0"].tokens


def updated(number: int) -> WeightUpdate:
    return WeightUpdate(Version(number, 1), MODELS[1 + (number + 1) % 2].state_dict())


def replayed(request: GenerationRequest, spans: list[tuple[Version, int]], mode: str) -> Gained:
    """Plain steps, each update after as many tokens as in the other run."""
    engine, gained = (
        drafting(MODELS[1], AnswerHistory(64), slots=1, gate=DraftGate(forced=False)),
        {},
    )
    engine.submit(request)
    for version, count in spans:
        if version != engine.version:
            engine.update(updated(version.number), mode)  # pyright: ignore[reportArgumentType]
        before = engine.stats().tokens
        while engine.stats().tokens < before + count:
            gather(gained, engine.poll(0.0))
    gather(gained, engine.poll(0.0))
    assert gained["t0"].spans == spans
    return gained["t0"]


def test_a_turn_of_the_environment_continues_with_drafts() -> None:
    """A held row is compacted out of the cache with its hidden columns and comes back."""
    model, sampling = tiny_model("qwen3"), Sampling(1.0, tokens_max=60, stop=(3,))
    others = [ask(f"o{i}", prompt(3, i), Sampling(1.0, tokens_max=50)) for i in range(3)]
    held = ask("held", prompt(4, 9), sampling, hold=True)

    def talk(history: AnswerHistory, forced: bool) -> tuple[dict[str, Gained], TorchEngine]:
        engine, gained = drafting(model, history, gate=DraftGate(forced=forced)), {}
        for request in [held, *others]:
            engine.submit(request)
        for _ in range(200):
            for emission in engine.poll(0.0):
                gather(gained, [emission])
                if emission.trajectory == "held" and emission.finish == "stop":
                    engine.append("held", np.array([5, 6, 7], np.uint32))
        return gained, engine

    plain, _ = talk(AnswerHistory(64), False)
    history = history_of([*others], plain, 0.2)
    tokens = np.concatenate((held.tokens, np.array(plain["held"].tokens, np.uint32)))
    history.insert(prompt_key(held.tokens, held.sources), 0, tokens, len(tokens) - 4)
    drafted, engine = talk(history, True)
    assert {k: v.tokens for k, v in drafted.items()} == {k: v.tokens for k, v in plain.items()}
    assert engine.stats().tokens > engine.stats().steps


@settings(max_examples=12, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["submit", "poll", "poll", "move", "update", "switch"]),
            st.integers(0, 9),
        ),
        min_size=8,
        max_size=40,
    )
)
def test_any_schedule_with_drafts_equals_recomputing_everything(
    actions: list[tuple[str, int]],
) -> None:
    """Invariants 3 and 10 under submits, moves, updates and changes between plain steps and passes;
    the tokens of one sample are the draft of the next.
    """
    gate, history = DraftGate(MULTIPLICATIVE, forced=True), AnswerHistory(1 << 12)
    engine = drafting(MODELS[1], history, slots=3, emit_every=7, gate=gate)

    def change() -> None:
        gate.forced = not gate.forced

    check_schedule(engine, actions, prompt_seeds=3, on_switch=change)


def test_a_history_of_another_vocabulary_is_no_danger() -> None:
    model, request = tiny_model("qwen3"), ask("t0", prompt(5), Sampling(1.0, tokens_max=30))
    plain = run_all(drafting(model, AnswerHistory(64)), [request])
    history = history_of([request], plain)
    tokens = np.concatenate((request.tokens, np.arange(5, 90, dtype=np.uint32)))
    history.insert(prompt_key(request.tokens, request.sources), 9, tokens, 85, 5.0)
    assert run_all(drafting(model, history), [request])["t0"].tokens == plain["t0"].tokens


def test_the_difference_that_rounding_does_not_explain_is_found() -> None:
    model, request = tiny_model("qwen3"), ask("t0", prompt(5), Sampling(1.0, tokens_max=30))
    plain = run_all(drafting(model, AnswerHistory(64)), [request])["t0"].tokens
    assert_same(model, request, plain, plain)
    with pytest.raises(AssertionError):
        assert_same(model, request, plain, [*plain[:7], (plain[7] + 1) % 19])


def test_with_the_switch_off_everything_is_as_without_drafts() -> None:
    """Bit for bit: the same steps run."""
    model, requests = tiny_model("qwen3"), asked(Sampling(1.0, stop=(2,)))
    bare = TorchEngine(model.config, model.state_dict(), V1, EngineOptions(4, 96))
    plain = run_all(bare, requests)
    off = run_all(drafting(model, AnswerHistory(64), gate=DraftGate()), requests)
    assert {k: (v.tokens, v.logprobs) for k, v in off.items()} == {
        k: (v.tokens, v.logprobs) for k, v in plain.items()
    }
    assert torch.is_inference_mode_enabled() is False


def test_a_shut_gate_spends_little_time_on_history_and_decides_seldom() -> None:
    """A look-up takes 1 ms and answers are collected every 2 ms: of 5 s at most .2 % are look-ups.
    Steps over rows that enter and leave are decided once in 16.
    """
    now_s, looked_up, decided = 0.0, 0, 0

    class SlowHistory(AnswerHistory):
        def draft(self, prompt: int, newest: Sequence[int], tokens_max: int) -> Draft:
            nonlocal now_s, looked_up
            now_s, looked_up = now_s + 0.001, looked_up + 1
            return super().draft(prompt, newest, tokens_max)

    class CountingGate(DraftGate):
        def decide(self, rows: int, now_s: float) -> bool:
            nonlocal decided
            decided += 1
            return super().decide(rows, now_s)

    speculation = BatchSpeculation(SlowHistory(64), DraftGate(), 19, lambda: now_s)
    sequence = TorchSequence(ask("t0", prompt(5), Sampling(1.0, tokens_max=30)), 96)
    speculation.enter(sequence)
    sequence.gain(np.arange(8, dtype=np.uint32))
    while now_s < 5.0:
        now_s += 0.002
        speculation.compare_with_history(sequence, sequence.tokens[5:13])
    assert 8 < looked_up <= 11
    assert not speculation.states

    model, requests = tiny_model("qwen3"), asked(Sampling(1.0, stop=(2,)), 48)
    engine = drafting(model, AnswerHistory(64), gate=CountingGate())
    run_all(engine, requests)
    assert 0 < decided <= engine.stats().steps / 16 + 1
