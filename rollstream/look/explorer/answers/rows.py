"""Returns ROW objects: the light form of trajectories, which every answer shows alike."""

from collections.abc import Sequence
from typing import Any

from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import ROW


def select_rows(
    run: ExploredRun, rest: str, parameters: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """Returns the ROWs of a query `FROM t …`, with the mean reward of each one's group."""
    rows = run.index.rows(f"SELECT {ROW} {rest}", parameters)
    return with_group_rewards(run, rows)


def with_group_rewards(run: ExploredRun, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the rows with `group_reward`, and with their record's place as `at`."""
    means: dict[int, float | None] = {}
    groups = sorted({row["group"] for row in rows})
    if groups:
        columns = run.index.columns(
            'SELECT "group", avg(reward) AS mean FROM t '
            'WHERE "group" BETWEEN ? AND ? AND list_contains(?, "group") GROUP BY ALL',
            [groups[0], groups[-1], groups],
        )
        means = dict(zip(columns["group"], columns["mean"], strict=True))
    return [_row(row, means.get(row["group"])) for row in rows]


def _row(row: dict[str, Any], mean: float | None) -> dict[str, Any]:
    place = {"partition": row.pop("p"), "offset": row.pop("o")}
    return {**row, "group_reward": mean, "at": place}
