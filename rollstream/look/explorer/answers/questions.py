"""Answers `questions`, those of `docs/how-to/query-the-log.md`: from the index, and, for
log-probabilities and scores, from the views of `rollstream query`.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rollstream.errors import RollstreamError
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.index.run_index import MEMORY
from rollstream.look.query.output import json_value
from rollstream.look.query.session import QuerySession
from rollstream.streams.records import PROMPT

# Above it the parts from records are null: reading all tokens takes longer than a page may.
RECORDS_MAX = 100_000
AGAIN_S = 30.0
LENGTH_BINS, WAIT_BINS, VERSION_BANDS, SCORES_MAX = 10, 12, 6, 64
UNSOLVED_MAX, PROMPT_CHARACTERS = 12, 300

ENDINGS = """
SELECT coalesce(ended, 'open') AS ended, coalesce(detail, '') AS detail, count(*) AS groups,
    sum(len(names))::BIGINT AS trajectories
FROM admitted LEFT JOIN ended USING ("group") GROUP BY 1, 2 ORDER BY groups DESC, 1, 2 LIMIT 64
"""
LENGTHS = """
SELECT tokens // $width * $width AS from_tokens, tokens // $width * $width + $width AS to_tokens,
    count(*) AS answers, avg(reward) AS reward
FROM t WHERE finish != 'dead' GROUP BY ALL ORDER BY ALL
"""
PICKUP = """
SELECT rollout, trajectories, tokens, ms_per_token, longest_s, versions, behind_s, worst_s FROM (
    SELECT rollout, count(*) AS trajectories, sum(tokens)::BIGINT AS tokens,
        1000 * quantile_cont((finished_s - started_s) / nullif(tokens, 0), 0.5) AS ms_per_token,
        max(finished_s - started_s) AS longest_s
    FROM t WHERE finish != 'dead' GROUP BY ALL
) FULL JOIN (
    SELECT rollout, count(*) AS versions, avg(served.time_s - steps.time_s) AS behind_s,
        max(served.time_s - steps.time_s) AS worst_s
    FROM served JOIN steps ON served.version = steps.step GROUP BY ALL
) USING (rollout) ORDER BY rollout LIMIT 64
"""
WAITS = """
SELECT takes.time_s - t.finished_s AS seconds
FROM takes JOIN members USING (step, "update", micro_batch) JOIN t ON t.p = members.p
    AND t.o = members.o
"""
WAIT_ENDS = f"""
SELECT quantile_cont(seconds, 0.5) AS median_s, quantile_cont(seconds, 0.9) AS p90_s,
    max(seconds) AS longest_s, count(*) AS trajectories FROM ({WAITS})
"""
SOLVED = """
SELECT right_answers AS "right", of, count(*) AS prompts FROM (
    SELECT "group", sum(reward)::INT AS right_answers, count(*) AS of FROM t
    WHERE reward IS NOT NULL GROUP BY ALL
) GROUP BY ALL ORDER BY of DESC, 1 LIMIT 64
"""
MEANS = """
SELECT least(9, floor(10 * mean))::INT / 10 AS mean_from, mean_from + 0.1 AS mean_to,
    count(*) AS prompts
FROM (SELECT avg(reward) AS mean FROM t WHERE reward IS NOT NULL GROUP BY "group")
WHERE mean >= 0 GROUP BY ALL ORDER BY 1
"""
UNSOLVED = f"""
SELECT "group", count(*) AS answers, avg(tokens) AS tokens,
    count(*) FILTER (finish = 'length') AS cut, any_value(p) AS p, arg_min(o, p) AS o
FROM t GROUP BY ALL HAVING max(reward) <= 0 ORDER BY tokens DESC, 1 LIMIT {UNSOLVED_MAX}
"""
SURENESS = """
SELECT reward = 1 AS "right", count(*) AS answers, avg(list_avg(logprobs)) AS logprob,
    avg(list_min(logprobs)) AS least_sure
FROM (SELECT c.logprobs, c.finish, r.reward FROM completions c JOIN rewards r USING (trajectory))
WHERE finish = 'stop' AND reward IS NOT NULL GROUP BY ALL ORDER BY ALL
"""
LAGS = """
SELECT lag, sum(tokens)::BIGINT AS tokens, sum(trajectories)::BIGINT AS trajectories
FROM lag GROUP BY lag ORDER BY lag LIMIT 256
"""
SCORES = """
SELECT spans[1].version.number // {width} * {width} AS from_version, name, count(*) AS answers,
    avg(reward) AS reward
