"""Scorers ask a service or a judge model by HTTP, through its failures, and never twice."""

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.scoring.build import scorer_pool, service_plan
from rollstream.producers.scoring.functions import Finished, TrajectoryFacts
from rollstream.producers.scoring.requests import HttpRequest, JudgeRequest, UnreadableAnswer
from rollstream.producers.scoring.scorer import AnnotationPlan, Scorer
from rollstream.producers.scoring.service import RequestPace, ServicePool, retry_after_s
from rollstream.producers.settings import JudgeSettings, ScoringSettings, TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from testbed.waiting import WAIT_S, wait_for
from tests.scoring.judging_server import judged, judging, ok
from tests.scoring.scoring_samples import finished, is_caught_up, notes, post, running
from tests.support.hand_clock import HandClock

KEY = "sk-very-secret"
TIMEOUT_S = 300.0


@pytest.fixture
def bus(tmp_path: Path) -> Iterator[Bus]:
    one = open_bus(f"sqlite:{tmp_path / 'bus'}")
    one.create(catalogue(2))
    yield one
    one.close()


def scoring(url: str, **changed: object) -> ScoringSettings:
    service = {"url": url, "key_env": "JUDGE_KEY", **changed.pop("service", {})}  # type: ignore[dict-item]
    return ScoringSettings.model_validate(
        {"function": "http", "timeout_s": TIMEOUT_S, "service": service, **changed}
    )


def asking(bus: Bus, settings: ScoringSettings, name: str = "scorer-0") -> Scorer:
    task = TaskSettings()
    tokenizer = load_task(task).tokenizer
    pool = scorer_pool(settings, task, tokenizer, {"JUDGE_KEY": KEY})
    if isinstance(pool, ServicePool):
        pool._draw = lambda: -0.99  # pauses of milliseconds
    return Scorer(bus, pool, AnnotationPlan(settings.names, False, name), window=16)


def scores(bus: Bus) -> dict[str, list[float]]:
    return {note.trajectory: note.values.tolist() for note in notes(bus)}


def committed(bus: Bus) -> dict[int, int]:
    return {p: at.offset for p, at in bus.committed("scoring", "trajectories").items()}


def reason(bus: Bus) -> str:
    (note,) = notes(bus)
    assert len(note.values) == 0
    return note.reason


def run(bus: Bus, settings: ScoringSettings) -> None:
    with running(asking(bus, settings)):
        wait_for(lambda: is_caught_up(bus))


def test_a_service_gets_texts_and_facts_and_gives_numbers(bus: Bus):
    post(bus, finished("7.0", reference="130"))
    with judging(lambda n, body: ok({"quality": 0.5, "length": len(body["answer"])})) as server:
        run(bus, scoring(server.url + "/score", names=["quality", "length"]))
    (asked,) = server.asked
    assert (asked.path, asked.key) == ("/score", f"Bearer {KEY}")
    assert asked.body["answer"] == "=130"
    assert asked.body["reference"] == "130"
    assert {note.name: note.values.tolist() for note in notes(bus)} == {
        "quality": [0.5], "length": [4.0]
    }  # fmt: skip


def test_a_judge_is_asked_by_openais_protocol(bus: Bus):
    post(bus, finished("0.0", reference="{answer}"))
    prompt = "Q {prompt} A {answer} R {reference}"
    judge = {"model": "big", "prompt": prompt}
    with judging(lambda n, body: judged("Score: 3? No.\nScore: 7.5")) as server:
        run(bus, scoring(server.url + "/v1", function="judge", judge=judge))
    (asked,) = server.asked
    assert (asked.path, asked.body["model"]) == ("/v1/chat/completions", "big")
    content = asked.body["messages"][0]["content"]
    assert content == "Q 336%68 A =130 R {answer}"
    assert scores(bus) == {"0.0": [0.75]}


