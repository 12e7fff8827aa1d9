"""Drafts from history on vLLM: greedy tokens stay the same, sampled ones keep their distribution,
and log-probabilities are the model's (docs/explanation/drafts.md).

vLLM's own sampler verifies. At T > 0 it samples with other random numbers than without drafts, so
the distribution is tested, with fixed seeds: a correct sampler fails with the stated probability.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rollstream.errors import EngineRefused
from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.history import AnswerHistory, prompt_key
from rollstream.producers.drafts.node import CombinedSource, NodeHistory
from rollstream.producers.engines.base import Emission, GenerationRequest, WeightUpdate
from rollstream.producers.engines.drafting import DraftSource
from rollstream.producers.engines.options import EngineOptions
from rollstream.producers.engines.settings import VllmSettings
from rollstream.producers.engines.vllm.engine import VllmEngine
from rollstream.streams.records import PROMPT
from rollstream.streams.values import (
    Drafts,
    Sampling,
    Tokens,
    Version,
    accepted_mask,
    accepted_tokens,
    join_drafts,
)
from testbed.update_reference import over_old_cache
from tests.support.engine_samples import (
    V1,
    V2,
    VOCABULARY,
    Gained,
    ask,
    chosen_logprobs,
    gather,
    half_way,
    prompt,
    resumed,
    run_all,
    to_the_end,
)
from tests.vllm.vllm_samples import open_vllm, vllm_model

pytestmark = pytest.mark.slow
CHANCE = 1e-6  # that one test of a correct sampler fails
COUNT = 1_500


def drafting(
    model: PreTrainedModel,
    history: DraftSource,
    forced: bool | None = True,
    slots: int = 6,
    emit_every: int = 16,
    process: bool = False,
) -> VllmEngine:
    return VllmEngine(
        model.config,
        model.state_dict(),
        V1,
        EngineOptions(slots, 96, emit_every, drafts=history, gate=DraftGate(forced=forced)),
        settings=VllmSettings(process=process),
    )


def asked(temperature: float, stop: tuple[int, ...] = ()) -> list[GenerationRequest]:
    """Several samples of a few prompts, of different lengths."""
    return [
        ask(
            f"t{i}",
            prompt(2 + i % 5, i // 3),
            Sampling(temperature, tokens_max=20 + 9 * i % 50, stop=stop),
            group=i // 3,
        )
        for i in range(12)
    ]


def history_of(
    requests: list[GenerationRequest], gained: dict[str, Gained], wrong: float = 0.0
) -> AnswerHistory:
    """The generated tokens, a share of them replaced by others."""
    history, drawn = AnswerHistory(1 << 15), np.random.default_rng(0)
    insert_answers(history, requests, gained, wrong, drawn)
    return history


def insert_answers(
    history: AnswerHistory,
    requests: list[GenerationRequest],
    gained: dict[str, Gained],
    wrong: float,
    drawn: np.random.Generator,
) -> None:
    for request in requests:
        answer = np.array(gained[request.trajectory].tokens, np.uint32)
        changed = drawn.random(len(answer)) < wrong
        answer[changed] = drawn.integers(0, VOCABULARY, int(changed.sum()))
        tokens = np.concatenate((request.tokens, answer))
        key = prompt_key(request.tokens, request.sources)
        history.insert(key, request.group, tokens, len(answer), 1.0)


@pytest.mark.parametrize(("wrong", "least", "most"), [(0.0, 0.75, 1.0), (0.7, 0.0, 0.5)])
def test_greedy_tokens_with_drafts_are_those_without(
    wrong: float, least: float, most: float
) -> None:
    """Invariant 10, with drafts that are mostly accepted and drafts that are mostly rejected."""
    model, requests = vllm_model("qwen3"), asked(0.0, stop=(2,))
    plain = run_all(open_vllm(model, slots=6), requests)
    engine = drafting(model, history_of(requests, plain, wrong))
    drafted = run_all(engine, requests)
    assert {k: (v.tokens, v.finish) for k, v in drafted.items()} == {
        k: (v.tokens, v.finish) for k, v in plain.items()
    }
    output = engine.stats().drafts
    assert output.proposed > 40
    assert least <= output.accepted / output.proposed <= most
    assert (output.found > 0, output.passes > 0, output.lookup_s > 0) == (True, True, True)
    assert output.gained <= output.rows + output.accepted  # tokens after a stop token do not count
    assert engine.stats().tokens == sum(len(mine.tokens) for mine in drafted.values())


def test_right_drafts_come_many_per_step_and_never_beyond_the_end() -> None:
    """A stop token and `tokens_max` end a sequence in the middle of a draft."""
    model, greedy = vllm_model("qwen3"), Sampling(0.0, tokens_max=60)
    requests = [ask("t0", prompt(5), greedy)]
    plain = run_all(open_vllm(model, slots=6), requests)
    whole = plain["t0"].tokens
    engine = drafting(model, history_of(requests, plain))
    assert run_all(engine, requests)["t0"].tokens == whole
    assert engine.stats().steps <= 10
    at = max(whole.index(token) for token in set(whole))
    for sampling in (Sampling(0.0, tokens_max=60, stop=(whole[at],)), Sampling(0.0, tokens_max=at)):
        short = run_all(
            drafting(model, history_of(requests, plain)), [ask("t0", prompt(5), sampling)]
        )
        end = at + 1 if sampling.stop else at
        assert short["t0"].tokens == whole[:end]
        assert short["t0"].finish == ("stop" if sampling.stop else "length")


def likely_answers(model: PreTrainedModel, start: Tokens) -> AnswerHistory:
    """The likeliest token after each two first tokens; of the second ones, the likeliest ranks
    first.
    """
    history, answers = AnswerHistory(1 << 14), torch.cartesian_prod(*[torch.arange(VOCABULARY)] * 2)
    begun = torch.from_numpy(start.astype(np.int64)).expand(len(answers), -1)
    answers = torch.cat((begun, answers), 1)
    with torch.inference_mode():
        second = model(answers).logits[:, len(start)].argmax(-1)
        for _ in range(4):
            newest = model(answers).logits[:, -1].argmax(-1)
            answers = torch.cat((answers, newest[:, None]), 1)
    key = prompt_key(start, np.full(len(start), PROMPT, np.uint8))
    for answer, likeliest in zip(answers.numpy(), second.tolist(), strict=True):
        reward = float(answer[len(start) + 1] == likeliest)
        history.insert(key, 0, answer.astype(np.uint32), len(answer) - len(start), reward)
    return history


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """The critical value of χ², with one degree of freedom less than there are cells."""
    statistic = ((observed - expected) ** 2 / expected).sum()
    half = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, statistic.double() / 2))


def test_drawn_tokens_follow_the_model_under_any_draft() -> None:
    """Each token gives a number that is uniform if the token follows the model after those before
    it: a point drawn in the token's interval of [0, 1], in which the drafted token's comes first.
    """
    model, start = vllm_model("qwen3"), prompt(5)
    names = [f"t{i}" for i in range(COUNT)]
    heats = {name: (1.0, 1.0, 0.6)[i % 3] for i, name in enumerate(names)}
    requests = [ask(n, start, Sampling(heats[n], tokens_max=6)) for n in names]
    history = likely_answers(model, start)
    engine = drafting(model, history, slots=128)
    gained = run_all(engine, requests)
    output = engine.stats().drafts
    assert output.accepted > 400
    assert output.proposed - output.accepted > 1_000
    points: dict[float, list[float]] = {0.6: [], 1.0: []}
    with torch.inference_mode():
        tokens = [[*start.tolist(), *gained[n].tokens] for n in names]
        logits = model(torch.tensor(tokens)).logits.double()
    drawn = np.random.default_rng(1)
    for name, row, mine in zip(names, logits, tokens, strict=True):
        chances = (row / heats[name]).softmax(-1).numpy()
        for at in range(len(start), len(mine)):
            guessed = history.draft(prompt_key(start, requests[0].sources), mine[at - 7 : at], 1)
            order = [*guessed.tokens, *(t for t in range(VOCABULARY) if t not in guessed.tokens)]
            chance = chances[at - 1][order]
            place = order.index(mine[at])
            low = chance[:place].sum()
            points[heats[name]].append(low + drawn.random() * chance[place])
    for found in points.values():
        counts = torch.histc(torch.tensor(found), 20, 0, 1).double()
        assert p_value(counts, torch.full((20,), len(found) / 20)) > CHANCE
    firsts = [mine.tokens[0] for n, mine in gained.items() if heats[n] == 1.0]
    first = max(set(firsts), key=firsts.count)
    seconds = [m.tokens[1] for n, m in gained.items() if heats[n] == 1 and m.tokens[0] == first]
    row = next(i for i, t in enumerate(tokens) if t[5] == first)
    expected = logits[row, 5].softmax(-1) * len(seconds)
    order = expected.argsort(descending=True)
    often = int((expected > 5).sum())
    counts = torch.bincount(torch.tensor(seconds), minlength=VOCABULARY).double()[order]
    observed, wanted = (
        torch.cat((cells[:often], cells[often:].sum()[None])) for cells in (counts, expected[order])
    )
    assert p_value(observed, wanted) > CHANCE


def test_log_probabilities_are_those_of_the_model() -> None:
    """After temperature; greedy rows and others share steps, and each row has its own draft."""
    model = vllm_model("qwen3")
    heats = (0.0, 0.7, 1.0, 1.4)
    requests = [
        ask(f"t{i}", prompt(3, i), Sampling(heats[i % 4], tokens_max=40)) for i in range(12)
    ]
    plain = run_all(drafting(model, AnswerHistory(64)), requests)
    engine = drafting(model, history_of(requests, plain, 0.1))
    for name, mine in run_all(engine, requests).items():
        request = next(r for r in requests if r.trajectory == name)
        tokens = torch.tensor([[*request.tokens.tolist(), *mine.tokens]])
        with torch.inference_mode():
            logits = model(tokens).logits[0, len(request.tokens) - 1 : -1]
        rows = (logits / (request.sampling.temperature or 1.0)).log_softmax(-1)
        wanted = rows.gather(1, torch.tensor(mine.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)
        if not request.sampling.temperature:
            assert mine.tokens == plain[name].tokens
    assert engine.stats().drafts.accepted > 20


def test_a_prompt_that_is_cached_but_for_a_token_enters_right_beside_others() -> None:
    """vLLM may pad such a request with invalid drafts."""
    model, long = vllm_model("qwen3"), prompt(33)
    engine = drafting(model, AnswerHistory(64), emit_every=1)
    engine.submit(ask("first", long, Sampling(1.0, tokens_max=60)))
    gained: dict[str, Gained] = {}
    for i in range(110):
        gather(gained, engine.poll(0.0))
        engine.submit(ask(f"t{i}", long, Sampling(1.0, tokens_max=3)))
    while engine.running():
        gather(gained, engine.poll(10.0))
    for name, mine in gained.items():
        assert len(mine.tokens) == (60 if name == "first" else 3)
        wanted = chosen_logprobs(model, long, mine.tokens)
        torch.testing.assert_close(torch.tensor(mine.logprobs), wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", ["in_flight", "in_flight_recompute"])
def test_new_weights_take_over_between_two_steps_with_drafts(mode: str) -> None:
    """Invariant 3: earlier drafts are verified under the new weights."""
    old, new = vllm_model("qwen3", 0), vllm_model("qwen3", 1)
    request = ask("t", prompt(6), Sampling(temperature=0, tokens_max=40))
    history = AnswerHistory(1 << 12)
    for model in (old, new):
        plain = run_all(drafting(model, AnswerHistory(64)), [request])
        insert_answers(history, [request], plain, 0.1, np.random.default_rng(2))
    engine = drafting(old, history, emit_every=5)
    gained = half_way(engine)
    engine.update(WeightUpdate(V2, new.state_dict()), mode)  # pyright: ignore[reportArgumentType]
    mine = to_the_end(engine, gained)
    (_, before), (_, after) = mine.spans
    assert ([version for version, _ in mine.spans], before + after) == ([V1, V2], 40)
    assert 12 <= before < 40
    if mode == "in_flight":
        greedy, logprobs = over_old_cache(old, new, prompt(6), mine.tokens, before)
    else:
        logprobs = chosen_logprobs(new, prompt(6), mine.tokens)
        greedy, _ = over_old_cache(new, new, prompt(6), mine.tokens, 0)
    assert mine.tokens[before:] == greedy[before:]
    torch.testing.assert_close(
        torch.tensor(mine.logprobs[before:]), logprobs[before:], atol=1e-4, rtol=0
    )
    assert engine.stats().drafts.accepted > 5


def test_moved_in_the_middle_greedy_tokens_stay_the_same() -> None:
    """An unverified draft leaves with its request; the prompt is known elsewhere."""
    model = vllm_model("qwen3")
    requests = [ask(n, prompt(6, i), Sampling(0, tokens_max=70)) for i, n in enumerate("abc")]
    plain = run_all(drafting(model, AnswerHistory(64)), requests)
    history = history_of(requests, plain, 0.15)
    engine, part = drafting(model, history, emit_every=8), {"a": Gained()}
    for request in requests:
        engine.submit(request)
    while len(part["a"].tokens) < 30:
        gather(part, engine.poll(0.0))
    rest = engine.abort("a")
    gather(part, [rest] if rest else [])
    moved = run_all(drafting(model, history), [resumed(requests[0], part["a"])])["a"]
    assert part["a"].tokens + moved.tokens == plain["a"].tokens
    assert moved.finish == "length"


def test_a_turn_of_the_environment_continues_with_drafts() -> None:
    model = vllm_model("qwen3")
    spoken = np.array([5, 6, 7], np.uint32)

    def talk(engine: VllmEngine) -> Gained:
        stop = Sampling(0.0, tokens_max=60, stop=tuple(range(4)))
        engine.submit(ask("t", prompt(4, 9), stop, hold=True))
        gained: dict[str, Gained] = {}
        for _ in range(2):
            while gained.get("t", Gained()).finish is None and engine.running():
                gather(gained, engine.poll(1.0))
            if gained["t"].finish == "stop":
                engine.append("t", spoken)
                gained["t"].finish = None
        while engine.running() and gained["t"].finish is None:
            gather(gained, engine.poll(1.0))
        engine.abort("t")
        return gained["t"]

    plain = talk(drafting(model, AnswerHistory(64), forced=False))
    request = ask("t", prompt(4, 9), Sampling(0.0))
    drafted = talk(drafting(model, history_of([request], {"t": plain})))
    assert drafted.tokens == plain.tokens


class DraftedOutput:
    """An engine's emissions, and their draft counts."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.gained: dict[str, Gained] = {}
        self.parts: dict[str, list[tuple[int, Drafts | None]]] = {}

    def take(self, emissions: list[Emission]) -> None:
        gather(self.gained, emissions)
        for one in emissions:
            part = (len(one.tokens), one.drafts)
            self.parts.setdefault(one.trajectory, []).append(part)

    def to_the_end(self, requests: Iterable[GenerationRequest] = ()) -> dict[str, Drafts]:
        for request in requests:
            self.engine.submit(request)
        while self.engine.running():
            self.take(self.engine.poll(10.0))
        reported = {name: join_drafts(parts) for name, parts in self.parts.items()}
        return {name: drafts for name, drafts in reported.items() if drafts is not None}


