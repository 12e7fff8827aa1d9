"""Selects trajectories of the index by a request's parameters (`RowFilter`), as one SQL condition
with parameters, and names the columns of a ROW, the light form of a trajectory in every answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollstream.errors import ConfigurationError

ROW = """trajectory, "group", index, task, rollout, rollout_term, finish, reason, reward, tokens,
version, version_last, trainer_version, trainer_version - version_oldest AS lag,
step - 1 - version_oldest AS lag_consumed, step, started_s, finished_s, wave, moves, guessed,
accepted, attempt, appended_s, p, o"""
"""The columns of a ROW; `p` and `o` are the place of its record."""
GROUP_REWARDS = """
(SELECT "group" AS of_group, avg(reward) AS group_reward FROM t GROUP BY ALL)
"""
NUMBERS = {
    "reward": "reward",
    "lag": "trainer_version - version_oldest",
    "tokens": "tokens",
    "group_reward": "group_reward",
}
"""Filters with a smallest and a largest value, `NAME_min` and `NAME_max`, and their SQL."""
EXACT = {"task": str, "finish": str, "rollout": str, "step": int, "group": int, "version": int}
ORDERS = {
    "newest": "-finished_s",
    "oldest": "finished_s",
    "reward": "coalesce(reward, 1e300)",
    "-reward": "-coalesce(reward, -1e300)",
    "tokens": "coalesce(tokens, 1 << 30)",
    "-tokens": "-coalesce(tokens, -1)",
    "lag": "coalesce(trainer_version - version_oldest, 1 << 30)",
    "-lag": "-coalesce(trainer_version - version_oldest, -1)",
}
"""Orders of a search: each as the SQL value by which rows ascend."""
TEXT_MAX = 1000  # characters of a text parameter


class WrongRequest(ConfigurationError):
    """A parameter of a request is missing or has a wrong value."""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """Holds a condition on rows of `t`, joined with `GROUP_REWARDS` if `needs_groups`."""

    condition: str = "true"
    parameters: Sequence[Any] = field(default_factory=list[Any])
    needs_groups: bool = False

    @property
    def source(self) -> str:
        """The table that the condition selects from."""
        joined = f' LEFT JOIN {GROUP_REWARDS} ON of_group = "group"' if self.needs_groups else ""
        return f"t{joined}"


def row_filter(given: Mapping[str, str]) -> RowFilter:
    """Returns the filter of a request's parameters. Raises `WrongRequest` for a wrong value."""
    conditions: list[str] = []
    parameters: list[Any] = []
    for name, sql in NUMBERS.items():
        for ending, sign in (("_min", ">="), ("_max", "<=")):
            if f"{name}{ending}" in given:
                conditions.append(f"{sql} {sign} ?")
                parameters.append(number(given, f"{name}{ending}"))
    for name, kind in EXACT.items():
        if name in given:
            conditions.append(f't."{name}" = ?')
            parameters.append(text(given, name) if kind is str else whole(given, name))
    if "name" in given:
        conditions.append("starts_with(trajectory, ?)")
        parameters.append(text(given, "name"))
    if "ended" in given:
        ended = '"group" IN (SELECT "group" FROM ended WHERE ended = ?)'
        if given["ended"] == "open":
            conditions.append('"group" NOT IN (SELECT "group" FROM ended)')
        else:
            conditions.append(ended)
            parameters.append(text(given, "ended"))
    needs_groups = any(name.startswith("group_reward") for name in given)
    return RowFilter(" AND ".join(conditions) or "true", parameters, needs_groups)


def text(given: Mapping[str, str], name: str, default: str = "") -> str:
    """Returns a text parameter. Raises `WrongRequest` if it is too long."""
    found = given.get(name, default)
    if len(found) > TEXT_MAX:
        raise WrongRequest(f"{name} has {len(found)} characters; at most {TEXT_MAX}")
    return found


def number(given: Mapping[str, str], name: str) -> float:
    """Returns a finite number. Raises `WrongRequest` for anything else."""
    try:
        found = float(given[name])
    except ValueError:
        found = float("nan")
    if not abs(found) < 1e300:
        raise WrongRequest(f"{name} must be a number, got {given[name][:80]!r}")
    return found


def whole(given: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns a whole number. Raises `WrongRequest` for anything else, or if it is missing without
    a default.
    """
    if name not in given:
        if default is None:
            raise WrongRequest(f"{name} is missing")
        return default
    try:
        found = int(given[name])
    except ValueError:
        found = 1 << 62
    if not abs(found) < 1 << 62:
        raise WrongRequest(f"{name} must be a whole number, got {given[name][:80]!r}")
    return found


def limited(given: Mapping[str, str], most: int, default: int) -> int:
    """Returns the parameter `limit`, at most `most`. Raises `WrongRequest` for one below 1."""
    asked = whole(given, "limit", default)
    if asked < 1:
        raise WrongRequest(f"limit must be ≥ 1, got {asked}")
    return min(most, asked)
