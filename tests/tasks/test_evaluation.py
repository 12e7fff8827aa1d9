"""Metrics of held-out answers, and the loop that collects them from any engine."""

import json
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pytest

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import Emission, GenerationRequest
from rollstream.producers.rewards.pool import RewardPool, RewardVerdict
from rollstream.producers.rollout.evaluation import (
    EvaluationPlan,
    JudgedAnswer,
    evaluate,
    held_out_answers,
    measure,
    pass_at_k,
)
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.character_tokenizer import EOS
from rollstream.producers.tasks.remainder import Remainder
from rollstream.producers.tasks.scripted import Scripted
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.evaluation import Evaluator, due_numbers, kept_versions
from rollstream.storage.weights.manifest import manifest_key
from rollstream.streams.values import Tokens, Version
from testbed.memory import MemoryStore

ENCODE = Remainder().tokenizer().encode


def judged(reward: float, style: str, length: int) -> JudgedAnswer:
    return JudgedAnswer(RewardVerdict(reward, {f"style/{style}": 1.0, "other": 5.0}), length)


def test_figures_of_known_answers():
    sampled = [
        judged(1, "full", 40),
        judged(0, "direct", 5),
        judged(0, "direct", 5),
        judged(1, "full", 10),
    ]
    figures = measure(sampled, [judged(1, "full", 9), judged(1, "full", 9)])
    assert figures.accuracy_sampled == 0.5
    assert figures.accuracy_greedy == 1.0
    assert figures.length_median == 7.5
    assert figures.length_p99 == pytest.approx(np.percentile([40, 5, 5, 10], 99))
    assert figures.shares == {"direct": 0.5, "full": 0.5}


def test_a_dead_reward_counts_as_wrong_and_is_counted():
    dead = JudgedAnswer(RewardVerdict(reason="took longer than 1 s"), 3)
    figures = measure([judged(1, "full", 4), dead], [dead])
    assert figures.accuracy_sampled == 0.5
    assert figures.accuracy_greedy == 0.0
    assert figures.dead == 2
    assert figures.shares == {"full": 0.5}


def test_the_line_has_the_promised_fields():
    line = measure([judged(1, "full", 4)], [judged(1, "full", 4)]).line(10, 61.23456)
    assert json.loads(json.dumps(line)) == {
        "step": 10,
        "seconds": 61.235,
        "accuracy_sampled": 1.0,
        "accuracy_greedy": 1.0,
        "length_median": 4.0,
        "length_p99": 4.0,
        "shares": {"full": 1.0},
        "dead": 0,
        "by_prompt": [[1, 1, 1.0]],
    }


def test_sampled_answers_are_counted_by_prompt():
    right, dead = RewardVerdict(1.0), RewardVerdict(reason="hung")
    some = [(0, right), (1, RewardVerdict(0.5)), (1, dead), (0, right), (1, right)]
    answers = [JudgedAnswer(verdict, 4, "", prompt) for prompt, verdict in some]
    assert measure(answers, answers).by_prompt == ((2, 2, 1.0), (1, 3, 0.5))


def test_seconds_are_left_out_if_version_0_was_removed_before_the_first_evaluation(tmp_path):
    """They were seconds since 1970."""
    context: Any = SimpleNamespace(folder=tmp_path, store=MemoryStore())
    unread: Any = None
    assert Evaluator(context, task=unread, rewards=unread, prompts=1).started_s() is None
    assert "seconds" not in measure([judged(1, "full", 4)], [judged(1, "full", 4)]).line(10, None)


class Parrot:
    """A small engine that gives the same answer to every prompt, in two emissions per turn."""

    def __init__(self, greedy: list[int], sampled: list[int]) -> None:
        self.version = Version(0, 1)
        self.aborted: list[str] = []
        self._answers = {True: greedy, False: sampled}
        self._ready: list[Emission] = []
        self._greedy: set[str] = set()

    def submit(self, request: GenerationRequest) -> None:
        if request.sampling.temperature == 0:
            self._greedy.add(request.trajectory)
        self._emit_answer(request.trajectory)

    def append(self, trajectory: str, tokens: Tokens, noise: str = "") -> None:
        self._emit_answer(trajectory)

    def abort(self, trajectory: str) -> None:
        self.aborted.append(trajectory)

    def poll(self, deadline_s: float) -> list[Emission]:
        ready, self._ready = self._ready, []
        return ready

    def _emit_answer(self, trajectory: str) -> None:
        tokens = np.array(self._answers[trajectory in self._greedy], np.uint32)
        pieces: list[tuple[Tokens, Literal["stop"] | None]] = [
            (tokens[:1], None),
            (tokens[1:], "stop"),
        ]
        for piece, finish in pieces:
            zeros = np.zeros(len(piece), np.float32)
            self._ready.append(Emission(trajectory, piece, zeros, self.version, finish))