def check_adds_up(reported: dict[str, Drafts], engine: VllmEngine) -> None:
    counted, every = engine.stats().drafts, reported.values()
    assert sum(map(accepted_tokens, every)) == counted.accepted > 0
    assert sum(drafts.guessed for drafts in every) == counted.proposed
    assert sum(drafts.asked for drafts in every) == counted.asked > 0
    assert sum(drafts.found for drafts in every) == counted.found > 0
    seconds = sum(drafts.lookup_s for drafts in every)
    assert seconds == pytest.approx(counted.lookup_s, rel=0.01)


def test_emissions_mark_accepted_tokens() -> None:
    """They add up to the engine's counts, over stop tokens in drafts, a move, and updates that drop
    drafts: nothing is lost, nothing counts twice.
    """
    model, requests = vllm_model("qwen3"), asked(0.0, stop=(2,))
    bare = DraftedOutput(open_vllm(model, slots=6))
    assert bare.to_the_end(requests) == {}, "without drafts not a word of them"
    output = DraftedOutput(drafting(model, history_of(requests, bare.gained, 0.2), emit_every=3))
    for request in requests:
        output.engine.submit(request)
    for number, mode in enumerate(("in_flight", "in_flight_recompute"), 2):
        for _ in range(3):
            output.take(output.engine.poll(0.0))
        output.engine.update(WeightUpdate(Version(number, 1), model.state_dict()), mode)
    moved = next(
        r for r in requests if r.trajectory in {*output.gained} & {*output.engine.running()}
    )
    rest = output.engine.abort(moved.trajectory)
    output.take([rest] if rest else [])
    reported = output.to_the_end([resumed(moved, output.gained[moved.trajectory])])
    check_adds_up(reported, output.engine)
    for name, mine in output.gained.items():
        assert mine.tokens == bare.gained[name].tokens
        assert sum(reported[name].runs) == len(mine.tokens)
        assert reported[name].steps == len(mine.tokens) - accepted_tokens(
            reported[name]
        ) + ends_drafted(reported[name])


