"""The drafts of vLLM's batch from step to step, on a real history, without vLLM."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from rollstream.producers.drafts.gate import ADDITIVE, DraftGate
from rollstream.producers.drafts.history import AnswerHistory
from rollstream.producers.engines.vllm.local.proposer import draft_config
from rollstream.producers.engines.vllm.local.proposer_speculation import (
    ProposerSpeculation,
    SteppedRequest,
)

PROMPT, VOCABULARY = 7, 1000
ANSWER = list(range(100, 180))


@dataclass
class Machine:
    """A step over so many tokens takes `fixed` and `each` seconds; the clock is read at its end and
    after drafting, which takes no time.
    """

    fixed: float = 1.0
    each: float = 0.01
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def step(self, tokens: int) -> None:
        self.now += self.fixed + self.each * tokens


@dataclass
class Decoding:
    """Sequences that continue as `answers` do, verifying drafts as vLLM does."""

    guesses: ProposerSpeculation
    machine: Machine
    answers: dict[str, list[int]]
    begun: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    steps: int = 0
    looks: int = 0

    def step(self) -> None:
        for name, answer in self.answers.items():
            self.begun.setdefault(name, [1, 2, 3])
            assert len(self.begun[name]) < len(answer)
        names = list(self.answers)
        self.machine.step(len(names) + sum(map(len, self.drafts.values())))
        gained = [verified(self.answers[n], self.begun[n], self.drafts.get(n, [])) for n in names]
        seen = []
        for name, new in zip(names, gained, strict=True):
            verifies = self.drafts.get(name, [])
            self.begun[name] += new
            room = len(self.answers[name]) - len(self.begun[name])
            tokens = np.array(self.begun[name], np.int32)
            seen.append(SteppedRequest(name, PROMPT, 0, verifies, new, tokens, room))
        skipped = self.guesses.can_skip(names)
        self.looks += not skipped
        drafts = [[] for _ in seen] if skipped else self.guesses.step(seen)
        for each, draft in zip(seen, drafts, strict=True):
            assert len(draft) <= max(0, each.room - 1), "no draft reaches the last token"
        self.drafts = dict(zip(names, drafts, strict=True))
        self.steps += 1
        for name in names:
            if len(self.begun[name]) == len(self.answers[name]):
                del self.answers[name], self.drafts[name]

    def run(self) -> Iterator[None]:
        while self.answers:
            self.step()
            yield


def verified(answer: Sequence[int], begun: Sequence[int], draft: Sequence[int]) -> list[int]:
    new: list[int] = []
    for guess in [*draft, None]:
        new.append(answer[len(begun) + len(new)])
        if guess != new[-1]:
            break
    return new


def history_of(*answers: list[int]) -> AnswerHistory:
    history = AnswerHistory(1 << 14)
    for answer in answers:
        tokens = np.array(answer, np.uint32)
        history.insert(PROMPT, 0, tokens, len(tokens) - 3)
    return history


def decoding(
    history: AnswerHistory,
    answers: dict[str, list[int]],
    gate: DraftGate,
    machine: Machine | None = None,
) -> Decoding:
    machine = machine or Machine()
    return Decoding(ProposerSpeculation(history, gate, VOCABULARY, machine), machine, answers)


def test_accepted_drafts_give_many_tokens_per_step_and_are_counted() -> None:
    whole = [1, 2, 3, *ANSWER]
    d = decoding(history_of(whole), {"a": whole}, DraftGate(forced=True))
    for _ in d.run():
        pass
    stats = d.guesses.stats()
    assert d.begun["a"] == whole
    assert d.steps < 12
    assert (stats.accepted, stats.found) == (stats.proposed, stats.asked)
    assert stats.gained == stats.rows + stats.accepted
    assert (stats.passes, stats.rows) == (d.steps - 1, d.steps - 1)


def test_the_draft_length_shrinks_where_drafts_are_rejected() -> None:
    whole = [1, 2, 3, *ANSWER]
    other = [n if i % 9 else 999 for i, n in enumerate(whole)]
    d = decoding(history_of(other), {"a": list(whole)}, DraftGate(ADDITIVE, forced=True))
    longest = 0
    for _ in d.run():
        longest = max([longest, *map(len, d.drafts.values())])
    stats = d.guesses.stats()
    assert d.begun["a"] == whole
    assert 0 < stats.accepted < stats.proposed
    assert longest <= 8


def test_what_is_no_token_of_the_model_is_cut_off() -> None:
    whole = [1, 2, 3, *ANSWER]
    strange = [*whole[:20], VOCABULARY, *whole[20:]]
    d = decoding(history_of(strange), {"a": whole}, DraftGate(forced=True))
    for _ in d.run():
        assert all(token < VOCABULARY for token in d.drafts.get("a", []))
    assert d.begun["a"] == whole


def test_the_switch_comes_on_by_itself_where_it_pays_and_not_where_it_does_not() -> None:
    """The acceptance is unknown; a further token costs little, or everything."""
    answers = {f"t{i}": [1, 2, 3, *range(100 + i, 500 + i)] for i in range(4)}
    changed = np.random.default_rng(0).random((4, 403)) < 0.2
    pairs = zip(answers.values(), changed, strict=True)
    history = history_of(*[np.where(c, 999, answer).tolist() for answer, c in pairs])
    steps = {}
    for each in (0.001, 1.0):
        d = decoding(history, dict(answers), DraftGate(), Machine(1e-4, 1e-3 * each))  # seconds
        for _ in d.run():
            pass
        steps[each] = d.steps
    assert steps[0.001] < 150
    assert steps[1.0] > 250  # passes of one trial gain some tokens each


def test_the_batch_is_seldom_inspected_while_nothing_is_drafted() -> None:
    noise = np.random.default_rng(0).integers(VOCABULARY, size=(2, 400)).tolist()
    answers = {"a": [1, 2, 3, *noise[0]], "b": [1, 2, 3, *noise[1][:200]]}
    found = decoding(history_of([1, 2, 3, *ANSWER]), answers, DraftGate())
    for _ in found.run():
        pass
    assert not found.guesses.gate.on
    assert found.steps == 400
    assert 50 <= found.looks <= 60  # every eighth step, and when b had ended
    assert found.guesses.gate.plain.cost().seconds(2) == pytest.approx(1.02, rel=0.01)


def test_compared_drafts_do_not_see_tokens_that_arrived_meanwhile() -> None:
    """A history that gets each token at once never knows the next ones."""
    d = decoding(AnswerHistory(1 << 12), {"a": [1, 2, 3, *range(10, 300)]}, DraftGate())
    for _ in d.run():
        known = np.array(d.begun["a"], np.uint32)
        d.guesses.source.add_running(PROMPT, 0, known, len(known) - 3)
    assert d.guesses.gate.acceptance_rate.tried == 0
    assert d.guesses.gate.hit_rate.tried > 10


def test_siblings_get_new_tokens_and_no_accepted_drafts() -> None:
    whole = [1, 2, 3, *ANSWER]
    history = AnswerHistory(1 << 12)
    d = decoding(history, {"a": list(whole)}, DraftGate(forced=True))
    for _ in d.run():
        pass
    inserted = history.inserted
    assert inserted >= 64
    again = decoding(history, {"b": list(whole)}, DraftGate(forced=True))
    for _ in again.run():
        pass
    assert again.steps < d.steps / 2
    assert history.inserted <= inserted + 40  # of the beginning, which has no draft


def test_a_step_that_took_prompts_is_not_measured() -> None:
    machine = Machine()
    guesses = ProposerSpeculation(AnswerHistory(1 << 10), DraftGate(), VOCABULARY, machine)
    tokens = np.arange(5, dtype=np.int32)
    for key in "ab":
        machine.step(500)
        guesses.step([SteppedRequest(key, PROMPT, 0, [], [4], tokens, 9)])
    assert guesses.gate.plain.count == 0
    machine.step(1)
    guesses.step(
        [
            SteppedRequest("b", PROMPT, 0, [], [4], tokens, 9),
            SteppedRequest("c", PROMPT, 0, [], [], tokens, 9),
        ]
    )
    assert guesses.gate.plain.count == 0
    machine.step(1)
    guesses.step([SteppedRequest("b", PROMPT, 0, [], [4], tokens, 9)])
    assert guesses.gate.plain.count == 1


def test_vllm_gets_no_draft_settings_without_drafts() -> None:
    assert draft_config(0, 8, on_cpu=True) is None
    settings = draft_config(32, 8, on_cpu=True)
    assert settings is not None
    assert settings["num_speculative_tokens_per_batch_size"] == [(1, 8, 32)]
    assert "num_speculative_tokens_per_batch_size" not in (draft_config(32, 8, False) or {})
