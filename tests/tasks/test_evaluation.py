"""Figures of held-out answers, and the loop that collects them from any engine."""

import json

import numpy as np
import pytest

from producers.engines.base import Emission, Request
from producers.evaluation import Judged, measure
from producers.evaluator import Plan, answers, evaluate
from producers.rewards import RewardPool, Verdict
from producers.settings import TaskSettings
from producers.tasks.remainder import Remainder
from producers.tasks.scripted import Scripted
from producers.tasks.tokenizer import EOS, CharacterTokenizer
from streams.records import Tokens, Version

ENCODE = Remainder().tokenizer().encode


def judged(reward: float, style: str, length: int) -> Judged:
    return Judged(Verdict(reward, {f"style/{style}": 1.0, "other": 5.0}), length)


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
    dead = Judged(Verdict(reason="took longer than 1 s"), 3)
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
    }


class Adder:
    """A small engine that answers `a%b` right when greedy and `=000` when it samples; it adds up
    named digits.
    """

    def __init__(self, tokenizer: CharacterTokenizer) -> None:
        self.version = Version(0, 1)
        self._decode = tokenizer.decode
        self._ready: list[Emission] = []
        self._texts: dict[str, str] = {}
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        self._texts[request.trajectory] = self._decode(request.tokens.tolist())
        self._answer(request.trajectory, request.sampling.temperature == 0)

    def append(self, trajectory: str, tokens: Tokens) -> None:
        self._texts[trajectory] += self._decode(tokens.tolist())
        self._answer(trajectory, True)

    def abort(self, trajectory: str) -> None:
        self.aborted.append(trajectory)

    def poll(self, deadline_s: float) -> list[Emission]:
        ready, self._ready = self._ready, []
        return ready

    def _answer(self, trajectory: str, right: bool) -> None:
        text = self._texts[trajectory]
        if "%" in text:
            x, y = (int(part[::-1]) for part in text.split("%"))
            said = [*ENCODE(f"={f'{x % y:03d}'[::-1]}" if right else "=000"), EOS]
        else:
            said = ENCODE(f"{sum(int(c) for c in text if c.isdigit()) % 10 if right else 'x'};")
        # In two pieces, as an engine may.
        for piece, finish in ((said[:1], None), (said[1:], "stop")):
            tokens = np.array(piece, np.uint32)
            zeros = np.zeros(len(piece), np.float32)
            self._ready.append(Emission(trajectory, tokens, zeros, self.version, finish))


def test_an_evaluation_asks_every_prompt_and_judges_every_answer():
    pool = RewardPool(TaskSettings(), capacity=7)  # fewer than there are answers
    figures = evaluate(
        Remainder(),
        Plan(20, 2, 420, 0),
        pool,
        Adder(Remainder().tokenizer()),  # pyright: ignore
    )
    pool.close()
    assert figures.accuracy_greedy == 1.0
    assert figures.accuracy_sampled < 0.2
    assert figures.length_median == 5
    assert figures.shares == {"direct": 1.0}


def test_answers_of_several_turns_go_back_and_forth_with_the_environment():
    class One(Adder):
        """Says `turn;` to whatever it is told: wrong totals, but whole dialogues."""

        def _answer(self, trajectory: str, right: bool) -> None:
            tokens = np.array(ENCODE("1;"), np.uint32)
            zeros = np.zeros(2, np.float32)
            self._ready.append(Emission(trajectory, tokens, zeros, self.version, "stop"))

    task = Scripted(turns=3)
    pool = RewardPool(TaskSettings(name="scripted"))
    engine = One(task.tokenizer())
    figures = evaluate(task, Plan(10, 1, 100, 0), pool, engine)  # pyright: ignore
    pool.close()
    assert figures.length_median == 6  # three turns of two tokens; the environment's do not count
    assert sorted(engine.aborted) == sorted(answers(task, Plan(10, 1, 100, 0)))


def test_requests_are_the_same_for_every_version_and_share_a_group_per_prompt():
    first, second = (answers(Remainder(), Plan(3, 2, 50, 9)) for _ in range(2))
    assert list(first) == list(second)
    assert [one.request.group for one in first.values()] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert sum(not one.sampled for one in first.values()) == 3
    assert {one.request.sampling.stop for one in first.values()} == {(EOS,)}
