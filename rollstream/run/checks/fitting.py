"""Fits defaults that the user did not set to the run's data and tokenizer, with one line for each
change. A setting that was set stays; if it does not fit, the check refuses it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from rollstream.run.checks.task_facts import TaskFacts
from rollstream.run.config.fitted_defaults import longest_sequence
from rollstream.run.config.policy_defaults import given_by_length
from rollstream.run.config.run_model import local_model_folder
from rollstream.run.config.settings import Configuration
from rollstream.storage.model_folder.hf_tokenizer import has_chat_template
from rollstream.storage.settings import Settings

_T = TypeVar("_T", bound=Settings)
# A context that is widened for the data becomes a multiple of so many tokens.
ROOM_STEP = 64


def fit_template(
    c: Configuration, folder: Path, set_keys: frozenset[str]
) -> tuple[Configuration, list[str]]:
    """`task.template = "plain"` where the tokenizer has no chat template and nothing of the task
    needs one.
    """
    is_free = "task.template" not in set_keys and c.task.template == "chat"
    names = {part.name for part in c.task.parts} or {c.task.name}
    if not is_free or c.task.system or c.agent.is_active or names != {"dataset"}:
        return c, []
    tokenizer = c.task.tokenizer or (
        None if c.model.path is None else str(local_model_folder(c, folder))
    )
    if tokenizer is None:
        return c, []
    place = Path(tokenizer).expanduser()
    if not (place / "tokenizer.json").is_file() or has_chat_template(place):
        return c, []
    line = 'task.template = "plain": the tokenizer has no chat template'
    return with_settings(c, {"task.template": "plain"}), [line]


def fit_data(
    c: Configuration, facts: TaskFacts, set_keys: frozenset[str]
) -> tuple[Configuration, list[str]]:
    """Makes room for the longest prompt, and no more evaluation prompts than are held out."""
    changed: dict[str, Any] = {}
    lines: list[str] = []
    longest = facts.longest[0].tokens if facts.longest and facts.surveys else 0
    context, answer = c.rollouts.context_max, c.sampling.tokens_max
    evaluated = evaluated_tokens(c, facts)
    if evaluated > context and "rollouts.context_max" not in set_keys:
        length_max = longest_sequence(c)
        needed = -(-evaluated // ROOM_STEP) * ROOM_STEP
        context = max(context, needed if length_max is None else min(needed, length_max))
        if context != c.rollouts.context_max:
            changed["rollouts.context_max"] = context
            why = "the longest held-out prompt and evaluation.tokens_max"
            lines.append(f"rollouts.context_max = {context}: {evaluated} tokens for {why}")
            c = with_settings(c, changed)
    if longest > context - answer:
        length_max = longest_sequence(c)
        if "rollouts.context_max" not in set_keys:
            needed = -(-(longest + answer) // ROOM_STEP) * ROOM_STEP
            context = max(context, needed if length_max is None else min(needed, length_max))
        if longest > context - answer and "sampling.tokens_max" not in set_keys:
            # Not below half of the context: a few long prompts do not cut every answer.
            answer = min(answer, max(context - longest, context // 2, 1))
        why = f"the longest prompt has {longest} tokens"
        for key, before, after in (
            ("rollouts.context_max", c.rollouts.context_max, context),
            ("sampling.tokens_max", c.sampling.tokens_max, answer),
        ):
            if before != after:
                changed[key] = after
                lines.append(f"{key} = {after}: {why}")
        if answer != c.sampling.tokens_max:
            for key, value in given_by_length(c.trainer.preset, answer).items():
                if key not in set_keys:
                    is_pair = isinstance(value, list)
                    changed[key] = tuple(cast(list[object], value)) if is_pair else value
                    lines.append(f"{key} = {value}: sampling.tokens_max and the preset")
    prompts, available = c.evaluation.prompts, held_out_within(facts, context - answer)
    if c.evaluation.enabled and 0 <= available < prompts and "evaluation.prompts" not in set_keys:
        if available:
            changed["evaluation.prompts"] = available
            lines.append(f"evaluation.prompts = {available}: no more are held out")
        elif "evaluation.enabled" not in set_keys and not c.task.options.get("held_out"):
            changed["evaluation.enabled"] = False
            lines.append("evaluation.enabled = false: no prompt is held out")
    return with_settings(c, changed), lines


def evaluated_tokens(c: Configuration, facts: TaskFacts) -> int:
    """Returns the evaluated tokens of the longest held-out prompt with an answer to it, where
    answers of an evaluation may be longer than trained ones; else 0.
    """
    answer = c.evaluation.tokens_max
    if not c.evaluation.enabled or answer is None or not facts.surveys:
        return 0
    longest = next((p.tokens for p in facts.longest if p.is_held_out), 0)
    return longest + answer if longest else 0


def held_out_within(facts: TaskFacts, limit: int) -> int:
    """Returns held-out prompts of at most `limit` tokens; below 0 if unknown."""
    return facts.held_out - sum(p.is_held_out and p.tokens > limit for p in facts.longest)


def with_settings(c: Configuration, changed: Mapping[str, Any]) -> Configuration:
    for key, value in changed.items():
        c = _with_setting(c, key.split("."), value)
    return c


def _with_setting(table: _T, key: list[str], value: Any) -> _T:
    name, *rest = key
    if rest:
        value = _with_setting(getattr(table, name), rest, value)
    return table.model_copy(update={name: value})
