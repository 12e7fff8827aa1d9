"""Answers `groups` and `groups/{group}`: how each group ended, and its samples side by side, with
the advantages that the trainer's own functions give.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollstream.consumers.trainer.data.prepare import prepare_group
from rollstream.consumers.trainer.data.sample import AnnotationsByKey, Sample, annotated_rewards
from rollstream.consumers.trainer.data.training_rule import TrainingRule
from rollstream.errors import ObjectMissing
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import ROW, WrongRequest, limited, text, whole
from rollstream.storage.archive.run_rules import ENDINGS, first_ends
from rollstream.streams.admissible import refusal
from rollstream.streams.records import GENERATED, PROMPT, Annotation, Trajectory

ANSWER_CHARACTERS = 20_000
GROUPS = """
SELECT a."group", a.wave, a.admitted_s, coalesce(e.ended, 'open') AS ended,
    coalesce(e.detail, '') AS detail, e.step, len(a.names) AS samples, s.* EXCLUDE (of)
FROM ({admitted}) a LEFT JOIN {ended} e USING ("group") LEFT JOIN (
    SELECT "group" AS of, count(*) AS finished, any_value(task) AS task,
        avg(reward) AS reward_mean, stddev_samp(reward) AS reward_std, avg(tokens) AS tokens_mean
    FROM t WHERE "group" BETWEEN {low} AND {high} GROUP BY ALL
) s ON s.of = a."group" ORDER BY a."group" DESC
"""


def groups_of(run: ExploredRun, groups: Sequence[int]) -> list[dict[str, Any]]:
    """Returns the GROUP objects of these groups, those that were admitted, newest first."""
    if not groups:
        return []
    low, high = min(groups), max(groups)
    within = f'WHERE "group" BETWEEN {int(low)} AND {int(high)}'
    sql = GROUPS.format(
        admitted=f'SELECT * FROM admitted {within} AND list_contains(?, "group")',
        ended=ended_within(within), low=int(low), high=int(high),
    )  # fmt: skip
    return [_group(row) for row in run.index.rows(sql, [list(groups)])]


def ended_within(within: str) -> str:
    """Returns the SQL of the ends of those groups that meet the condition."""
    # DuckDB skips the other groups before it ranks ends, which the view `ended` does not.
    return first_ends(f"(SELECT * FROM ends {within})", "poisoned", "o")


def list_groups(run: ExploredRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Answers `groups`: pages of groups, newest first."""
    limit = limited(query, 500, 100)
    below = whole(query, "cursor", 1 << 60)
    condition, parameters = "true", []
    ended = text(query, "ended")
    if ended and ended not in (*ENDINGS, "open"):
        raise WrongRequest(f"ended must be one of {', '.join(ENDINGS)}, open")
    if ended == "open":
        condition = '"group" NOT IN (SELECT "group" FROM ended)'
    elif ended:
        condition, parameters = '"group" IN (SELECT "group" FROM ended WHERE ended = ?)', [ended]
    numbers = run.index.columns(
        f'SELECT "group" FROM admitted WHERE "group" < ? AND {condition} '
        f'ORDER BY "group" DESC LIMIT {limit}',
        [below, *parameters],
    )["group"]
    total = run.index.value(f"SELECT count(*) FROM admitted WHERE {condition}", parameters)
    groups = groups_of(run, numbers)
    return {
        "groups": groups,
        "next": str(numbers[-1]) if len(numbers) == limit else None,
        "total": total,
    }