def test_failures_that_may_pass_are_tried_again(bus: Bus):
    answers = [
        (500, {}, b"broken"),
        (429, {"retry-after": "0.01"}, b""),
        (200, {}, b"{not json"),
        (503, {"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, b""),
        ok(0.25),
    ]
    post(bus, finished("0.0"))
    with judging(lambda n, body: answers[n]) as server:
        run(bus, scoring(server.url))
    assert len(server.asked) == 5
    assert scores(bus) == {"0.0": [0.25]}


def test_a_service_that_is_not_there_yet_is_waited_for(bus: Bus):
    post(bus, finished("0.0"))
    with judging(lambda n, body: ok(1)) as gone:
        pass
    run(bus, scoring(gone.url, timeout_s=0.3))
    assert reason(bus) == "no score within 0.3 s; last: ConnectError"


def test_a_hanging_service_ends_at_the_deadline(bus: Bus):
    post(bus, finished("0.0"))
    with judging(lambda n, body: None) as server:
        run(bus, scoring(server.url, timeout_s=0.3))
    assert reason(bus) == "no score within 0.3 s; last: no answer in time"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ((401, {}, b"who are you?"), "the service refused with status 401"),
        ((302, {"location": "/"}, b""), "the service refused with status 302"),
        (ok("high"), "3 answers could not be read: a str in place of a number"),
        ((200, {}, b"NaN"), "3 answers could not be read: a number that is not finite"),
        ((200, {}, b"[" * 4000), "3 answers could not be read: not JSON"),
        ((200, {}, b"1" * 5000), "3 answers could not be read: more than 4096 bytes"),
        (ok({"other": 1, "why": "x"}), "not among what was given (other, why)"),
        (
            (400, {}, b'{"error": {"message": "no such model"}}'),
            "the service refused with status 400: no such model",
        ),
    ],
)
def test_what_a_service_cannot_score_has_a_reason(bus: Bus, answer: tuple, expected: str):
    post(bus, finished("0.0"))
    with judging(lambda n, body: answer) as server:
        run(bus, scoring(server.url, service={"answer_bytes_max": 4096}))
    assert reason(bus).startswith(expected)


def test_true_and_false_are_one_and_zero(bus: Bus):
    post(bus, finished("0.0"), finished("0.1"))
    with judging(lambda n, body: ok({"reward": body["trajectory"] == "0.1"})) as server:
        run(bus, scoring(server.url))
    assert scores(bus) == {"0.0": [0.0], "0.1": [1.0]}


@pytest.mark.parametrize(
    ("reference", "task", "text"),
    [
        ('"Z\\u00fcrich"', "remainder", "Zürich"),
        ('"a\\nb"', "", "a\nb"),
        ('["\\u5317", 1.50]', "", '["北", 1.5]'),
        (json.dumps({"part": "a", "of": '"\\u5317"'}), "a", "北"),
        (json.dumps({"part": "a", "of": "x"}), "b", '{"part": "a", "of": "x"}'),
        ("no JSON", "a", "no JSON"),
    ],
)
def test_a_reference_is_the_text_that_the_task_recorded(reference: str, task: str, text: str):
    facts = TrajectoryFacts("0.0", 0, 0, task, "stop", [])
    one = Finished(facts, reference, [], lambda tokens: "")
    assert one.reference == text
    assert json.loads(HttpRequest(("reward",)).body(one))["reference"] == text
    judge = json.loads(JudgeRequest("m", "{reference}", "", 10.0, 64, 0.0).body(one))
    assert judge["messages"][0]["content"] == text