FROM (SELECT spans, reward, unnest(map_keys(scores)) AS name FROM completions)
GROUP BY ALL ORDER BY 1, 2 LIMIT {most}
"""


class RunQuestions:
    """Answers `questions` for one run, for any thread."""

    def __init__(self, run: ExploredRun, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._lock = threading.Lock()
        self._read: dict[str, Any] = {"sureness": None, "scores": None}
        self._read_at: float = -math.inf
        self._read_changes: int = -1

    def show(self) -> dict[str, Any]:
        """Returns the answer; parts that cannot be known are None."""
        index = self._run.index
        return {
            **index.unchanged("questions", self._from_index),
            **self._from_records(),
            "index": index.progress.line(),
        }

    def _from_index(self) -> dict[str, Any]:
        index = self._run.index
        return {
            "lengths": self._lengths(),
            "endings": index.rows(ENDINGS),
            "lags": index.rows(LAGS),
            "pickup": index.rows(PICKUP),
            "waits": self._waits(),
            "solved": self._solved(),
            "unsolved": self._unsolved(),
        }

    def _lengths(self) -> list[dict[str, Any]]:
        longest = self._run.index.value("SELECT max(tokens) FROM t") or 0
        width = round_width(longest + 1, LENGTH_BINS)
        return self._run.index.rows(LENGTHS.replace("$width", str(width)))

    def _waits(self) -> dict[str, Any] | None:
        ends = self._run.index.row(WAIT_ENDS)
        if ends is None or not ends["trajectories"]:
            return None
        width = round_seconds(ends["p90_s"] * 1.5 / WAIT_BINS)
        counted = self._run.index.rows(
            f"SELECT greatest(0, least({WAIT_BINS - 1}, floor(seconds / ?)))::INT AS bin, "
            f"count(*) AS trajectories FROM ({WAITS}) GROUP BY ALL ORDER BY ALL", [width]
        )  # fmt: skip
        last = max(ends["longest_s"], width * WAIT_BINS)
        bins = [
            {
                "from_s": row["bin"] * width,
                "to_s": last if row["bin"] == WAIT_BINS - 1 else (row["bin"] + 1) * width,
                "trajectories": row["trajectories"],
            }
            for row in counted
        ]
        return {**ends, "bins": bins}

    def _solved(self) -> list[dict[str, Any]]:
        # By right answers if all rewards are 0 or 1, else by tenths of the mean reward.
        others = "SELECT count(*) FROM t WHERE reward NOT IN (0, 1)"
        return self._run.index.rows(MEANS if self._run.index.value(others) else SOLVED)

    def _unsolved(self) -> list[dict[str, Any]]:
        rows = self._run.index.rows(UNSOLVED)
        prompts: dict[tuple[int, int], str] = {}
        for partition in sorted({row["p"] for row in rows}):
            offsets = [row["o"] for row in rows if row["p"] == partition]
            for answer in self._run.records.tokens_at(partition, offsets):
                tokens = answer.tokens[answer.sources == PROMPT][:PROMPT_CHARACTERS].tolist()
                prompts[partition, answer.offset] = self._run.text.text(tokens)[:PROMPT_CHARACTERS]
        shown = ("group", "answers", "tokens", "cut")
        return [
            {**{name: row[name] for name in shown}, "prompt": prompts.get((row["p"], row["o"]))}
            for row in rows
        ]

    def _from_records(self) -> dict[str, Any]:
        with self._lock:
            changes = self._run.index.changes
            # The last answer stays for `AGAIN_S` seconds, also of a living run.
            is_due = self._clock() - self._read_at >= AGAIN_S and changes != self._read_changes
            if is_due and self._run.index.progress.trajectories <= RECORDS_MAX:
                self._read = self._query()
                self._read_at, self._read_changes = self._clock(), changes
            return self._read

    def _query(self) -> dict[str, Any]:
        newest = self._run.index.value("SELECT max(version) FROM t") or 0
        width = round_width(newest + 1, VERSION_BANDS)
        scores = SCORES.format(width=width, most=SCORES_MAX * VERSION_BANDS)
        try:
            with QuerySession(self._run.location, lambda _: None) as session:
                session.connection.execute(f"SET memory_limit = '{MEMORY}'; SET threads = 2")
                return {
                    "sureness": _rows(session, SURENESS),
                    "scores": _rows(session, scores),
                }
        except RollstreamError:
            # A file is damaged: the views that read it name it.
            return {"sureness": None, "scores": None}


def round_seconds(seconds_min: float) -> float:
    """Returns the smallest of 0.001, 0.002, 0.005, 0.01, … that is at least `seconds_min`."""
    bound_s = max(1e-3, seconds_min)
    scale = 10.0 ** math.floor(math.log10(bound_s))
    return next(step * scale for step in (1, 2, 5, 10) if step * scale >= bound_s * (1 - 1e-9))


def round_width(length: int, bins: int) -> int:
    """Returns the smallest of 1, 2, 5, 10, … that divides `length` into at most `bins` parts."""
    scale = 1
    while True:
        for step in (1, 2, 5):
            if math.ceil(length / (step * scale)) <= bins:
                return step * scale
        scale *= 10


def _rows(session: QuerySession, sql: str) -> list[dict[str, Any]]:
    answer = session.answer(sql)
    rows: Sequence[Sequence[Any]] = [row for rows in answer.batches for row in rows]
    return [dict(zip(answer.names, map(json_value, row), strict=True)) for row in rows]
