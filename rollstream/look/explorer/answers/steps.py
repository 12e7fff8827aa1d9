"""Answers `steps` and `steps/{step}`: what one step trained, from which groups, and what it left
out and why.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rollstream.errors import ObjectMissing
from rollstream.look.explorer.answers.groups import groups_of
from rollstream.look.explorer.answers.rows import select_rows
from rollstream.look.explorer.explored_run import ExploredRun
from rollstream.look.explorer.filters import limited, whole
from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.streams.records import Take
from rollstream.streams.values import Member

MEMBERS_MAX = 4096
# The list of steps shows these; a step alone shows all.
METRICS = (
    "seconds", "reward_mean", "loss", "entropy", "ess", "kl", "clipped", "lag_consumed_mean",
    "lag_consumed_max", "lag_finish_mean", "length_median", "length_p99", "tokens_trained",
    "wait_s",
)  # fmt: skip


def list_steps(run: ExploredRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Answers `steps`: pages of steps, newest first."""
    limit = limited(query, 500, 100)
    below = whole(query, "cursor", 1 << 60)
    rows = run.index.rows(
        f"SELECT * FROM steps WHERE step < ? ORDER BY step DESC LIMIT {limit}", [below]
    )
    return {
        "steps": [_light(run, row) for row in rows],
        "next": str(rows[-1]["step"]) if len(rows) == limit else None,
        "total": run.index.value("SELECT count(DISTINCT step) FROM done"),
    }


def show_step(run: ExploredRun, step: int) -> dict[str, Any]:
    """Answers `steps/{step}`."""
    done = step_row(run, step)
    takes = run.index.rows(
        "SELECT k.*, s.step IS NOT NULL AS superseded FROM takes k LEFT JOIN superseded s "
        'USING (step, "update", micro_batch) WHERE k.step = ? '
        'ORDER BY k."update", k.micro_batch, k.o',
        [step],
    )
    if done is None and not takes:
        raise ObjectMissing(f"no step {step} in this run")
    groups = [group for take in takes for group in take["groups"]]
    rows = select_rows(
        run, f'FROM t WHERE step = ? ORDER BY "group", index LIMIT {MEMBERS_MAX}', [step]
    )
    members = _members(run, takes, {row["trajectory"]: row for row in rows})
    count = sum(take["trajectories"] for take in takes)
    return {
        "step": done,
        "takes": members,
        "groups": groups_of(run, groups),
        "dropped": run.index.rows(
            'SELECT "group", ended AS reason, detail, {\'partition\': p, \'offset\': o} AS at '
            "FROM ends WHERE step = ? AND ended != 'trained' ORDER BY \"group\" LIMIT 1000", [step]
        ),
        "left_out": _left_out(run, step, groups),
        "repeats": run.index.rows(
            "SELECT term, state_hash, weights_hash, time_s AS done_s FROM done WHERE step = ? "
            "ORDER BY term, o", [step]
        ),
        "lags": _lags(run, step),
        "previous": run.index.value("SELECT max(step) FROM done WHERE step < ?", [step]),
        "next": run.index.value("SELECT min(step) FROM done WHERE step > ?", [step]),
        "cut": count > MEMBERS_MAX,
        "index": run.index.progress.line(),
    }  # fmt: skip


def _lags(run: ExploredRun, step: int) -> list[dict[str, Any]]:
    if isinstance(run.location, SimulatedLocation):
        steps = (done for done in run.location.known.steps if done.number == step)
        lags = next((done.lags for done in steps), Counter[int]())
        return [{"lag": lag, "tokens": lags[lag]} for lag in sorted(lags)]
    return run.index.rows(
        "SELECT lag, tokens, trajectories FROM lag WHERE step = ? ORDER BY lag", [step]
    )


def step_row(run: ExploredRun, step: int) -> dict[str, Any] | None:
    row = run.index.row("SELECT * FROM steps WHERE step = ?", [step])
    return None if row is None else {**_light(run, row), "metrics": row["metrics"]}


def _light(run: ExploredRun, row: Mapping[str, Any]) -> dict[str, Any]:
    metrics: Mapping[str, Any] = row["metrics"]
    counts: Mapping[str, int] = row["counts"]
    return {
        "step": row["step"],
        "term": row["term"],
        "version": row["version"],
        "done_s": row["time_s"],
        "takes": row["takes"],
        "groups": counts.get("groups"),
        "trajectories": counts.get("trained"),
        **{name: metrics.get(name) for name in METRICS},
        "counts": counts,
        "state_hash": row["state_hash"],
        "weights_hash": row["weights_hash"],
        "at": {"partition": row["p"], "offset": row["o"]},
    }


def _members(
    run: ExploredRun, takes: Sequence[Mapping[str, Any]], rows: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    records: dict[tuple[int, int], Take] = {}
    # Only the takes' records hold members and hashes.
    for partition in sorted({take["p"] for take in takes}):
        offsets = [take["o"] for take in takes if take["p"] == partition]
        for message in run.records.records("ledger", partition, offsets):
            if isinstance(message.record, Take):
                records[partition, message.address.offset] = message.record
    take_lines: list[dict[str, Any]] = []
    remaining = MEMBERS_MAX
    for take in takes:
        record = records.get((take["p"], take["o"]))
        members: Sequence[Member] = () if record is None else record.members[:remaining]
        remaining -= len(members)
        take_lines.append(
            {
                "update": take["update"],
                "micro_batch": take["micro_batch"],
                "term": take["term"],
                "taken_s": take["time_s"],
                "partition": take["p"],
                "offset": take["o"],
                "trajectories": take["trajectories"],
                "superseded": take["superseded"],
                "groups": take["groups"],
                "members": [
                    {
                        "trajectory": member.trajectory,
                        "at": {"partition": member.at.partition, "offset": member.at.offset},
                        "hash": member.hash,
                        "row": rows.get(member.trajectory),
                    }
                    for member in members
                ],
            }
        )
    return take_lines


def _left_out(run: ExploredRun, step: int, groups: Sequence[int]) -> list[dict[str, Any]]:
    if not groups:
        return []
    within = f'WHERE "group" BETWEEN {min(groups)} AND {max(groups)}'
    rows = run.index.rows(
        'SELECT trajectory, "group", finish, reason, reward, version_oldest, finished_s FROM t '
        f'{within} AND list_contains(?, "group") AND step IS NULL '
        'ORDER BY "group", index LIMIT 1000',
        [list(groups)],
    )
    rule = run.rule
    omissions: list[dict[str, Any]] = []
    for row in rows:
        lag = None if row["version_oldest"] is None else step - 1 - row["version_oldest"]
        if row["finish"] == "dead":
            why = f"dead: {row['reason']}"
        elif (
            rule is not None and rule.max_lag is not None and lag is not None and lag > rule.max_lag
        ):
            why = f"above max_lag: {lag} versions old"
        elif row["reward"] is None:
            why = "no reward yet"
        else:
            # `groups/{group}` has the records, and with them the reason.
            why = "see its group"
        omissions.append({"trajectory": row["trajectory"], "group": row["group"], "why": why})
    return omissions