def test_an_evaluation_judges_every_answer_greedy_ones_apart():
    pool = RewardPool(TaskSettings(), capacity=7)  # fewer than there are answers
    engine = Parrot(greedy=ENCODE("12"), sampled=[*ENCODE(">000=000"), EOS])
    figures = evaluate(Remainder(), EvaluationPlan(100, 2, 420, 0), pool, engine)  # pyright: ignore
    pool.close()
    right = sum("000" in prompt.reference for prompt in Remainder().held_out(100))
    assert figures.accuracy_greedy == 0.0
    assert figures.accuracy_sampled == pytest.approx(right / 100)
    assert figures.length_median == 9
    assert figures.shares == {"full": 1.0}
    assert len(figures.by_prompt) == 100
    assert sum(solved for solved, _, _ in figures.by_prompt) == 2 * right
    assert engine.aborted == []


def test_evaluations_of_the_same_prompts_name_the_same_hash():
    """Whatever the number of samples; other prompts are another set."""

    def named(prompts: int, samples: int) -> str:
        pool = RewardPool(TaskSettings())
        engine = Parrot(greedy=ENCODE("12"), sampled=[*ENCODE(">000=000"), EOS])
        plan = EvaluationPlan(prompts, samples, 420, 0)
        figures = evaluate(Remainder(), plan, pool, engine)  # pyright: ignore
        pool.close()
        return figures.prompts

    assert named(3, 1) == named(3, 2) != named(4, 1)


def test_answers_of_several_turns_go_back_and_forth_with_the_environment():
    task, plan = Scripted(turns=3), EvaluationPlan(10, 1, 100, 0)
    pool = RewardPool(TaskSettings(name="scripted"))
    engine = Parrot(greedy=ENCODE("0;"), sampled=ENCODE("1;"))
    figures = evaluate(task, plan, pool, engine)  # pyright: ignore
    pool.close()
    assert figures.dead == 0
    assert figures.length_median == 6  # three turns of two tokens; the environment's do not count
    assert sorted(engine.aborted) == sorted(held_out_answers(task, plan))


def test_requests_are_the_same_for_every_version_and_share_a_group_per_prompt():
    first, second = (held_out_answers(Remainder(), EvaluationPlan(3, 2, 50, 9)) for _ in range(2))
    assert list(first) == list(second)
    assert [one.request.group for one in first.values()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sum(not one.sampled for one in first.values()) == 3
    assert {one.request.sampling.stop for one in first.values()} == {(EOS,)}


def test_a_task_that_returns_its_whole_list_is_asked_no_more_than_was_set(monkeypatch):
    task = Remainder()
    whole = task.held_out(9)
    monkeypatch.setattr(task, "held_out", lambda count: whole)
    assert len(held_out_answers(task, EvaluationPlan(4, 2, 50, 9))) == 12


class Strict(Parrot):
    """Its tokenizer has none of the tokens that an environment replies with."""

    def append(self, trajectory: str, tokens: Tokens, noise: str = "") -> None:
        raise EngineRefused(f"token {tokens[0]} is out of its vocabulary")


def test_an_answer_whose_environment_replies_unknown_tokens_is_dead_and_the_others_are_judged():
    task, plan = Scripted(turns=2), EvaluationPlan(4, 1, 100, 0)
    pool = RewardPool(TaskSettings(name="scripted"))
    engine = Strict(
        greedy=ENCODE("0;"), sampled=[EOS]
    )  # sampled trajectories give up and get no reply
    figures = evaluate(task, plan, pool, engine)  # pyright: ignore
    pool.close()
    assert figures.dead == 4
    assert figures.accuracy_greedy == 0.0
    assert sorted(engine.aborted) == sorted(
        held_out_answers(task, plan)
    )  # each slot is freed, once


def test_pass_at_k_is_the_chance_that_one_of_k_answers_is_right():
    assert pass_at_k([(1, 4)]) == {2: pytest.approx(1 / 2), 4: 1.0}
    assert pass_at_k([(0, 4), (4, 4)]) == {2: 0.5, 4: 0.5}
    assert pass_at_k([(1, 1)]) == {}
    line = measure([judged(1, "full", 4), judged(0, "full", 4)], [judged(1, "full", 4)]).line(
        3, 1.0
    )
    assert line["pass_at/2"] == 1.0


def test_answers_have_the_temperature_and_length_of_the_evaluation():
    plan = EvaluationPlan(1, 3, 17, 0, temperature=0.6)
    answers = held_out_answers(Remainder(), plan).values()
    drawn = [answer.request.sampling for answer in answers]
    assert [one.temperature for one in drawn] == [0.6, 0.6, 0.6, 0.0]
    assert {one.tokens_max for one in drawn} == {17}
    assert sum(answer.sampled for answer in answers) == 3


class CountedStore(MemoryStore):
    """Counts what is asked of it."""

    asked = 0

    def list(self, prefix: str = ""):
        self.asked += 1
        return super().list(prefix)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.asked += 1
        return super().get(key, start, end)


def test_versions_that_are_gone_cost_one_listing_together():
    """An evaluation that was away asked for each of them alone, until the run's end stopped it."""
    store = CountedStore()
    for number in (57, 60):
        store.create(manifest_key(Version(number, 2)), b"{}")
    context: Any = SimpleNamespace(store=store)
    numbers = due_numbers(Configuration.model_validate({"evaluation": {"every": 3}}), 60)
    kept = kept_versions(context, numbers, {60: Version(60, 2)})
    assert list(kept.values()) == [Version(57, 2), Version(60, 2)]
    assert store.asked == 1