def show_group(run: ExploredRun, group: int) -> dict[str, Any]:
    """Answers `groups/{group}`: the samples side by side."""
    admitted = run.index.row('SELECT * FROM admitted WHERE "group" = ?', [group])
    read = read_group(run, group)
    if admitted is None and not read.rows:
        raise ObjectMissing(f"no group {group} in this run")
    names = admitted["names"] if admitted else sorted(row["trajectory"] for row in read.rows)
    by_name = {row["trajectory"]: row for row in read.rows}
    group_rows = groups_of(run, [group]) if admitted else []
    first = next(iter(read.records.values()), None)
    return {
        "group": group_rows[0] if group_rows else None,
        "prompt": None if first is None else _text_of(run, first, PROMPT)[0],
        "reference": "" if first is None else first.reference,
        "samples": [_sample(run, name, by_name.get(name), read) for name in names],
        "deadline_s": admitted and admitted["deadline_s"],
        "takes": run.index.rows(
            'SELECT step, "update", micro_batch, p AS partition, o AS "offset" FROM takes '
            "WHERE list_contains(groups, ?) ORDER BY ALL LIMIT 64", [group]
        ),
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ReadGroup:
    """A group's completions, and the results of the trainer's functions: the samples that are
    trained and, by trajectory, why another is not.
    """

    rows: Sequence[dict[str, Any]]
    records: Mapping[str, Trajectory]
    samples: Mapping[str, Sample] = field(default_factory=dict[str, Sample])
    why_not: Mapping[str, str] = field(default_factory=dict[str, str])


def read_group(run: ExploredRun, group: int) -> ReadGroup:
    """Returns a group's completions with advantages and masks, as far as the settings are known."""
    rows = run.index.rows(f'SELECT {ROW} FROM t WHERE "group" = ? ORDER BY index', [group])
    records: dict[str, Trajectory] = {}
    for partition in sorted({row["p"] for row in rows}):
        offsets = [row["o"] for row in rows if row["p"] == partition]
        for message in run.records.records("trajectories", partition, offsets):
            if isinstance(message.record, Trajectory):
                records[message.record.trajectory] = message.record
    if run.rule is None or not records:
        return ReadGroup(rows, records)
    steps = [row["step"] for row in rows if row["step"] is not None]
    newest = run.index.value("SELECT max(version) FROM done") or 0
    # An untrained group is judged as of the newest version.
    version = min(steps) - 1 if steps else newest
    ordered = [records[row["trajectory"]] for row in rows if row["trajectory"] in records]
    annotations = annotations_of(run, group)
    prepared = prepare_group(group, ordered, annotations, run.rule, version)
    samples = {sample.trajectory: sample for sample in prepared.samples}
    why = {
        record.trajectory: _why_not(record, annotations, run.rule, prepared.detail)
        for record in ordered
        if record.trajectory not in samples
    }
    return ReadGroup(rows, records, samples, why)


def annotations_of(run: ExploredRun, group: int) -> AnnotationsByKey:
    """Returns the first annotation of each trajectory and name, with its first value."""
    rows = run.index.rows('SELECT * FROM noted WHERE "group" = ?', [group])
    annotations: dict[tuple[str, str], Annotation] = {}
    for row in rows:
        values = np.array([] if row["value"] is None else [row["value"]], np.float32)
        annotations[row["trajectory"], row["name"]] = Annotation(
            row["trajectory"], group, row["name"], values, row["scorer"], row["reason"]
        )
    return annotations


def _why_not(
    record: Trajectory, annotations: AnnotationsByKey, rule: TrainingRule, detail: str
) -> str:
    if record.finish == "dead":
        return f"dead: {record.reason}"
    refused = refusal(record, rule.bounds)
    if refused is not None:
        return f"refused: {refused.detail}"
    lacking = annotated_rewards([record], annotations, rule.names, rule.terms, rule.by_part).lacking
    return lacking.get(record.trajectory) or detail or "all its tokens are above max_lag"


def _sample(
    run: ExploredRun, name: str, row: dict[str, Any] | None, read: ReadGroup
) -> dict[str, Any]:
    record, sample = read.records.get(name), read.samples.get(name)
    answer, cut = ("", False) if record is None else _text_of(run, record, GENERATED)
    return {
        "trajectory": name,
        "row": row,
        "advantage": None if sample is None else sample.known_advantage,
        "trained": bool(row and row["step"] is not None),
        "why_not": read.why_not.get(name, ""),
        "answer": answer,
        "cut": cut,
        "scores": {} if record is None else record.scores or {},
    }


def _text_of(run: ExploredRun, record: Trajectory, source: int) -> tuple[str, bool]:
    decoded = run.text.text(record.tokens[record.sources == source][:ANSWER_CHARACTERS].tolist())
    return decoded[:ANSWER_CHARACTERS], len(decoded) > ANSWER_CHARACTERS


def _group(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "finished": row["finished"] or 0}
