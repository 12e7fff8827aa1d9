"""Warnings about a run's processes, each one pure function of a `RunSnapshot`."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise
from statistics import median

from rollstream.look.monitor.format import age, plain_text, shortened
from rollstream.look.monitor.rollouts import RolloutSnapshot
from rollstream.look.monitor.snapshot import RunSnapshot, RunWarning

# A rollout that is silent for longer is gone for good, for instance a spot machine: dispatch drops
# its name after this time too (`inbox.STATUS_KEY_S`).
GONE_S = 600.0
# Three deaths of processes in ten minutes are more than an accident. Several roles that die within
# a minute of each other have one cause, an outage for example, so those count as one.
DEATHS_MIN, DEATHS_S, BURST_S = 3, 600.0, 60.0
# Deaths have ended when none came for twice the median time between two of them, and for three
# minutes at least: a supervisor starts a role again after 8 s at most, and a start takes half a
# minute. So the cause that killed several roles once does not hide one that kills a role minutes
# later.
DEATHS_OVER, DEATHS_OVER_S = 2.0, 180.0


def run_silent(at: RunSnapshot) -> Iterator[RunWarning]:
    if at.is_quiet:
        quiet_s = min(at.record_ages.values(), default=0.0)
        yield RunWarning(
            "run_silent",
            f"nothing has been written for {age(quiet_s)}: the run's processes are gone or stuck",
            "restart it, it resumes from its last checkpoint "
            "(rollstream run RUN/config.json); logs/ contain the reason",
        )


def run_failed(at: RunSnapshot) -> Iterator[RunWarning]:
    # The run is over, and all other checks are still.
    if at.has_failed:
        yield RunWarning(
            "run_failed",
            f"the supervisor has given up at step {at.step} of {at.steps}",
            "see the end of logs/, mend what it says and start the run again "
            "(rollstream run RUN/config.json): it resumes from its last checkpoint",
        )


def rollouts_silent(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns of rollouts that are silent for so long that dispatch drops them, and for `GONE_S` at
    most.
    """
    limit_s = at.plan.heartbeat_timeout_s
    silent = [o for o in at.rollouts if o.state == "silent" and limit_s < o.silent_s <= GONE_S]
    if not silent or at.is_over or at.is_quiet or at.is_starting:
        return
    verb = "are" if len(silent) > 1 else "is"
    yield RunWarning(
        "rollouts_silent",
        f"{_rollout_names(silent)} {verb} silent for {age(max(line.silent_s for line in silent))}",
        "their trajectories resume on other rollouts; see their logs, and restart them if no "
        "supervisor does",
    )


def roles_dying(at: RunSnapshot) -> Iterator[RunWarning]:
    """Warns while processes die repeatedly within minutes."""
    deaths = _repeated((death.role, death.ago_s) for death in at.deaths)
    restarts = {r: _repeated((r, ago_s) for ago_s in ages) for r, ages in at.restart_ages.items()}
    # An orchestrator records no deaths here, so the terms of a single role count, too. New terms of
    # several roles may be an upgrade.
    restart_counts = {role: number for role, number in restarts.items() if number}
    if deaths:
        roles = sorted({death.role for death in at.deaths if death.ago_s < DEATHS_S})
        what = f"{deaths} deaths within {age(DEATHS_S)}: {', '.join(roles)}"
    else:
        what = ", ".join(
            f"{n} restarts of {plain_text(r, 24)}" for r, n in sorted(restart_counts.items())
        )
        what += f" within {age(DEATHS_S)}"
    if (deaths or restart_counts) and not at.is_over:
        yield RunWarning("roles_dying", what, "see the end of their logs (logs/)")


def _repeated(deaths: Iterable[tuple[str, float]]) -> int:
    recent = sorted((ago_s, role) for role, ago_s in deaths if ago_s < DEATHS_S)
    bursts: list[Counter[str]] = []
    for index, (ago_s, role) in enumerate(recent):
        if not index or ago_s - recent[index - 1][0] > BURST_S:
            bursts.append(Counter())
        bursts[-1][role] += 1
    # A burst counts once for each time that a role died in it.
    if sum(max(burst.values()) for burst in bursts) < DEATHS_MIN:
        return 0
    usual_s = median(later - earlier for (earlier, _), (later, _) in pairwise(recent))
    return len(recent) if recent[0][0] <= max(DEATHS_OVER_S, DEATHS_OVER * usual_s) else 0


def _rollout_names(lines: list[RolloutSnapshot]) -> str:
    names = [shortened(line.name, 24) for line in lines[:3]]
    more = len(lines) - len(names)
    return ", ".join(names) + (f" and {more} more" if more else "")
