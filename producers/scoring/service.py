"""Scores by HTTP requests; one deadline bounds a score with all attempts. Failures that may pass
(no connection, 408, 425, 429, 5xx, an unreadable answer) are tried again after growing pauses, and
not before `Retry-After`.
"""

import json
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import cast

import httpx2

from rollstream.deadline import Deadline
from rollstream.errors import ConfigurationError
from rollstream.foreign_json import parse_loose_json
from rollstream.http_proxies import may_use_proxy
from rollstream.producers.rewards.pool import RewardOutcome, RewardVerdict
from rollstream.producers.scoring.functions import Finished, TrajectoryFacts
from rollstream.producers.scoring.requests import ScoreRequest, UnreadableAnswer
from rollstream.producers.tasks.base import Tokenizer, Turns
from rollstream.streams.foreign_text import reason_text

log = logging.getLogger(__name__)
PAUSE_S, PAUSE_S_MAX = 0.5, 30.0
UNREADABLE_MAX = 3  # answers of one score that cannot be read: a judge model is paid for each
ERROR_BYTES_MAX = 4096  # of the body of a refusal that are read
ERROR_MAX = 200  # characters of its message
_PASSING = frozenset({408, 425, 429})


@dataclass(frozen=True, slots=True)
class ServicePlan:
    url: str
    headers: Mapping[str, str] = field(repr=False)
    concurrency: int
    requests_per_s: float | None
    answer_bytes_max: int
    timeout_s: float


class RequestPace:
    """At most `per_s` a second, evenly, and none while the service asks for a pause. Threads share
    it.
    """

    def __init__(self, per_s: float | None, clock: Callable[[], float]) -> None:
        self._gap_s = 1 / per_s if per_s else 0.0
        self._clock = clock
        self._next_s = clock()
        self._lock = threading.Lock()

    def wait_s(self) -> float:
        """Takes the next place, and returns the seconds until it."""
        with self._lock:
            now = self._clock()
            place = max(now, self._next_s)
            self._next_s = place + self._gap_s
            return place - now

    def hold(self, seconds: float) -> None:
        with self._lock:
            self._next_s = max(self._next_s, self._clock() + seconds)