def ends_drafted(drafts: Drafts) -> bool:
    """Each step gives a token without a draft, except one that ends with a drafted one."""
    return len(drafts.runs) % 2 == 0


def test_a_stop_token_is_marked_if_history_had_it() -> None:
    model, request = vllm_model("qwen3"), ask("t", prompt(5), Sampling(0.0, tokens_max=60))
    whole = run_all(open_vllm(model, slots=6), [request])["t"].tokens
    at = max(whole.index(token) for token in set(whole))
    stopped = ask("t", prompt(5), Sampling(0.0, tokens_max=60, stop=(whole[at],)))
    for known in (len(whole), at):
        history = history_of([request], {"t": Gained(whole[:known])})
        output = DraftedOutput(drafting(model, history))
        reported = output.to_the_end([stopped])
        assert accepted_mask(reported["t"], at + 1)[-1] == (known > at)
        check_adds_up(reported, output.engine)


def test_the_switch_is_off_where_there_is_no_history_and_comes_on_where_it_fits() -> None:
    """It decides by itself, from the times of steps."""
    model, requests = vllm_model("qwen3"), asked(0.0)
    engine = drafting(model, AnswerHistory(64), forced=None)
    plain = run_all(engine, requests)
    assert engine.stats().drafts.proposed == 0
    again = [
        ask(f"{i}{r.trajectory}", r.tokens, r.sampling, group=r.group)
        for i in range(10)
        for r in requests
    ]
    engine = drafting(model, history_of(requests, plain), forced=None)
    for name, mine in run_all(engine, again).items():
        assert mine.tokens == plain[name[1:]].tokens
    assert engine.stats().drafts.accepted > 0


