"""Builds a run's task in a process of its own, then calls its verifier once: `python -m
rollstream.run.checks.task_process SETTINGS ORDER`, with the environment of a reward process, so the
user's code finds no credentials.

The first line on stdout has the facts, the second the verifier's answer to a made-up answer, with
one more for each further part of a mixture. The user's code may print, hang or exit: earlier lines
stay.
"""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from numbers import Integral
from typing import Any, cast

import msgspec

from rollstream.errors import ConfigurationError
from rollstream.producers.dialogue.chat_template import ChatTemplate
from rollstream.producers.dialogue.text_tokenizer import TextTokenizer
from rollstream.producers.dialogue.tool_formats import UNKNOWN, format_of_template, unknown_format
from rollstream.producers.rewards.facts import TrajectoryFacts
from rollstream.producers.rewards.process import (
    RewardQuestion,
    answer_question,
    claim_pipes,
)
from rollstream.producers.sandbox_settings import configure_sandboxes
from rollstream.producers.scoring.functions import load_scoring
from rollstream.producers.tasks.base import (
    PlainTask,
    Prepared,
    Task,
    TaskPrompt,
    Teacher,
    held_out_count,
    plain_documents,
)
from rollstream.producers.tasks.dataset import Dataset
from rollstream.producers.tasks.dataset_survey import (
    DatasetSurvey,
    LongPrompt,
    sort_prompts,
    survey_dataset,
)
from rollstream.producers.tasks.mixture import TaskMixture
from rollstream.producers.tasks.registry import largest_token, load_task
from rollstream.producers.tasks.tool_dialogue import ToolDialogue
from rollstream.run.checks.own_parts import check_own_parts, failure_line
from rollstream.run.checks.task_facts import JudgedFact, TaskFacts, TaskOrder
from rollstream.streams.admissible import refused_score

MADE_UP_ANSWER = "This is a made-up answer."
# Of a task that is no data set.
PROMPTS_TRIED = 32
# Tokens are uint32 in records.
TOKENS_MAX = 1 << 32


def task_facts(task: Task, order: TaskOrder) -> TaskFacts:
    """Raises `ConfigurationError` for what ends every run of this task."""
    check_own_parts(order.parts, task)
    parts = _parts(task)
    for part in parts:
        _check_stop(part)
        if isinstance(part, ToolDialogue):
            part.check_template()
    surveys = [survey_dataset(part) for part in parts if isinstance(part, Dataset)]
    tried = [] if surveys else [_tried_prompt(task, order, n) for n in range(PROMPTS_TRIED)]
    longest = [LongPrompt(len(tokens), f"prompt {n}") for n, tokens in enumerate(tried)]
    longest += [prompt for survey in surveys for prompt in survey.longest]
    is_complete = all(survey.is_whole for survey in surveys)
    used = [*(token for tokens in tried for token in tokens), *(s.largest_token for s in surveys)]
    if order.is_taught:
        _check_taught(parts)
    top, place = max(((max(tokens), n) for n, tokens in enumerate(tried)), default=(-1, 0))
    return TaskFacts(
        name=task.name,
        largest_place=f"prompt({order.seed}, {place})" if top >= task.tokenizer().size else "",
        surveys=surveys,
        longest=sort_prompts(longest),
        held_out=_held_out(task, order, surveys),
        largest_token=largest_token(task, used),
        warnings=[
            *(_turn_warnings(parts) if order.has_turns else []),
            *(_call_warnings(task) if order.detects_calls else []),
        ],
        parts=task.labels if isinstance(task, TaskMixture) else [],
        survey_parts=[
            label
            for label, part in zip(task.labels, parts, strict=True)
            if isinstance(part, Dataset)
        ]
        if isinstance(task, TaskMixture)
        else [],
        unevaluated=(
            task.unevaluated
            if isinstance(task, TaskMixture) and order.evaluation is not None and is_complete
            else []
        ),
    )


