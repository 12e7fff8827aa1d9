"""The pool of a scorer: reward processes, or requests to a service (`"http"`, `"judge"`)."""

import os
import re
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from rollstream.errors import ConfigurationError
from rollstream.producers.agent_settings import service_key
from rollstream.producers.rewards.pool import RewardPool
from rollstream.producers.scoring.functions import load_function
from rollstream.producers.scoring.requests import HttpRequest, JudgeRequest, ScoreRequest
from rollstream.producers.scoring.scorer import ScorerPool
from rollstream.producers.scoring.service import ServicePlan, ServicePool
from rollstream.producers.settings import ScoringSettings, TaskSettings
from rollstream.producers.tasks.base import Tokenizer

SERVICES = ("http", "judge")
"""Values of `scoring.function` that name a service in place of a function."""
_CHAT = "/chat/completions"
_UNSENT = re.compile("[^!-~ ]")  # what no header carries
_OTHER_NAMES = {
    **dict.fromkeys(("question", "problem", "query", "instruction", "input"), "prompt"),
    **dict.fromkeys(("response", "completion", "output", "prediction"), "answer"),
    **dict.fromkeys(
        ("ground_truth", "gold", "target", "expected", "label", "reference_answer",
         "correct_answer", "solution"),
        "reference",
    ),
}  # fmt: skip
"""Placeholders of other tools' prompts, each with the one here."""


def scorer_pool(
    scoring: ScoringSettings,
    task: TaskSettings,
    tokenizer: Callable[[], Tokenizer],
    environment: Mapping[str, str] = os.environ,
) -> ScorerPool:
    """Raises `ConfigurationError` for a function that cannot be imported, and for an unusable
    service.
    """
    check_scoring(scoring, environment)
    if scoring.function in SERVICES:
        request = _judge_request(scoring) if scoring.function == "judge" else None
        score_request: ScoreRequest = request or HttpRequest(scoring.names)
        plan = service_plan(scoring, environment)
        return ServicePool(plan, score_request, tokenizer())
    limits = {"reward_timeout_s": scoring.timeout_s, "reward_processes": scoring.processes}
    return RewardPool(task.model_copy(update=limits), function=scoring.function)


def check_scoring(scoring: ScoringSettings, environment: Mapping[str, str] = os.environ) -> None:
    """Raises `ConfigurationError` as `scorer_pool`, before a scorer waits for the run's model."""
    if scoring.function in SERVICES:
        check_service(scoring, environment)
    elif scoring.function and not scoring.holds_reference:
        load_function(scoring.function)


def check_service(scoring: ScoringSettings, environment: Mapping[str, str] | None) -> None:
    """Raises `ConfigurationError`. Without an `environment` the scorers run elsewhere, where the
    key is.
    """
    if scoring.function == "judge":
        _judge_request(scoring)
    service = scoring.service
    if environment is None and service.key_env is not None:
        environment = {service.key_env: "elsewhere"}
    service_plan(scoring, environment or {})


def window_size(scoring: ScoringSettings, per_process: int) -> int:
    """Returns how many trajectories a scorer has open at a time: enough for all of its calls."""
    if scoring.function in SERVICES:
        return 4 * scoring.service.concurrency
    return per_process * scoring.processes


def service_plan(scoring: ScoringSettings, environment: Mapping[str, str]) -> ServicePlan:
    service = scoring.service
    if service.url is None:
        raise ConfigurationError(
            f'scoring.function = "{scoring.function}" needs scoring.service.url'
        )
    headers = {"Content-Type": "application/json"}
    if service.key_env is not None:
        key = service_key(service.key_env, environment)
        if not key:
            raise ConfigurationError(
                f"scoring.service.key_env: the environment has no variable {service.key_env}"
            )
        if unsent := _UNSENT.search(key):
            raise ConfigurationError(
                f"scoring.service.key_env: the variable {service.key_env} has the character "
                f"{unsent[0]!a}, which no key has; copy the key again"
            )
        headers["Authorization"] = f"Bearer {key}"
    parts = urlsplit(service.url)
    if scoring.function == "judge" and not parts.path.endswith(_CHAT):
        parts = parts._replace(path=parts.path.rstrip("/") + _CHAT)
    url = parts.geturl()
    return ServicePlan(
        url,
        headers,
        service.concurrency,
        service.requests_per_s,
        service.answer_bytes_max,
        scoring.timeout_s,
    )


def _judge_request(scoring: ScoringSettings) -> JudgeRequest:
    judge = scoring.judge
    if not judge.model:
        raise ConfigurationError('scoring.function = "judge" needs scoring.judge.model')
    try:
        groups = re.compile(judge.pattern).groups
    except re.error as error:
        raise ConfigurationError(f"scoring.judge.pattern: {error}") from error
    if groups != 1:
        raise ConfigurationError(
            f"scoring.judge.pattern has {groups} groups; it needs one, which is the number"
        )
    if "{answer}" not in judge.prompt:
        raise ConfigurationError(
            "scoring.judge.prompt has no {answer}, so the judge would see no answer; the others "
            "that are replaced are {prompt} and {reference}"
        )
    for name, right in _OTHER_NAMES.items():
        if f"{{{name}}}" in judge.prompt:
            raise ConfigurationError(
                f"scoring.judge.prompt has {{{name}}}, which the judge would see as it stands: "
                f"write {{{right}}}; {{prompt}}, {{answer}} and {{reference}} are replaced"
            )
    return JudgeRequest(
        judge.model,
        judge.prompt,
        judge.pattern,
        judge.score_max,
        judge.tokens_max,
        judge.temperature,
    )
