"""Answers `compare` and `compare/steps/{step}`: several runs beside each other, or one step as they
trained it, for instance a recorded run and its replay with another loss.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from rollstream.consumers.credit import GAE
from rollstream.consumers.trainer.data.advantages import advantages
from rollstream.look.explorer.answers.steps import step_row
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import WrongRequest
from rollstream.streams.ledger_records import StateHashes, first_difference, is_same_state

RUNS_MAX = 8
TRAJECTORIES_MAX = 4096


def chosen_runs(runs: Sequence[ExploredRun], query: Mapping[str, str]) -> list[ExploredRun]:
    """Returns the runs that the parameter `runs` names, all without it. Raises `WrongRequest` for
    an unknown one.
    """
    numbers = query.get("runs", ",".join(run.number for run in runs)).split(",")
    by_number = {run.number: run for run in runs}
    unknown = [name for name in numbers if name not in by_number]
    if unknown or len(numbers) > RUNS_MAX:
        raise WrongRequest(f"no run {unknown[0][:20] if unknown else '…'}; at most {RUNS_MAX}")
    return [by_number[name] for name in numbers]


def compare_runs(runs: Sequence[ExploredRun]) -> dict[str, Any]:
    """Answers `compare`."""
    hashes = [_hashes(run) for run in runs]
    common = sorted(set[int]().union(*hashes).intersection(*hashes))
    return {
        "runs": [run.number for run in runs],
        "settings": different_settings(runs),
        "final": [
            {"run": run.number, "metrics": (_last(run) or {}).get("metrics", {})} for run in runs
        ],
        "common_steps": [common[0], common[-1]] if common else None,
        "first_difference": first_difference(hashes),
        "has_hashes": all(any(run_hashes[step]) for run_hashes in hashes for step in common),
    }


def compare_step(runs: Sequence[ExploredRun], step: int) -> dict[str, Any]:
    """Answers `compare/steps/{step}`."""
    done = [step_row(run, step) for run in runs]
    lines = [
        {"run": run.number, "name": run.name, "settings": _loss(run), "done": row}
        for run, row in zip(runs, done, strict=True)
    ]
    members = [_members(run, step, runs) for run in runs]
    names = sorted({name for trained in members for name in trained})
    hashes = [(row["state_hash"], row["weights_hash"]) for row in done if row]
    metrics = sorted({name for row in done if row for name in row["metrics"]})
    return {
        "step": step,
        "runs": lines,
        "metrics": metrics,
        "same_state": None
        if None in done or ("", "") in hashes
        else all(is_same_state(hashes[0], other) for other in hashes),
        "same_members": None
        if None in done or not names
        else len({frozenset(trained) for trained in members}) == 1,
        "settings": different_settings(runs),
        "trajectories": [
            {
                "trajectory": name,
                "in": [name in trained for trained in members],
                "reward": [trained.get(name, {}).get("reward") for trained in members],
                "advantage": [trained.get(name, {}).get("advantage") for trained in members],
            }
            for name in names[:TRAJECTORIES_MAX]
        ],
        "cut": max(0, len(names) - TRAJECTORIES_MAX),
    }  # fmt: skip


def different_settings(runs: Sequence[ExploredRun]) -> list[dict[str, Any]]:
    """Returns the settings in which the runs differ, each with one value per run."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    rows = [{"name": key, "values": [run.settings.get(key) for run in runs]} for key in keys]
    return [row for row in rows if len(set(row["values"])) > 1]


def _loss(run: ExploredRun) -> dict[str, str]:
    return {key: value for key, value in run.settings.items() if key.startswith("trainer.")}


def _hashes(run: ExploredRun) -> dict[int, StateHashes]:
    steps = run.index.columns("SELECT step, state_hash, weights_hash FROM steps")
    columns = zip(steps["step"], steps["state_hash"], steps["weights_hash"], strict=True)
    return {step: (state, weights) for step, state, weights in columns}


def _last(run: ExploredRun) -> dict[str, Any] | None:
    step = run.index.value("SELECT max(step) FROM done")
    return None if step is None else step_row(run, step)


def _members(run: ExploredRun, step: int, runs: Sequence[ExploredRun]) -> dict[str, dict[str, Any]]:
    places = run.index.rows("SELECT p, o FROM members WHERE step = ?", [step])
    # The takes of a replay name records of the replayed run by their places.
    source = next((other for other in (run, *runs) if other.index.progress.trajectories), run)
    places_sql = "(SELECT unnest(?::INTEGER[]) AS p, unnest(?::BIGINT[]) AS o)"
    rows = source.index.rows(
        f'SELECT trajectory, "group", reward FROM t SEMI JOIN {places_sql} USING (p, o) '
        'ORDER BY "group", index LIMIT ?',
        [[place["p"] for place in places], [place["o"] for place in places], TRAJECTORIES_MAX],
    )
    trained = {row["trajectory"]: {"reward": row["reward"], "advantage": None} for row in rows}
    rule = run.rule
    is_of_rewards = rule is not None and rule.advantage != GAE and not rule.masks_overlong
    # Only then do the advantages follow from the rewards of a group alone.
    if rule is not None and is_of_rewards and rule.overlong_penalty is None:
        for _, members in groupby(rows, lambda row: row["group"]):
            scored = [row for row in members if row["reward"] is not None]
            values = advantages([row["reward"] for row in scored], rule.advantage)
            for row, advantage in zip(scored, values.tolist(), strict=True):
                trained[row["trajectory"]]["advantage"] = advantage
    return trained
