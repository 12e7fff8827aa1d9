"""Compares two runs over the prompts that both had, pair by pair. Randomness of sampling is a
function of seed, trajectory and position (invariant 10): runs of one seed share their luck, so the
interval is narrower than that of two means. A statement about a setting needs several seeds
(`studies/evidence`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rollstream.look.query.intervals import (
    Equivalence,
    PairedDifference,
    equivalence,
    paired_difference,
)
from rollstream.look.query.session import QuerySession

PAIRS_MIN = 5  # fewer pairs get no row: Student's interval of so few is mostly luck

_GROUPS = """
WITH prompts AS (
    SELECT "group", hash(list_slice(any_value(tokens), 1,
           list_position(any_value(sources), 1) - 1)) AS prompt
    FROM (SELECT "group", tokens, sources FROM completions WHERE finish != 'dead'
          QUALIFY row_number() OVER (PARTITION BY "group" ORDER BY index) = 1)
    GROUP BY "group"
)
SELECT "group", any_value(prompt)::VARCHAR AS prompt, avg(reward) AS reward,
       avg(tokens) AS tokens
FROM rewards JOIN prompts USING ("group")
WHERE finish != 'dead' AND reward IS NOT NULL GROUP BY "group"
"""
_EVALUATIONS = "SELECT step, prompts, by_prompt FROM evaluations WHERE len(by_prompt) > 0"


@dataclass(frozen=True, slots=True)
class PairedFigure:
    """`where` names the step or the groups, `unit` is that of a pair. `equivalence` is None without
    a margin; it applies to rewards only.
    """

    name: str
    where: str
    unit: str
    found: PairedDifference
    equivalence: Equivalence | None = None

    def line(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """A hash of its prompt, and means over its finished trajectories."""

    prompt: str
    reward: float
    tokens: float


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A hash of all prompts of an evaluation, and the mean reward of each."""

    prompts: str
    rewards: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RunFigures:
    groups: Mapping[int, GroupFigures]
    evaluations: Mapping[int, HeldOut]


def read_figures(session: QuerySession) -> RunFigures:
    """Reads the figures from log, archive and `metrics/eval.jsonl`."""
    groups = {int(r[0]): GroupFigures(str(r[1]), r[2], r[3]) for r in _rows(session, _GROUPS)}
    evaluations = {
        int(step): HeldOut(str(prompts), tuple(float(prompt_row[2]) for prompt_row in by_prompt))
        for step, prompts, by_prompt in _rows(session, _EVALUATIONS)
    }
    return RunFigures(groups, evaluations)


def paired_figures(
    first: RunFigures, second: RunFigures, confidence: float, margin: float | None = None
) -> list[PairedFigure]:
    """Returns the paired figures with `PAIRS_MIN` pairs or more: of the newest common evaluation,
    of all common groups, and of the last fifth of them.
    """
    figures: list[PairedFigure] = []

    def add(name: str, where: str, unit: str, pairs: Sequence[tuple[float, float]]) -> None:
        if len(pairs) < PAIRS_MIN:
            return
        a, b = zip(*pairs, strict=True)
        difference = paired_difference(a, b, confidence)
        tested = None if margin is None or name == "length" else equivalence(difference, margin)
        figures.append(PairedFigure(name, where, unit, difference, tested))

    for step, pairs in _held_out(first, second):
        add("held-out, sampled", f"step {step}", "prompt", pairs)
    groups = common_groups(first, second)
    last = groups[-max(1, len(groups) // 5) :]
    for where, some in (("all groups", groups), ("last fifth", last)):
        rewards = [(first.groups[g].reward, second.groups[g].reward) for g in some]
        add("reward", where, "group", rewards)
    lengths = [(first.groups[g].tokens, second.groups[g].tokens) for g in groups]
    add("length", "all groups", "group", lengths)
    return figures


def common_groups(first: RunFigures, second: RunFigures) -> list[int]:
    """Returns the groups with the same prompt in both runs, ascending."""
    both = sorted(first.groups.keys() & second.groups.keys())
    return [g for g in both if first.groups[g].prompt == second.groups[g].prompt]


def _held_out(first: RunFigures, second: RunFigures) -> list[tuple[int, list[tuple[float, float]]]]:
    """The newest step at which both evaluated the same prompts, with the pairs, or []."""
    for step in sorted(first.evaluations.keys() & second.evaluations.keys(), reverse=True):
        a, b = first.evaluations[step], second.evaluations[step]
        if a.prompts == b.prompts and len(a.rewards) == len(b.rewards):
            return [(step, list(zip(a.rewards, b.rewards, strict=True)))]
    return []


def _rows(session: QuerySession, sql: str) -> list[tuple[Any, ...]]:
    answer = session.answer(sql)
    return [row for rows in answer.batches for row in rows]