def _check_stop(task: Task) -> None:
    # A task of the user may have anything.
    stop: Any = task.stop
    if not isinstance(stop, Collection) or not all(
        isinstance(number, Integral) for number in cast("Collection[object]", stop)
    ):
        raise ConfigurationError(
            f"task {task.name!r}: stop = {stop!r} must be a tuple of token numbers, perhaps ()"
        )


def _tried_prompt(task: Task, order: TaskOrder, position: int) -> Sequence[int]:
    prompt = task.prompt(order.seed, position)
    # A model that a warm-up makes has the tokenizer's size; another one may have more tokens.
    size = task.tokenizer().size if order.is_taught else None
    return _checked_prompt(task, prompt, f"prompt({order.seed}, {position})", size)


def _checked_prompt(task: Task, prompt: object, call: str, size: int | None) -> Sequence[int]:
    where = f"task {task.name!r}: {call}"
    # A task of the user may return anything.
    if not isinstance(prompt, TaskPrompt):
        raise ConfigurationError(
            f"{where} returned a {type(prompt).__name__}, not a TaskPrompt (rollstream.api)"
        )
    reference: Any = prompt.reference
    if not isinstance(reference, str):
        raise ConfigurationError(
            f"{where} has a reference that is a {type(reference).__name__}, not JSON text: "
            "json.dumps writes it"
        )
    tokens: list[int] = [*map(_plain_int, prompt.tokens)]
    if not tokens:
        raise ConfigurationError(f"{where} has no tokens: there is nothing to generate from")
    for token in tokens:
        number: Any = token
        is_whole = not isinstance(number, bool) and isinstance(number, Integral)
        if not is_whole or not 0 <= token < (TOKENS_MAX if size is None else size):
            allowed = "≥ 0" if size is None else f"from 0 to {size - 1}, those of its tokenizer"
            raise ConfigurationError(
                f"{where} has the token {number!r}; tokens are whole numbers {allowed}"
            )
    return tokens


def _plain_int(token: Any) -> Any:
    # Numbers of numpy become Python's, which messages can carry.
    is_whole = not isinstance(token, bool) and isinstance(token, Integral)
    return int(token) if is_whole else token


def _parts(task: Task) -> Sequence[Task]:
    return task.tasks if isinstance(task, TaskMixture) else (task,)


def _held_out(task: Task, order: TaskOrder, surveys: Sequence[DatasetSurvey]) -> int:
    if order.evaluation is None:
        return -1
    if isinstance(task, Dataset):
        return surveys[0].held_out
    if all(survey.is_whole for survey in surveys):
        count = held_out_count(task, order.evaluation, order.is_evaluation_set)
        size = task.tokenizer().size if order.is_taught else None
        for place, prompt in enumerate(task.held_out(min(count, PROMPTS_TRIED))):
            _checked_prompt(task, prompt, f"held_out(count)[{place}]", size)
        return count
    # A mixture with large files: its evaluation counts them.
    return -1


def _check_taught(parts: Sequence[Task]) -> None:
    for part in parts:
        if isinstance(part, Dataset):
            part.check_documents()
        elif not isinstance(part, Teacher):
            raise ConfigurationError(
                f"task {part.name!r} has no documents(): set model.path to a checkpoint to start "
                "from"
            )
        else:
            plain_documents(part, 0, 1)


def _turn_warnings(parts: Sequence[Task]) -> list[str]:
    warnings: list[str] = []
    for part in parts:
        try:
            if isinstance(part, Dataset):
                part.check_turns()
        except ConfigurationError as error:
            warnings.append(str(error))
    return warnings


def _call_warnings(task: Task) -> list[str]:
    tokenizer = task.tokenizer()
    if not isinstance(tokenizer, TextTokenizer):
        return []
    if format_of_template("\n".join(ChatTemplate(tokenizer).sources)) != UNKNOWN:
        return []
    refused = "requests with tools are refused until agent.tool_format names one"
    return [f"{unknown_format(tokenizer.where)}; {refused}"]


