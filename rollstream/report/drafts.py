"""Draft metrics by pass over the prompts and by task, for the report's charts and table.

A group's pass number is derived from the number of earlier groups with the same prompt, so tasks
need not record it. With drafts on, memory grows with the run: a few sums per group.
"""

from dataclasses import dataclass, field

import numpy as np

from rollstream.monitor.samples import DraftTotals, PassDrafts, draft_totals_of
from rollstream.report import page
from rollstream.report.page import Chart, Series
from rollstream.streams.codec import record_hash
from rollstream.streams.records import PROMPT, Trajectory

TASKS_MAX = 8  # colours of the page
PASSES_MAX = 64  # lines of the table


@dataclass(slots=True)
class DraftHistory:
    """Folds the first completions that carry draft statistics."""

    _groups: dict[int, tuple[str, str, DraftTotals]] = field(
        default_factory=dict[int, tuple[str, str, DraftTotals]]
    )
    """Prompt hash, task and totals of each group."""

    def apply(self, record: Trajectory) -> None:
        guesses = draft_totals_of(record)
        if guesses is None:
            return
        if record.group in self._groups:
            prompt, task, before = self._groups[record.group]
            self._groups[record.group] = (prompt, task, before + guesses)
        else:
            self._groups[record.group] = (_prompt_hash(record), record.task, guesses)

    def passes(self) -> list[PassDrafts]:
        """Returns the totals by pass and task, in ascending order."""
        found: dict[tuple[int, str], DraftTotals] = {}
        came: dict[str, int] = {}
        for _, (prompt, task, guesses) in sorted(self._groups.items()):
            number = came[prompt] = came.get(prompt, 0) + 1
            found[number, task] = found.get((number, task), DraftTotals()) + guesses
        return [PassDrafts(number, task, found[number, task]) for number, task in sorted(found)]


def draft_charts(drafted: DraftHistory) -> list[Chart]:
    """Returns charts of acceptance and tokens per step over the passes; none for a single pass."""
    passes = drafted.passes()
    if len({one.number for one in passes}) < 2:
        return []
    tasks = sorted({one.task for one in passes})[:TASKS_MAX]

    def lines(figure: str) -> tuple[Series, ...]:
        return tuple(
            Series(
                task,
                [
                    (float(one.number or 0), value)
                    for one in passes
                    if one.task == task and (value := getattr(one.guesses, figure)) is not None
                ],
                colour,
            )
            for colour, task in enumerate(tasks, start=1)
        )

    by = "by pass over the prompts"
    return [
        Chart(
            "Accepted drafts",
            lines("acceptance"),
            f"share of draft tokens, {by}",
            ".0%",
            high=1.0,
            along="pass",
        ),
        Chart(
            "Tokens per step",
            lines("per_step"),
            f"per row and forward pass, {by}",
            ".1f",
            along="pass",
        ),
    ]


def draft_table(drafted: DraftHistory) -> str:
    """Returns a card with the table; "" without drafts."""
    passes = drafted.passes()
    if not passes:
        return ""
    head = ["pass", "task", "tokens", "per step", "drafted", "accepted", "found", "look-up"]
    rows = [
        (
            str(one.number),
            one.task,
            one.guesses.tokens,
            f"{one.guesses.per_step:.2f}",
            one.guesses.guessed,
            _share(one.guesses.acceptance),
            _share(one.guesses.hit_rate),
            "–" if one.guesses.lookup_us is None else f"{one.guesses.lookup_us:.0f} µs",
        )
        for one in passes[-PASSES_MAX:]
    ]
    note = "draft tokens and their accepted share; share of look-ups that found a draft"
    return page.wide("Drafts", note, page.table(head, rows))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _prompt_hash(record: Trajectory) -> str:
    """Returns the hash of the prompt's tokens, which precede the first token of another source."""
    others = np.flatnonzero(record.sources != PROMPT)
    end = int(others[0]) if len(others) else len(record.tokens)
    return record_hash(record.tokens[:end].tobytes())