class ServicePool:
    """Exactly one verdict for each trajectory. Requests under way at `close` end at their
    deadline.
    """

    def __init__(
        self,
        plan: ServicePlan,
        request: ScoreRequest,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._plan, self._request, self._tokenizer = plan, request, tokenizer
        self._clock, self._draw = clock, draw
        self._pace = RequestPace(plan.requests_per_s, clock)
        self._done: SimpleQueue[tuple[str, RewardOutcome]] = SimpleQueue()
        self._stop = threading.Event()
        self._threads = ThreadPoolExecutor(plan.concurrency, "score")
        limits = httpx2.Limits(max_connections=plan.concurrency)
        try:
            self._client = httpx2.Client(
                limits=limits, follow_redirects=False, trust_env=may_use_proxy(plan.url)
            )
        except (ImportError, ValueError) as error:  # SOCKS without its package, a scheme
            raise ConfigurationError(
                f"the proxy that the environment names for {plan.url} cannot be used ({error}): "
                "correct http_proxy, https_proxy or all_proxy, or name the host in no_proxy"
            ) from None
        # At INFO httpx2 logs every request, with its URL.
        logging.getLogger("httpx2").setLevel(logging.WARNING)

    def submit(self, key: str, reference: str, turns: Turns) -> None:
        raise AssertionError("a service has no task to judge by")

    def submit_finished(
        self, key: str, reference: str, turns: Turns, facts: TrajectoryFacts
    ) -> None:
        finished = Finished(facts, reference, turns, self._tokenizer.decode)
        self._threads.submit(self._score, key, finished)

    def poll(self) -> list[tuple[str, RewardOutcome]]:
        return [self._done.get() for _ in range(self._done.qsize())]

    def close(self) -> None:
        """Drops the queued trajectories; unanswered ones get no verdict."""
        self._stop.set()
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._client.close()

    def _score(self, key: str, finished: Finished) -> None:
        try:
            verdict = RewardVerdict(scores=self._scores(finished))
        except _Failed as error:
            verdict = RewardVerdict(reason=str(error))
        except Exception as error:  # noqa: BLE001 (the boundary of a thread)
            verdict = RewardVerdict(reason=f"{type(error).__name__}: {error}"[:300])
        if not self._stop.is_set():
            self._done.put((key, verdict))

    def _scores(self, finished: Finished) -> Mapping[str, float]:
        deadline = Deadline(self._plan.timeout_s, self._clock)
        request = self._request
        body = request.body(finished)
        pause_s, unreadable, reason = PAUSE_S, 0, "its turn did not come"
        while True:
            if not self._wait(self._pace.wait_s(), deadline):
                raise _Failed(f"no score within {self._plan.timeout_s:g} s; last: {reason}")
            try:
                return request.scores(self._answer(body, deadline))
            except _Refused as error:
                adapted = request.adapted(error.message)
                if adapted is None:
                    raise _Failed(str(error)) from None
                log.warning("%s; it is asked without that from now on", error)
                self._request = request = adapted  # for the next scores, too
                body = request.body(finished)
                continue
            except UnreadableAnswer as error:
                unreadable, reason = unreadable + 1, str(error)
                if unreadable == UNREADABLE_MAX:
                    raise _Failed(f"{UNREADABLE_MAX} answers could not be read: {reason}") from None
            except _Passing as error:
                reason = str(error)
                if error.retry_after_s is not None:
                    self._pace.hold(error.retry_after_s)
            if not self._wait(pause_s * (0.5 + self._draw() / 2), deadline):
                raise _Failed(f"no score within {self._plan.timeout_s:g} s; last: {reason}")
            pause_s = min(2 * pause_s, PAUSE_S_MAX)

    def _wait(self, seconds: float, deadline: Deadline) -> bool:
        # A wait of 0 has no end, so a service is asked at least once.
        if seconds and seconds >= deadline.remaining_s():
            return False
        return not self._stop.wait(seconds)

    def _answer(self, body: bytes, deadline: Deadline) -> bytes:
        left_s = max(0.001, deadline.remaining_s())
        try:
            with self._client.stream(
                "POST", self._plan.url, content=body, headers=self._plan.headers, timeout=left_s
            ) as answer:
                if answer.status_code != 200:
                    raise self._status_error(answer, deadline)
                return self._read(answer, deadline)
        except httpx2.TimeoutException:
            raise _Passing("no answer in time") from None
        except httpx2.TransportError as error:
            raise _Passing(f"{type(error).__name__}") from None

    def _status_error(self, answer: httpx2.Response, deadline: Deadline) -> Exception:
        status = answer.status_code
        body = _beginning(answer, deadline)
        # The key is in no message.
        if key := self._plan.headers.get("Authorization", "").partition(" ")[2]:
            body = body.replace(key.encode(), b"[key]")
        message = error_message(body)
        words = f": {message}" if message else ""
        if status in _PASSING or status >= 500:
            pause_s = retry_after_s(answer.headers.get("retry-after", ""))
            return _Passing(f"status {status}{words}", pause_s)
        return _Refused(f"the service refused with status {status}{words}", message)

    def _read(self, answer: httpx2.Response, deadline: Deadline) -> bytes:
        content = bytearray()
        for piece in answer.iter_bytes():
            content += piece
            if len(content) > self._plan.answer_bytes_max:
                raise UnreadableAnswer(f"more than {self._plan.answer_bytes_max} bytes")
            if deadline.passed() or self._stop.is_set():
                raise _Passing("the answer did not end in time")
        return bytes(content)


class _Failed(Exception):
    """There will be no score; the message is the annotation's reason."""


class _Refused(Exception):
    """The service refused this request, with a message that may name the parameter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason)
        self.message = message


class _Passing(Exception):
    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


def _beginning(answer: httpx2.Response, deadline: Deadline) -> bytes:
    content = bytearray()
    for piece in answer.iter_bytes():
        content += piece
        if len(content) >= ERROR_BYTES_MAX or deadline.passed():
            break
    return bytes(content[:ERROR_BYTES_MAX])


def error_message(body: bytes) -> str:
    """Returns in one line: OpenAI's `error.message`, FastAPI's `detail` and others alike, else the
    whole body.
    """
    try:
        value: object = parse_loose_json(body)
    except ValueError:
        value = body.decode(errors="replace")
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = cast("dict[str, object]", value)[name]
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return reason_text(" ".join(text.split()), ERROR_MAX)


def retry_after_s(text: str) -> float | None:
    """Returns the seconds of a header `Retry-After`; None without one, and for a date."""
    try:
        seconds = float(text)
    except ValueError:
        # A date would compare two machines' clocks.
        return None
    return seconds if 0 <= seconds < 1e9 else None
