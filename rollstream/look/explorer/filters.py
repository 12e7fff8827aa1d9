"""Selects trajectories of the index by a request's parameters (`RowFilter`), and names the columns
of a ROW, the light form of a trajectory in every answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.errors import ConfigurationError
from rollstream.storage.archive.run_rules import lag, lag_consumed

# `p` and `o` are the place of its record.
LAG = lag("trainer_version", "version_oldest")
ROW = f"""trajectory, "group", index, task, rollout, rollout_term, finish, reason, reward, tokens,
version, version_last, trainer_version, {LAG} AS lag,
{lag_consumed("version_oldest")} AS lag_consumed, step, started_s, finished_s, wave, moves, guessed,
accepted, attempt, appended_s, p, o"""
GROUP_REWARDS = """
(SELECT "group" AS of_group, avg(reward) AS group_reward FROM t GROUP BY ALL)
"""
# Filters with a smallest and a largest value, `NAME_min` and `NAME_max`, and their SQL.
NUMBERS = {
    "reward": "reward",
    "lag": LAG,
    "tokens": "tokens",
    "group_reward": "group_reward",
}
EXACT = {"task": str, "finish": str, "rollout": str, "step": int, "group": int, "version": int}
# The SQL value by which rows ascend.
ORDERS = {
    "newest": "-finished_s",
    "oldest": "finished_s",
    "reward": "coalesce(reward, 1e300)",
    "-reward": "-coalesce(reward, -1e300)",
    "tokens": "coalesce(tokens, 1 << 30)",
    "-tokens": "-coalesce(tokens, -1)",
    "lag": f"coalesce({LAG}, 1 << 30)",
    "-lag": f"-coalesce({LAG}, -1)",
}
TEXT_MAX = 1000  # characters of a text parameter


class WrongRequest(ConfigurationError):
    """A parameter of a request is missing or has a wrong value."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A condition on rows of `t`, joined with `GROUP_REWARDS` if `needs_groups`."""

    condition: str = "true"
    parameters: Sequence[Any] = field(default_factory=list[Any])
    needs_groups: bool = False

    @property
    def source(self) -> str:
        joined = f' LEFT JOIN {GROUP_REWARDS} ON of_group = "group"' if self.needs_groups else ""
        return f"t{joined}"


def row_filter(query: Mapping[str, str]) -> RowFilter:
    """Raises `WrongRequest` for a wrong value."""
    conditions: list[str] = []
    parameters: list[Any] = []
    for name, sql in NUMBERS.items():
        for ending, sign in (("_min", ">="), ("_max", "<=")):
            if f"{name}{ending}" in query:
                conditions.append(f"({sql}) {sign} ?")
                parameters.append(number(query, f"{name}{ending}"))
    for name, kind in EXACT.items():
        if name in query:
            conditions.append(f't."{name}" = ?')
            parameters.append(text(query, name) if kind is str else whole(query, name))
    if "name" in query:
        conditions.append("starts_with(trajectory, ?)")
        parameters.append(text(query, "name"))
    if "ended" in query:
        ended = '"group" IN (SELECT "group" FROM ended WHERE ended = ?)'
        if query["ended"] == "open":
            conditions.append('"group" NOT IN (SELECT "group" FROM ended)')
        else:
            conditions.append(ended)
            parameters.append(text(query, "ended"))
    needs_groups = any(name.startswith("group_reward") for name in query)
    return RowFilter(" AND ".join(conditions) or "true", parameters, needs_groups)


def text(query: Mapping[str, str], name: str, default: str = "") -> str:
    """Raises `WrongRequest` if the parameter is too long."""
    parameter = query.get(name, default)
    if len(parameter) > TEXT_MAX:
        raise WrongRequest(f"{name} has {len(parameter)} characters; at most {TEXT_MAX}")
    return parameter


def number(query: Mapping[str, str], name: str) -> float:
    """Returns a finite number. Raises `WrongRequest` for anything else."""
    try:
        parameter = float(query[name])
    except ValueError:
        parameter = float("nan")
    if not abs(parameter) < 1e300:
        raise WrongRequest(f"{name} must be a number, got {query[name][:80]!r}")
    return parameter


def whole(query: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns a whole number. Raises `WrongRequest` for anything else, or if it is missing without
    a default.
    """
    if name not in query:
        if default is None:
            raise WrongRequest(f"{name} is missing")
        return default
    try:
        parameter = int(query[name])
    except ValueError:
        parameter = 1 << 62
    if not abs(parameter) < 1 << 62:
        raise WrongRequest(f"{name} must be a whole number, got {query[name][:80]!r}")
    return parameter


def limited(query: Mapping[str, str], limit_max: int, default: int) -> int:
    """Returns the parameter `limit`, at most `limit_max`. Raises `WrongRequest` for one below 1."""
    limit = whole(query, "limit", default)
    if limit < 1:
        raise WrongRequest(f"limit must be ≥ 1, got {limit}")
    return min(limit_max, limit)