def judged_facts(task: Task, order: TaskOrder, facts: TaskFacts) -> Iterator[JudgedFact]:
    """Returns the judged facts of each part's verifier, for a made-up answer to a real prompt."""
    references = (survey.reference for survey in facts.surveys)
    for place, part in enumerate(_parts(task)):
        reference = next(references) if isinstance(part, Dataset) else ""
        if place >= order.judged_from:
            is_lacking = isinstance(part, Dataset) and not part.options.verifier
            reference = reference or part.prompt(order.seed, 0).reference
            yield JudgedFact() if is_lacking else _judged_fact(part, reference)
    if order.parts.scoring and not isinstance(task, TaskMixture):
        yield _scored_fact(task, order, facts)


def _scored_fact(task: Task, order: TaskOrder, facts: TaskFacts) -> JudgedFact:
    from rollstream.producers.scoring.scorer import UNNAMED_SCORE

    # A prompt of its own would need all rows of the files.
    if isinstance(task, Dataset):
        prompt = TaskPrompt(tuple(task.tokenizer().encode("?")), facts.surveys[0].reference)
    else:
        prompt = task.prompt(order.seed, 0)
    turns = [[*task.tokenizer().encode(MADE_UP_ANSWER), *list(task.stop)[:1]]]
    made_up = TrajectoryFacts("made-up", 0, 0, prompt.task, "stop", list(prompt.tokens))
    question = RewardQuestion("score", prompt.reference, "", turns, made_up)
    began_s = time.monotonic()
    answer = answer_question(task, load_scoring(order.parts.scoring), question)
    seconds = time.monotonic() - began_s
    names, scores = order.parts.scoring_names, dict(answer.scores)
    if UNNAMED_SCORE in scores:
        scores[names[0]] = scores.pop(UNNAMED_SCORE)
    refusal = refused_score(None, scores)
    lacking = [name for name in names if name not in scores]
    reason = answer.reason or (f"a run refuses {refusal.detail}" if refusal else "")
    if lacking and not reason:
        returned = ", ".join(sorted(scores)) or "nothing"
        reason = f"{', '.join(lacking)} (scoring.names) is not among what was returned ({returned})"
    written = {name: scores[name] for name in names if name in scores}
    return JudgedFact(0.0, reason, answer.kind == "refused", seconds, written)


def _judged_fact(task: Task, reference: str) -> JudgedFact:
    turns = [[*task.tokenizer().encode(MADE_UP_ANSWER), *list(task.stop)[:1]]]
    began_s = time.monotonic()
    answer = answer_question(task, None, RewardQuestion("judge", reference, "", turns))
    seconds = time.monotonic() - began_s
    refusal = refused_score(answer.reward, answer.scores)
    reason = answer.reason or (f"a run refuses {refusal.detail}" if refusal else "")
    return JudgedFact(answer.reward, reason, answer.kind == "refused", seconds)


def main(settings: str, order_json: str) -> None:
    description = msgspec.json.decode(settings, type=PlainTask)
    order = msgspec.json.decode(order_json, type=TaskOrder)
    configure_sandboxes(description.sandbox)
    _, sink = claim_pipes()
    encode = msgspec.json.Encoder().encode

    def write(line: TaskFacts | JudgedFact) -> None:
        with open(sink, "wb", closefd=False) as out:
            out.write(encode(line) + b"\n")

    try:
        task = load_task(description, order.prompt_tokens_max)
        facts = task_facts(task, order)
    except ConfigurationError as error:
        write(TaskFacts(refused=str(error)))
        return
    except Exception as error:  # noqa: BLE001 (the user's code: any failure is a fact)
        write(TaskFacts(refused=f"task {description.name!r}: {failure_line(error)}"))
        return
    write(facts)
    if order.is_judged:
        if isinstance(task, Prepared):
            task.prepare()
        for fact in judged_facts(task, order, facts):
            write(fact)


if __name__ == "__main__":
    main(*sys.argv[1:])
