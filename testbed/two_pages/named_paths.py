"""Names the numbers of JSON answers by their paths (`named_numbers`): a path is `a.b[].c`, an item
of a list is known by its own key (`step`, `group`, `rollout` …), and `*` is any name. A path that
no line lists has no name, so a new field cannot go unseen.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from rollstream.look.figures.definitions import FIGURES
from testbed.two_pages.shown import ShownNumber

OWN = "own"
"""Of a number that no other place shows, or that names something: it has no definition to share."""
# Of an item of a list: the key that says what it is.
KEYS = ("step", "group", "rollout", "task", "trajectory", "name", "lag", "k", "cause", "fate")
Names = Mapping[str, str]

OUTCOMES = {
    name: f"run.groups_{name}"
    for name in ("admitted", "trained", "filtered", "expired", "dead", "open")
}

REPORT: Names = {
    "seed": OWN,
    "steps": "run.steps",
    "steps_wanted": "run.steps_wanted",
    "seconds": "run.seconds",
    "warmup_s": "run.warmup_s",
    "accuracy_sampled.(first|last)": "evaluation.accuracy_sampled",
    "accuracy_greedy.(first|last)": "evaluation.accuracy_greedy",
    "goal_s": "run.goal_s",
    "goal_step": "run.goal_step",
    "reward.(first|last)": "step.reward_mean",
    "length_median.(first|last)": "evaluation.length_median",
    "length_p99.(first|last)": "evaluation.length_p99",
    "lag_consumed_mean": "run.lag_consumed_mean",
    "lag_consumed_max": "run.lag_consumed_max",
    "tokens_trained": "run.tokens_trained",
    "tokens_per_s": "run.tokens_per_s",
    "idle_share.*": "rollout.idle_share",
    "outcomes.*": "run.groups_{}",
    "restarts": "run.restarts",
    "dropped.dropped": "fate.answers@dropped",
    "dropped.trained": "fate.answers@trained",
    "dropped.length_dropped": "fate.length_median@dropped",
    "dropped.length_trained": "fate.length_median@trained",
    "dropped.reward_dropped": "fate.reward_median@dropped",
    "dropped.reward_trained": "fate.reward_median@trained",
    "episodes.causes[].*": OWN,
    "episodes.failed": "run.trajectories_dead",
    "episodes.trained": "fate.answers@trained",
    "episodes.released": "run.samples_released",
    "episodes.length_trained": "fate.length_median@trained",
    "episodes.*": OWN,
    "evaluated_step": "run.evaluated",
    "pass_at.*.(first|last)": "evaluation.pass_at/{}",
}
TOP: Names = {
    "plan.**": OWN,
    "seconds": "run.seconds",
    "elapsed_s": "run.elapsed_s",
    "step": "run.steps",
    "steps": "run.steps_wanted",
    "pace.recent_trained_per_s": "run.recent_trained_per_s",
    "pace.trained_per_s": "run.recent_trained_per_s",
    "pace.generated_per_s": "run.generated_per_s",
    "pace.trajectories_per_s": "run.trajectories_per_s",
    "pace.*": OWN,
    "lag.mean": "run.lag_recent",
    "lag.**": OWN,
    "metrics.*": "step.{}@last",
    "rewards[]": OWN,  # a small chart
    "task_rewards.*": OWN,
    "tasks.*.*": OWN,
    "mismatch.*.*": OWN,
    "skipped": OWN,
    "refused.*": OWN,
    "skipped_rows[].**": OWN,
    "foreign.*": OWN,
    "drafts[].**": OWN,
    "evaluation.step": "run.evaluated",
    "evaluation.seconds": OWN,
    "evaluation.*": "evaluation.{}@last",
    "evaluation.**": OWN,
    "version": "run.version",
    "version_bytes": OWN,
    "queue.open_groups": "run.groups_open",
    "queue.ready_groups": "run.groups_ready",
    "queue.*": OWN,
    "record_ages.*": OWN,
    "outcomes.groups.*": "run.groups_{}",
    "outcomes.**": OWN,  # of the last trajectories
    "rollouts[].running": "rollout.running",
    "rollouts[].slots": "rollout.slots",
    "rollouts[].waiting": "rollout.waiting",
    "rollouts[].kv_used": "rollout.kv_used",
    "rollouts[].kv_capacity": "rollout.kv_capacity",
    "rollouts[].version": "rollout.version",
    "rollouts[].tokens_per_s": "rollout.tokens_per_s",
    "rollouts[].idle_share": "rollout.recent_idle_share",
    "rollouts[].recent_idle_share": "rollout.recent_idle_share",
    "rollouts[].*": OWN,
    "scheduling.**": OWN,
    "dead_letters.**": OWN,
    "unarchived_s.**": OWN,
    "restarts": "run.restarts",
    "restarted.*": "role.restarts",
    "restart_ages.**": OWN,
    "deaths[].*": OWN,
    "trainer_age_s": OWN,
    "machine.**": OWN,
}
TOP_OF_PART: Names = {"outcomes.groups.*": OWN}
"""Of a run whose log was truncated: these count its last part."""
LS: Names = {
    "bytes": "run.bytes",
    "step": "run.steps",
    "steps": "run.steps_wanted",
    "newest_s": OWN,
}
AUDIT: Names = {
    "invariants[].counts.*": OWN,
    "invariants[].*": OWN,
    "since_s": OWN,
    "violations": OWN,
    "topics.**": OWN,
}
AUDIT_1: Names = {**OUTCOMES, "steps": "run.steps", "released": "run.samples_released", "*": OWN}
"""The counts of invariant 1."""
AUDIT_2: Names = {"completed": "run.trajectories", "*": OWN}
PLACE: Names = {"**.at.*": OWN, "**.partition": OWN, "**.offset": OWN, "index.*": OWN}
"""Where a record lies, and how far the index has read."""
STEP: Names = {
    "step": OWN,
    "term": OWN,
    "version": OWN,
    "done_s": OWN,
    "takes": "step.takes",
    "groups": "step.groups",
    "trajectories": "step.trained",
    "counts.*": "step.{}",
    "metrics.*": "step.{}",
    "*": "step.{}",
}
ROW: Names = {  # the light form of a trajectory
    "trajectory": OWN,
    "reward": "trajectory.reward",
    "tokens": "trajectory.tokens",
    "lag": "trajectory.lag_finish",
    "lag_consumed": "trajectory.lag_consumed",
    "step": "trajectory.step",
    "moves": "trajectory.moves",
    "group_reward": OWN,
    "*": OWN,
}
GROUP: Names = {
    "group": OWN,
    "admitted_s": OWN,
    "reward_mean": "group.reward_mean",
    "reward_std": "group.reward_std",
    "tokens_mean": "group.tokens_mean",
    "finished": "group.finished",
    "samples": "group.samples",
    "step": "group.step",
    "wave": "group.wave",
}


def _below(head: str, names: Names) -> Names:
    return {f"{head}{name}": figure for name, figure in names.items()}


STEPS: Names = {**_below("steps[].", STEP), "total": "run.steps", **PLACE}
ONE_STEP: Names = {
    **_below("step.", STEP),
    **_below("groups[].", GROUP),
    "lags[].step": OWN,
    "lags[].lag": OWN,
    "lags[].tokens": "step.lag_tokens",
    "lags[].trajectories": "step.lag_trajectories",
    "takes[].members[].row.*": OWN,
    "takes[].**": OWN,
    "dropped[].*": OWN,
    "left_out[].*": OWN,
    "repeats[].*": OWN,
    "previous": OWN,
    "next": OWN,
    **PLACE,
}
GROUPS: Names = {**_below("groups[].", GROUP), "total": "run.groups_admitted", **PLACE}
SEARCH: Names = {
    **_below("rows[].", ROW),
    "matched": "run.trajectories",
    "scanned": OWN,
    "total": OWN,  # completions read, late ones included
    "seconds": OWN,
    **PLACE,
}
QUESTIONS: Names = {
    "lags[].lag": OWN,
    "lags[].tokens": "run.lag_tokens",
    "lags[].trajectories": OWN,
    "endings[].*": OWN,  # compared as sums by ending
    "pickup[].trajectories": "rollout.answers",
    "pickup[].tokens": "rollout.answer_tokens",
    "pickup[].*": OWN,
    "lengths[].*": OWN,
    "waits.**": OWN,
    "solved[].*": OWN,
    "unsolved[].*": OWN,
    "sureness[].*": OWN,
    "scores[].*": OWN,
    **PLACE,
}
METRICS: Names = {
    "run_step": "run.steps",
    "run_steps_wanted": "run.steps_wanted",
    "run_restarts_total": "run.restarts",
    "trainer_last/*": "step.{}@last",
    "trainer_steps_wanted": "run.steps_wanted",
    "eval_last/*": "evaluation.{}@last",
}
"""Of `/metrics`; every other name is defined in the catalogue and is shown there alone."""


def named_numbers(place: str, answer: Any, names: Names) -> Iterator[ShownNumber]:
    """Yields the numbers of an answer that other places may show, and those without a name."""
    patterns = [(_pattern(path), figure) for path, figure in names.items()]
    for path, things, number in _walk(answer, "", {}):
        matches = ((pattern.fullmatch(path), figure) for pattern, figure in patterns)
        match, figure = next((pair for pair in matches if pair[0]), (None, ""))
        if match is None:
            yield ShownNumber(place, path, "", "", number)
        elif figure != OWN:
            name, of = _name(figure, [word for word in match.groups() if word], things)
            yield ShownNumber(place, path, name, of, number)


def _name(figure: str, words: Sequence[str], things: Mapping[str, str]) -> tuple[str, str]:
    """Returns the name of a number, and what it is of."""
    figure, _, of = figure.partition("@")
    ends = [word for word in words if word in ("first", "last")]
    stars = [word for word in words if word not in ends]
    if "{}" in figure:
        figure = figure.format(*stars)
    elif stars:
        of = stars[0]
    subject = figure.partition(".")[0]
    # A metric or count of a step that no page defines is still named by its step.
    if figure.partition("/")[0] not in FIGURES and subject not in ("step", "evaluation"):
        return "", ""
    if figure in ("step.lag_tokens", "step.lag_trajectories"):
        of = f"{things.get('step', '')} lag {things.get('lag', '')}"
    elif figure == "run.lag_tokens":
        of = f"lag {things.get('lag', '')}"
    elif subject == "run":
        of = ""
    return figure, of or "".join(ends) or (_thing(subject, things) if subject != "run" else "")


def _thing(subject: str, things: Mapping[str, str]) -> str:
    key = "step" if subject == "evaluation" else "name" if subject == "role" else subject
    return things.get(key) or things.get("name", "")


def _pattern(path: str) -> "re.Pattern[str]":
    text = re.escape(path).replace(r"\(first\|last\)", "(first|last)")
    return re.compile(
        text.replace(r"\*\*", "@@").replace(r"\*", r"([^.\[\]]+)").replace("@@", ".*")
    )


def _walk(
    value: Any, path: str, things: Mapping[str, str]
) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """Yields each number with its path, and by their keys the things that it is inside of."""
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return
    if isinstance(value, int | float):
        if math.isfinite(value):
            yield path, things, float(value)
    elif isinstance(value, Mapping):
        parts = cast("Mapping[str, Any]", value)
        own = {key: str(parts[key]) for key in KEYS if isinstance(parts.get(key), int | str)}
        for key, part in parts.items():
            yield from _walk(part, f"{path}.{key}" if path else str(key), {**things, **own})
    elif isinstance(value, Sequence):
        for part in cast("Sequence[Any]", value):
            yield from _walk(part, f"{path}[]", things)
