"""Evaluates a version by sampled and greedy answers to held-out prompts, the same for every
version, with the same seed (invariant 10).
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import comb

import numpy as np

from rollstream.errors import EngineRefused
from rollstream.producers.engines.base import Emission, Engine, GenerationRequest
from rollstream.producers.rewards.pool import RewardPool, RewardVerdict
from rollstream.producers.tasks.base import (
    STYLE_PREFIX,
    Environment,
    Reply,
    Task,
    TaskPrompt,
    turns_of,
)
from rollstream.streams.codec import record_hash
from rollstream.streams.records import ENVIRONMENT, GENERATED, PROMPT
from rollstream.streams.values import Sampling, Sources, Tokens

RIGHT = 1 - 1e-9  # the least reward of a right answer: a sum of shares may round below 1
_POLL_S = 0.05
_IDLE_S = 0.002  # pause while the engine is idle and rewards are computed


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """`length` is in generated tokens."""

    verdict: RewardVerdict
    length: int
    task: str = ""
    prompt: int = 0

    @property
    def reward(self) -> float:
        return 0.0 if self.verdict.dead else self.verdict.reward


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Accuracy is the mean reward, lengths are in tokens. A dead answer counts as wrong, and in
    `dead`.

    `by_prompt` has each prompt's right sampled answers (a reward of 1 or more), all of them, and
    their mean reward.

    Watch sampled accuracy: when the most likely style changes, all greedy answers change at once,
    although the model's skill does not.
    """

    accuracy_sampled: float
    accuracy_greedy: float
    length_median: float
    length_p99: float
    shares: dict[str, float]
    dead: int
    accuracy_by_task: dict[str, float] = field(default_factory=dict[str, float])
    by_prompt: tuple[tuple[int, int, float], ...] = ()
    prompts: str = ""
    pass_at: dict[int, float] = field(default_factory=dict[int, float])
    """pass@k by k (`pass_at_k`); empty with one sampled answer a prompt."""
    temperature: float = 1.0
    """That of the sampled answers."""

    def line(self, step: int, seconds: float | None) -> dict[str, object]:
        """Returns the line of `metrics/eval.jsonl`; `seconds` since the run's start are left out if
        None.
        """
        accuracies: dict[str, object] = {
            f"accuracy_sampled/{task}": round(accuracy, 6)
            for task, accuracy in self.accuracy_by_task.items()
        }
        accuracies |= {f"pass_at/{k}": round(share, 6) for k, share in self.pass_at.items()}
        return accuracies | {
            "step": step,
            **({} if seconds is None else {"seconds": round(seconds, 3)}),
            "accuracy_sampled": round(self.accuracy_sampled, 6),
            "accuracy_greedy": round(self.accuracy_greedy, 6),
            "length_median": self.length_median,
            "length_p99": self.length_p99,
            "shares": {name: round(share, 6) for name, share in self.shares.items()},
            "dead": self.dead,
            **({} if self.temperature == 1 else {"temperature": self.temperature}),
            **({"prompts": self.prompts} if self.prompts else {}),
            "by_prompt": [[right, n, round(mean, 6)] for right, n, mean in self.by_prompt],
        }


def measure(sampled: Sequence[JudgedAnswer], greedy: Sequence[JudgedAnswer]) -> Evaluation:
    """Returns the metrics of these answers; there must be at least one of each kind."""
    assert sampled, "no sampled answer to measure"
    assert greedy, "no greedy answer to measure"
    lengths = np.array([answer.length for answer in sampled])
    by_prompt = _by_prompt(sampled)
    return Evaluation(
        accuracy_sampled=_accuracy(sampled),
        accuracy_greedy=_accuracy(greedy),
        length_median=float(np.median(lengths)),
        length_p99=float(np.percentile(lengths, 99)),
        shares=_shares(sampled),
        dead=sum(answer.verdict.dead for answer in (*sampled, *greedy)),
        accuracy_by_task=_by_task(sampled),
        by_prompt=by_prompt,
        pass_at=pass_at_k([(right, answers) for right, answers, _ in by_prompt]),
    )


