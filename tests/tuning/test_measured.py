"""What a log shows of the engine, the trainer and the answers."""

from dataclasses import replace

import numpy as np
import pytest

from rollstream.plan.tuning.machine import with_drafts, without_drafts
from rollstream.plan.tuning.measured import (
    DraftGain,
    FinishedAnswer,
    MeasuredTopics,
    RunMeasurements,
    decode_points,
    fit_step_times,
    length_correlation,
    measure,
)
from rollstream.producers.engines.roofline import Roofline
from rollstream.streams.records import Applied, Prompt, RolloutStatus, StepDone, Trajectory
from rollstream.streams.values import Drafts, Sampling, Span, Version
from tests.index.indexed_records import index_of
from tests.support import planted_states as planted

REAL = Roofline(weights_s=0.010, kv_token_s=2e-6, row_s=0.001, overlapping=False)


def decoded(
    roofline: Roofline, slots: int, lengths: list[int], prompt: int = 20
) -> list[FinishedAnswer]:
    """Answers of one rollout that decodes at most `slots` together, step by step."""
    now, running, answers = 0.0, dict[int, tuple[float, int]](), list[FinishedAnswer]()
    waiting = list(enumerate(lengths))
    while waiting or running:
        while waiting and len(running) < slots:
            number, _ = waiting.pop(0)
            running[number] = (now, 0)
        cached = sum(prompt + done for _, done in running.values())
        now += roofline.step_s(len(running), cached)
        for number, (started, done) in list(running.items()):
            running[number] = (started, done + 1)
            if done + 1 == lengths[number]:
                del running[number]
                answers.append(
                    FinishedAnswer(
                        "r", number // 4, number % 4, prompt, done + 1, started, now, True
                    )
                )
    return answers


def test_step_times_follow_from_the_answers():
    """Batches of 2 to 16 rows tell rows, cached tokens and the rest apart."""
    random = np.random.default_rng(0)
    points = [
        point
        for slots in (2, 5, 9, 16)
        for point in decode_points(
            decoded(REAL, slots, [int(n) for n in random.integers(10, 200, 80)])
        )
    ]
    fitted = fit_step_times(points)
    for rows, kv in ((2, 200.0), (8, 1_000.0), (16, 3_000.0)):
        assert fitted.step_s(rows, kv) == pytest.approx(REAL.step_s(rows, kv), rel=0.05)


def test_equal_batches_give_the_right_time_there():
    fitted = fit_step_times(decode_points(decoded(REAL, 4, [100] * 40)))
    assert fitted.step_s(4, 4 * 70) == pytest.approx(REAL.step_s(4, 4 * 70), rel=0.03)
    assert min(fitted.weights_s, fitted.row_s, fitted.kv_token_s) >= 0


def test_answers_that_moved_count_as_rows_and_are_no_measurements():
    answers = decoded(REAL, 4, [50] * 8)
    moved = [replace(one, is_whole=one.index != 0) for one in answers]
    assert len(decode_points(moved)) == 6
    assert decode_points(moved)[0].rows == pytest.approx(4.0)


def test_lengths_of_one_prompt_are_correlated_or_not():
    alike = [
        answer(group, index, 10 * (group + 1) + index) for group in range(60) for index in (0, 1)
    ]
    random = np.random.default_rng(0)
    free = [
        answer(group, index, int(random.integers(5, 5_000)))
        for group in range(200)
        for index in (0, 1)
    ]
    assert length_correlation(alike) > 0.9
    assert length_correlation(free) < 0.2
    assert length_correlation([]) == 0.0


def answer(group: int, index: int, tokens: int) -> FinishedAnswer:
    return FinishedAnswer("r", group, index, 10, tokens, 0.0, 1.0, True)


def measured(*records, trainer_threads: int = 1) -> RunMeasurements:
    topics = MeasuredTopics()
    for record in records:
        topics.apply(record)
    with index_of(*records) as index:
        return measure(index, topics, trainer_threads)


def finished(group: int, index: int, length: int, **changes) -> Trajectory:
    return planted.finished(
        group, index, 1.0,
        tokens=np.zeros(length + 4, np.uint32),
        sources=np.array([0] * 4 + [1] * length, np.uint8),
        logprobs=np.zeros(length, np.float32),
        spans=(Span(0, length, Version(1, 1)),),
        **changes,
    )  # fmt: skip


def test_groups_and_prompts():
    found = measured(
        finished(0, 1, 20), finished(0, 0, 10), finished(2, 0, 30),
        finished(2, 0, 99),  # only the first completion counts
        finished(3, 0, 5, finish="dead"),
        *(Prompt(group, "t", np.zeros(4, np.uint32), 2, Sampling(), 0, epoch=group // 6)
          for group in range(20)),
    )  # fmt: skip
    assert found.groups == ((10, 20), (), (30,))
    assert found.lengths == (10, 20, 30)
    assert (found.prompt_tokens, found.prompts) == (4, 6)


def step(number: int, at_s: float, **metrics: float) -> StepDone:
    return replace_counts(planted.done(number, at_s, None, **metrics), trained=10)


def replace_counts(done: StepDone, **counts: int) -> StepDone:
    return StepDone(
        done.step, done.version, done.state_hash, done.takes, done.metrics, counts, done.time_s
    )


def test_a_trainer_is_timed_by_its_work_not_by_its_waiting():
    """10 samples of 4 + 96 tokens: a second of work beside a long wait, or two threads' seconds."""
    shown = {"tokens_trained": 960.0, "seconds": 5.0}
    answers = [finished(0, index, 20) for index in range(4)]
    steps = [step(n, 10.0 * n, wait_s=4.0, **shown) for n in range(1, 7)]
    found = measured(*answers, *steps)
    assert found.trained_token_s == pytest.approx(1.0 / 1000)
    assert found.publish_s == pytest.approx(5.0)
    steps = [step(n, 10.0 * n, wait_s=4.9, busy_s=4.0, **shown) for n in range(1, 7)]
    threads = measured(*answers, *steps, trainer_threads=2)
    assert threads.trained_token_s == pytest.approx(2.0 / 1000)


def test_versions_take_time():
    records = [step(n, planted.begin_s(n), seconds=1.0) for n in range(1, 6)]
    announced = [planted.announced(n) for n in range(1, 6)]
    swaps = [Applied("r", 1, Version(1, 1), "h", "hashes", 1, s, 0.0) for s in (0.1, 0.2, 0.9)]
    found = measured(*records, *announced, *swaps)
    assert (found.arrive_s, found.update_s) == (0.0, 0.2)


def test_an_empty_log_shows_nothing():
    found = measured()
    assert (found.lengths, found.points, found.trained_token_s) == ((), (), None)
    assert (found.publish_s, found.update_s, found.kv_capacity, found.drafts) == (None,) * 4


def test_drafts_and_cache():
    drafted = Drafts((2, 8), steps=4, guessed=12, asked=4, found=4, lookup_s=0.0)
    status: RolloutStatus = planted.status("r", kv_capacity=5_000)
    found = measured(finished(0, 0, 10, drafts=drafted), status)
    assert found.drafts == DraftGain(tokens_per_pass=2.5, rows_per_pass=4.0)
    assert found.kv_capacity == 5_000


def test_drafts_give_more_tokens_for_more_rows():
    gain = DraftGain(tokens_per_pass=2.0, rows_per_pass=4.0)
    drafted = with_drafts(REAL, gain)
    assert drafted.step_s(1, 0) == pytest.approx((0.010 + 4 * 0.001) / 2)
    assert without_drafts(drafted, gain).step_s(7, 900) == pytest.approx(REAL.step_s(7, 900))