def test_a_judge_is_asked_without_what_its_model_refuses(bus: Bus):
    post(bus, finished("0.0"), finished("0.1"))
    refused = {
        "max_tokens": "'max_tokens' is not supported with this model. Use 'max_completion_tokens'",
        "temperature": "Unsupported value: 'temperature' does not support 0 with this model.",
    }

    def answer(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        for name, message in refused.items():
            if name in body:
                return 400, {}, json.dumps({"error": {"message": message}}).encode()
        assert body["max_completion_tokens"] == 512
        return judged("Score: 7.5")

    with judging(answer) as server:
        settings = scoring(server.url, function="judge", judge={"model": "m"})
        run(bus, settings)
    assert scores(bus) == {"0.0": [0.75], "0.1": [0.75]}


@pytest.mark.parametrize(
    ("finish", "text", "score"),
    [
        ("stop", "<think>\nScore: 10 would be right</think>\nScore: 3", 0.3),
        ("stop", "Score: 10 would be right</think>\nScore: 3", 0.3),
        ("stop", "<think>\nA wrong one gets Score: 10", None),
        ("length", "<think>\nA wrong one gets Score: 10", None),
        ("length", "Score: 1", None),
        ("length", None, None),
    ],
)
def test_no_number_of_a_judges_thought_is_its_score(finish: str, text: str, score: float | None):
    body = {"choices": [{"finish_reason": finish, "message": {"content": text}}]}
    request = JudgeRequest("m", "{answer}", JudgeSettings().pattern, 10.0, 64, 0.0)
    if score is not None:
        assert request.scores(json.dumps(body).encode()) == {"": score}
        return
    with pytest.raises(UnreadableAnswer, match=r"judge\.tokens_max = 64"):
        request.scores(json.dumps(body).encode())


def test_a_key_has_no_line_end_and_only_what_a_header_carries():
    settings = scoring("http://h")
    assert service_plan(settings, {"JUDGE_KEY": "k\n"}).headers["Authorization"] == "Bearer k"
    with pytest.raises(ConfigurationError, match=r"JUDGE_KEY has the character '\\u201d'"):
        service_plan(settings, {"JUDGE_KEY": "k\u201d"})


@pytest.mark.parametrize("text", ["It is good.", "Score: 11", "Score: -1"])
def test_a_judge_without_a_score_has_a_reason(bus: Bus, text: str):
    post(bus, finished("0.0"))
    with judging(lambda n, body: judged(text)) as server:
        run(bus, scoring(server.url, function="judge", judge={"model": "m"}))
    assert reason(bus).startswith("3 answers could not be read: the judge gave")


def test_the_key_is_in_no_log_and_no_annotation(bus: Bus, caplog: pytest.LogCaptureFixture):
    post(bus, finished("0.0"), finished("0.1"))
    with caplog.at_level(logging.DEBUG), judging(lambda n, body: (403, {}, KEY.encode())) as server:
        one = asking(bus, scoring(server.url))
        assert KEY not in repr(one.pool)
        with running(one):
            wait_for(lambda: is_caught_up(bus))
    assert KEY not in caplog.text
    assert all(KEY not in note.reason for note in notes(bus))


def test_requests_at_a_time_are_bounded(bus: Bus):
    post(bus, *(finished(f"{n}.0") for n in range(12)))

    def answer(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        if number < 3:
            wait_for(lambda: held.at_once == 3 or len(held.asked) > 3)
        return ok(1)

    with judging(answer) as held:
        run(bus, scoring(held.url, service={"concurrency": 3}))
    assert held.at_once_max == 3
    assert len(scores(bus)) == 12


def test_what_is_in_the_log_is_never_asked_again(bus: Bus):
    """The first scorer is stopped while the oldest record of the partition is open."""
    post(bus, finished("1.0"), finished("1.1"), finished("1.2"))

    def first(number: int, body: dict):
        return None if body["trajectory"] == "1.0" else ok(0.5)

    with judging(first) as server:
        with running(asking(bus, scoring(server.url))):
            wait_for(lambda: len(notes(bus)) == 2)
            server.ended.set()
        assert not is_caught_up(bus)
    with judging(lambda n, body: ok(0.75)) as again:
        second = asking(bus, scoring(again.url), "scorer-1")
        with running(second):
            wait_for(lambda: is_caught_up(bus))
    assert again.trajectories() == ["1.0"]
    assert second.counts["recorded"] == 2
    assert scores(bus) == {"1.0": [0.75], "1.1": [0.5], "1.2": [0.5]}


def test_a_slow_answer_holds_no_other(bus: Bus):
    """With a window of 16 the 60 others are asked, answered, published and, in the partition
    without the slow one, committed before the slow answer comes.
    """
    names = [f"{n}.0" for n in range(61)]
    post(bus, *map(finished, names))
    slow = names[0]
    (first,) = (one for one in bus.read("trajectories", {0: 0, 1: 0}) if one.key == b"0")
    release = threading.Event()

    def answer(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        if body["trajectory"] == slow:
            assert release.wait(WAIT_S)
        return ok(0.5)

    with judging(answer) as server:
        settings = scoring(server.url, service={"concurrency": 2})
        with running(asking(bus, settings)):
            wait_for(lambda: {*scores(bus)} == {*names} - {slow})
            other = 1 - first.partition
            wait_for(lambda: committed(bus).get(other) == bus.end("trajectories")[other])
            assert committed(bus).get(first.partition, 0) <= first.offset
            assert server.at_once_max == 2
            release.set()
            wait_for(lambda: is_caught_up(bus))
    assert sorted(server.trajectories()) == sorted(names)
    assert scores(bus)[slow] == [0.5]


def test_a_second_completion_of_an_open_trajectory_is_not_asked(bus: Bus):
    """Invariant 2: the first completion counts."""
    release = threading.Event()

    def answer(number: int, body: dict) -> tuple[int, dict[str, str], bytes]:
        assert release.wait(WAIT_S)
        return ok(len(body["answer"]))

    with judging(answer) as server, running(asking(bus, scoring(server.url))):
        post(bus, finished("0.0", "=13"))
        wait_for(lambda: server.asked)
        post(bus, finished("0.0", "=130", attempt=2), finished("0.1"))
        wait_for(lambda: len(server.asked) == 2)
        release.set()
        wait_for(lambda: is_caught_up(bus))
    assert server.trajectories() == ["0.0", "0.1"]
    assert scores(bus)["0.0"] == [3.0]


def test_a_later_completion_of_an_annotated_trajectory_is_not_asked(bus: Bus):
    with judging(lambda n, body: ok(1)) as server:
        post(bus, finished("0.0"))
        with running(asking(bus, scoring(server.url))):
            wait_for(lambda: len(notes(bus)) == 1)
            post(bus, finished("0.0", attempt=2))
            wait_for(lambda: is_caught_up(bus))
    assert server.trajectories() == ["0.0"]


def test_requests_are_spaced_evenly_and_held_back_together():
    clock = HandClock()
    pace = RequestPace(4.0, clock)
    assert [pace.wait_s() for _ in range(3)] == [0.0, 0.25, 0.5]
    pace.hold(10)
    assert pace.wait_s() == 10.0
    assert RequestPace(None, clock).wait_s() == 0.0


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("0.5", 0.5), ("-1", None), ("nan", None), ("soon", None)]
)
def test_retry_after_is_read_in_seconds(text: str, seconds: float | None):
    assert retry_after_s(text) == seconds


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"service": {"url": None}}, "needs scoring.service.url"),
        ({"service": {"key_env": "NO_KEY"}}, "has no variable NO_KEY"),
        ({"function": "judge"}, "needs scoring.judge.model"),
        ({"function": "judge", "judge": {"model": "m", "pattern": "("}}, "scoring.judge.pattern"),
        ({"function": "judge", "judge": {"model": "m", "pattern": "x"}}, "has 0 groups"),
    ],
)
def test_a_service_without_what_it_needs_is_refused(changed: dict, message: str):
    settings = scoring("http://127.0.0.1:1", **changed)
    with pytest.raises(ConfigurationError, match=message):
        scorer_pool(
            settings, TaskSettings(), load_task(TaskSettings()).tokenizer, {"JUDGE_KEY": "k"}
        )


@pytest.mark.parametrize(
    "text", ["Score: 7", "**Score:** 7", "**Score**: 7", "*Score*: 7", "Score: `7`", "Score：7"]
)
def test_a_score_may_have_marks_of_markdown(text: str):
    body = {"choices": [{"message": {"content": f"Right. {text}"}}]}
    request = JudgeRequest("m", "{answer}", JudgeSettings().pattern, 10.0, 64, 0.0)
    assert request.scores(json.dumps(body).encode()) == {"": 0.7}


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://h/v1", "http://h/v1/chat/completions"),
        ("http://h/v1/chat/completions", "http://h/v1/chat/completions"),
        (
            "https://x.openai.azure.com/openai/deployments/d?api-version=2024-10-21",
            "https://x.openai.azure.com/openai/deployments/d/chat/completions?api-version=2024-10-21",
        ),
    ],
)
def test_a_judge_is_asked_at_its_own_path(url: str, asked: str):
    settings = scoring(url, function="judge", judge={"model": "m"})
    assert service_plan(settings, {"JUDGE_KEY": "k"}).url == asked
    for wrong in ("http://h/v1?key=secret", "http://u:p@h/v1"):
        with pytest.raises(ValueError, match="url"):
            scoring(wrong, function="judge")