def pass_at_k(counts: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Returns the mean over prompts of the probability that one of k answers, drawn without
    replacement, is right (arXiv 2107.03374, section 2.1), for k = 2, 4, … up to the fewest answers;
    `counts` has right answers and all.
    """
    answers_min = min((answers for _, answers in counts), default=0)
    sizes = [
        1 << power for power in range(1, answers_min.bit_length()) if 1 << power <= answers_min
    ]
    return {
        k: float(np.mean([1 - comb(n - right, k) / comb(n, k) for right, n in counts]))
        for k in sizes
    }


def _by_prompt(answers: Sequence[JudgedAnswer]) -> tuple[tuple[int, int, float], ...]:
    rewards: dict[int, list[float]] = {}
    for answer in answers:
        rewards.setdefault(answer.prompt, []).append(answer.reward)
    return tuple(
        (
            sum(reward >= RIGHT for reward in prompt_rewards),
            len(prompt_rewards),
            float(np.mean(prompt_rewards)),
        )
        for _, prompt_rewards in sorted(rewards.items())
    )


def _by_task(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    tasks = sorted({answer.task for answer in answers})
    if len(tasks) < 2:
        return {}
    return {task: _accuracy([a for a in answers if a.task == task]) for task in tasks}


def _accuracy(answers: Sequence[JudgedAnswer]) -> float:
    return float(np.mean([answer.reward for answer in answers]))


def _shares(answers: Sequence[JudgedAnswer]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for answer in answers:
        for name, value in answer.verdict.scores.items():
            if name.startswith(STYLE_PREFIX):
                style = name.removeprefix(STYLE_PREFIX)
                totals[style] = totals.get(style, 0.0) + value
    # A missing score counts as 0.
    return {style: totals[style] / len(answers) for style in sorted(totals)}


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """For each of `prompts` prompts `samples` sampled answers and a greedy one, of at most
    `tokens_max` tokens.
    """

    prompts: int
    samples: int
    tokens_max: int
    seed: int
    temperature: float = 1.0


@dataclass(slots=True)
class HeldOutAnswer:
    """One answer's pieces after the prompt (generated tokens and replies), and the environment's
    `state`; `over`: no further turn follows.
    """

    prompt: TaskPrompt
    request: GenerationRequest
    tokens: list[Tokens] = field(default_factory=list[Tokens])
    sources: list[Sources] = field(default_factory=list[Sources])
    state: str = ""
    over: bool = False

    def add(self, tokens: Tokens, source: int) -> None:
        self.tokens.append(tokens)
        self.sources.append(np.full(len(tokens), source, np.uint8))

    def turns(self) -> list[list[int]]:
        return turns_of(np.concatenate(self.tokens), np.concatenate(self.sources))

    @property
    def sampled(self) -> bool:
        return self.request.sampling.temperature > 0

    def generated(self) -> int:
        return int(np.count_nonzero(np.concatenate(self.sources) == GENERATED))


def held_out_answers(task: Task, plan: EvaluationPlan) -> dict[str, HeldOutAnswer]:
    # Answers of an environment keep their slots in the engine between turns.
    hold = isinstance(task, Environment)
    sampling_drawn = Sampling(plan.temperature, tokens_max=plan.tokens_max, stop=tuple(task.stop))
    kinds = {f"sample-{index}": sampling_drawn for index in range(plan.samples)}
    kinds["greedy"] = replace(sampling_drawn, temperature=0.0)
    answers: dict[str, HeldOutAnswer] = {}
    for group, prompt in enumerate(task.held_out(plan.prompts)[: plan.prompts]):
        tokens = np.array(prompt.tokens, np.uint32)
        sources = np.full(len(tokens), PROMPT, np.uint8)
        for kind, sampling in kinds.items():
            name = f"held-out-{group}/{kind}"
            empty = np.zeros(0, np.float32)
            prompt_sampling = (
                sampling if prompt.stop is None else replace(sampling, stop=prompt.stop)
            )
            request = GenerationRequest(
                name, group, tokens, sources, prompt_sampling, plan.seed, empty, hold=hold
            )
            answers[name] = HeldOutAnswer(prompt, request)
    return answers


def evaluate(
    task: Task,
    plan: EvaluationPlan,
    rewards: RewardPool,
    engine: Engine,
    sleep: Callable[[float], None] = time.sleep,
) -> Evaluation:
    """Evaluates the version that `engine` serves; engine and pool must have no other work."""
    answers_by_name = held_out_answers(task, plan)
    judged = _EvaluationRound(engine, rewards, answers_by_name).run(sleep)
    evaluation = measure(
        [answer for name, answer in judged.items() if answers_by_name[name].sampled],
        [answer for name, answer in judged.items() if not answers_by_name[name].sampled],
    )
    prompts = _prompts_hash(answers_by_name.values())
    return replace(evaluation, prompts=prompts, temperature=plan.temperature)


def _prompts_hash(answers: Iterable[HeldOutAnswer]) -> str:
    tokens = [answer.request.tokens for answer in answers if not answer.sampled]
    # The ends separate the prompts within the joined tokens.
    ends = np.cumsum([len(prompt_tokens) for prompt_tokens in tokens]).astype(np.uint32)
    return record_hash(np.concatenate([ends, *tokens]).tobytes())


@dataclass(slots=True)
class _EvaluationRound:
    engine: Engine
    rewards: RewardPool
    answers_by_name: dict[str, HeldOutAnswer]
    judged: dict[str, JudgedAnswer] = field(default_factory=dict[str, JudgedAnswer])
    to_judge: deque[HeldOutAnswer] = field(default_factory=deque[HeldOutAnswer])

    def run(self, sleep: Callable[[float], None]) -> dict[str, JudgedAnswer]:
        for answer in self.answers_by_name.values():
            self.engine.submit(answer.request)
        while len(self.judged) < len(self.answers_by_name):
            emissions = self.engine.poll(_POLL_S)
            for emission in emissions:
                self._grow(self.answers_by_name[emission.trajectory], emission)
            # An answer whose turn has ended waits for room in the pool.
            while self.to_judge and self.rewards.can_submit():
                self._judge(self.to_judge.popleft())
            outcomes = self.rewards.poll()
            for name, outcome in outcomes:
                self._apply_outcome(name, self.answers_by_name[name], outcome)
            if not (emissions or outcomes):
                sleep(_IDLE_S)
        return self.judged

    def _grow(self, answer: HeldOutAnswer, emission: Emission) -> None:
        answer.add(emission.tokens, GENERATED)
        if emission.finish is not None:
            answer.over = emission.finish == "length" or not answer.request.hold
            self.to_judge.append(answer)

    def _judge(self, answer: HeldOutAnswer) -> None:
        name, reference, turns = answer.request.trajectory, answer.prompt.reference, answer.turns()
        if answer.over:
            self.rewards.submit(name, reference, turns)
        else:
            self.rewards.submit_turn(name, reference, answer.state, turns)

    def _apply_outcome(
        self, name: str, answer: HeldOutAnswer, outcome: RewardVerdict | Reply
    ) -> None:
        if isinstance(outcome, Reply) and outcome.tokens:
            tokens = np.array(outcome.tokens, np.uint32)
            answer.add(tokens, ENVIRONMENT)
            answer.state = outcome.state
            try:
                self.engine.append(name, tokens)
            except EngineRefused as error:  # the reply has tokens that the engine refuses
                self.engine.abort(name)
                verdict = RewardVerdict(reason=f"environment: {error}")
                self._end(name, answer, verdict)
            return
        if not answer.over:  # its last turn still holds a slot
            self.engine.abort(name)
        # An empty reply completes the answer.
        if isinstance(outcome, Reply):
            answer.over = True
            self.to_judge.append(answer)
        else:
            self._end(name, answer, outcome)

    def _end(self, name: str, answer: HeldOutAnswer, verdict: RewardVerdict) -> None:
        length, task = answer.generated(), answer.prompt.task
        self.judged[name] = JudgedAnswer(verdict, length, task, answer.request.group)