def test_a_core_in_its_own_process_drafts_from_the_history_of_the_node(tmp_path: Path) -> None:
    """It maps the file by name, also after it was made, and does not keep it from being removed;
    siblings that run there are drafted from as well.
    """
    old, new, requests = vllm_model("qwen3", 0), vllm_model("qwen3", 1), asked(0.0, stop=(2,))
    with pytest.raises(EngineRefused, match="another process"):
        drafting(old, AnswerHistory(64), process=True)
    node = NodeHistory(tmp_path / "history", 1 << 15)
    engine = drafting(old, CombinedSource(node, AnswerHistory(1 << 12)), process=True)
    history = node.take_over()
    assert history is not None
    for model, version in ((old, V1), (new, V2)):
        if version == V2:
            engine.update(WeightUpdate(V2, model.state_dict()), "in_flight")
        plain = run_all(drafting(model, AnswerHistory(64), forced=False), requests)
        insert_answers(history, requests, plain, 0.0, np.random.default_rng(3))
        before, said_of = engine.stats().drafts, DraftedOutput(engine)
        reported = said_of.to_the_end(requests)
        drafted = said_of.gained
        assert {k: v.tokens for k, v in drafted.items()} == {k: v.tokens for k, v in plain.items()}
        assert {version for v in drafted.values() for version, _ in v.spans} == {version}
        output = engine.stats().drafts
        guessed, right = output.proposed - before.proposed, output.accepted - before.accepted
        assert guessed > 40
        assert right > 0.5 * guessed
        assert sum(map(accepted_tokens, reported.values())) == right
        assert sum(drafts.guessed for drafts in reported.values()) == guessed
        assert sum(drafts.asked for drafts in reported.values()) == output.asked - before.asked
    node.leave()
    assert not node.path.exists()
