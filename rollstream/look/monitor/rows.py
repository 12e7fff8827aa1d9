"""A `RunSnapshot` as the metric rows of the live view. If there is little room, rows of the highest
`rank` are left out first; rank 0 always stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rollstream.look.monitor.format import (
    GAP,
    age,
    count,
    plain_text,
    plural,
    share,
    short_number,
    sparkline,
)
from rollstream.look.monitor.samples import DraftTotals
from rollstream.look.monitor.snapshot import RunSnapshot
from rollstream.run.supervisor.process import describe_exit

# Stands for an unknown value.
UNKNOWN = "–"
# Most tasks shown in a row.
TASKS_MAX = 8
# Most (pass over the prompts, task) pairs shown.
DRAFTS_MAX = 4


@dataclass(frozen=True, slots=True)
class MetricRow:
    """`line` is a sparkline that follows the first line of parts; "" for none."""

    name: str
    parts: tuple[str, ...]
    rank: int = 0
    line: str = ""


def metric_rows(at: RunSnapshot, detailed: bool) -> Iterator[MetricRow]:
    """Returns the metric rows in display order; `detailed` adds the less important ones."""
    yield MetricRow("reward", (_metric(at, "reward_mean", ".3f"),), 0, sparkline(at.rewards))
    if len(at.task_rewards) > 1:
        yield MetricRow("by task", tuple(_tasks(at)), 1)
    yield MetricRow("accuracy", (evaluation_text(at) or UNKNOWN,), 1)
    yield MetricRow("tokens/s", _speeds(at))
    if detailed:
        yield MetricRow("pace", _pace(at), 1)
    else:
        # The detailed view draws lag as histograms (`table.lag_lines`).
        yield MetricRow("lag", tuple(f"{lag_text(at, when)} {word}" for when, word in LAGS))
    yield MetricRow("queue", _queue(at, detailed))
    yield MetricRow("lengths", _lengths(at), 2)
    if at.drafts:
        yield MetricRow("drafts", tuple(_drafts(at)), 1)
    if detailed or at.scheduling.newest:
        yield MetricRow("moves", tuple(_moves(at)), 1)
    if detailed:
        yield MetricRow("waiting", _waiting(at), 1)
    yield MetricRow("groups", tuple(_groups(at)))
    if detailed:
        yield MetricRow("samples", _samples(at), 1)
        if at.mismatch:
            yield MetricRow("mismatch", tuple(_mismatch(at)), 2)
        yield MetricRow("versions", tuple(_versions(at)))
        yield MetricRow("records", tuple(_records(at)), 2)
        yield MetricRow("unreadable", tuple(_dead_letters(at)), 0 if at.dead_letters else 2)
        yield MetricRow("restarts", tuple(_restarts(at)), 0 if at.restarts else 2)


# The two moments at which lag is measured: in the name of the metric, and as displayed.
LAGS = (("finish", "at finish"), ("consumed", "trained"))


def evaluation_text(at: RunSnapshot) -> str:
    line = at.evaluation
    if not line:
        return ""
    sampled, greedy = line.get("accuracy_sampled"), line.get("accuracy_greedy")
    accuracies = [
        f"{value:.3f} {name}"
        for value, name in ((sampled, "sampled"), (greedy, "greedy"))
        if value is not None
    ]
    passes = {int(k): v for name, v in line.items() if (k := name.removeprefix("pass_at/")) != name}
    accuracies += [f"{passes[k]:.3f} pass@{k}" for k in sorted(passes)[-1:]]
    return f"{' · '.join(accuracies)}, held out (v{line['step']:.0f})"


def lag_text(at: RunSnapshot, when: str) -> str:
    """Returns mean and maximum in the last step; `when` is a moment of `LAGS`."""
    mean = _metric(at, f"lag_{when}_mean", ".1f")
    return f"{mean} (max {_metric(at, f'lag_{when}_max', '.0f')})"


def _metric(at: RunSnapshot, name: str, form: str) -> str:
    value = at.metrics.get(name)
    return UNKNOWN if value is None else format(value, form)


def _tasks(at: RunSnapshot) -> Iterator[str]:
    # The lowest rewards need attention first.
    rewards = sorted(at.task_rewards.items(), key=lambda item: item[1])
    for task, reward in rewards[:TASKS_MAX]:
        yield f"{plain_text(task, 24)} {reward:.3f}"
    if len(rewards) > TASKS_MAX:
        yield f"… and {len(rewards) - TASKS_MAX} more"


def _speeds(at: RunSnapshot) -> tuple[str, ...]:
    recent = at.pace.recent_trained_per_s
    trained = UNKNOWN if recent is None else count(recent)
    return (f"{trained} trained lately", f"{count(at.pace.generated_per_s)} generated")


def _pace(at: RunSnapshot) -> tuple[str, ...]:
    per_h = UNKNOWN if at.pace.steps_per_h is None else count(at.pace.steps_per_h)
    is_current = at.pace.since_step_s is not None and not at.is_over
    since = [f"last step {age(at.pace.since_step_s or 0.0)} ago"] if is_current else []
    return (f"{at.pace.trajectories_per_s:.1f} trajectories/s", f"{per_h} steps/h", *since)


def _queue(at: RunSnapshot, detailed: bool) -> tuple[str, ...]:
    queue = at.queue
    if not detailed:
        return (f"{queue.open_groups} open", f"{queue.ready_groups} ready to train")
    return (
        f"{queue.open_groups} open{_oldest(queue.open_group_s)}",
        f"{queue.ready_groups} ready{_oldest(queue.ready_group_s)}",
        f"{queue.unread_prompts} prompts{_oldest(queue.unread_prompt_s)}",
    )


def _oldest(seconds: float | None) -> str:
    return "" if seconds is None else f" (oldest {age(seconds)})"


def _lengths(at: RunSnapshot) -> tuple[str, ...]:
    cut = at.outcomes.trajectories.get("length", 0)
    total = cut + at.outcomes.trajectories.get("stop", 0)
    parts = [f"{name} {_metric(at, f'length_{name}', '.0f')}" for name in ("median", "p99")]
    limit = "a limit" if at.plan.has_agents else at.plan.tokens_max
    cut_off = f"{share(cut / total) if total else UNKNOWN} cut at {limit}"
    return (*parts, cut_off, *_predicted(at))


def _drafts(at: RunSnapshot) -> Iterator[str]:
    newest = at.drafts[0].number
    mixed = len({pass_drafts.task for pass_drafts in at.drafts}) > 1
    for pass_drafts in at.drafts[:DRAFTS_MAX]:
        which = "" if pass_drafts.number is None else f"pass {pass_drafts.number} "
        which += f"{plain_text(pass_drafts.task, 24)} " if mixed else ""
        yield f"{which}{_acceptance(pass_drafts.guesses)}"
        # Older passes show only their acceptance.
        if pass_drafts.number == newest:
            yield from _lookups(pass_drafts.guesses)


def _acceptance(totals: DraftTotals) -> str:
    accepted = UNKNOWN if totals.acceptance is None else share(totals.acceptance)
    return f"{accepted} accepted, {totals.per_step:.1f} tokens a step"


def _lookups(totals: DraftTotals) -> Iterator[str]:
    if totals.hit_rate is not None and totals.lookup_us is not None:
        yield f"{share(totals.hit_rate)} found in {totals.lookup_us:.0f}{GAP}µs each"
    yield f"{totals.wrong_per_token:.2f} rejected per token"


def _moves(at: RunSnapshot) -> Iterator[str]:
    scheduling = at.scheduling
    if not scheduling.newest:
        yield "none yet"
        return
    requests, moves = plural(scheduling.moved, "request"), plural(scheduling.moves, "move")
    yield f"{requests} in {moves}, last minute" if scheduling.moves else "none in the last minute"
    for move, ago_s in scheduling.newest:
        source, destination = plain_text(move.source, 16), plain_text(move.destination, 16)
        yield f"{source} → {destination} ({move.requests}) {age(ago_s)} ago"


def _waiting(at: RunSnapshot) -> tuple[str, ...]:
    scheduling = at.scheduling
    words = (
        f"{count(scheduling.queued)} assignments",
        f"{count(scheduling.waiting)} requests in engines",
    )
    parked = (
        (f"{count(scheduling.parked)} dialogues for their environment",)
        if scheduling.parked
        else ()
    )
    return words + parked


def _predicted(at: RunSnapshot) -> Iterator[str]:
    lengths = at.scheduling.foreseen
    if lengths is not None:
        yield f"{lengths.expected:.0f} predicted, {lengths.real:.0f} generated"
        yield f"off by {share(lengths.error_share)}"


def _groups(at: RunSnapshot) -> Iterator[str]:
    names = ("trained", "filtered", "expired", "dead")
    yield from (
        f"{count(at.outcomes.groups.get(n, 0))} {n}" for n in names if n in at.outcomes.groups
    )
    if not at.outcomes.groups:
        yield "none ended yet"
    if at.outcomes.is_tail:
        yield "of the log's last part"


def _samples(at: RunSnapshot) -> tuple[str, ...]:
    names = ("late", "duplicate", "dead")
    counts = (f"{count(at.outcomes.trajectories.get(name, 0))} {name}" for name in names)
    return (*counts, f"{share(at.lag.masked_share)} of tokens masked for lag")


def _mismatch(at: RunSnapshot) -> Iterator[str]:
    # The largest mismatch first.
    tasks = sorted(at.mismatch.items(), key=lambda pair: -max(pair[1].mean, pair[1].near_mean))
    for task, mismatch in tasks[:TASKS_MAX]:
        name = plain_text(task, 24)
        if mismatch.tokens:
            yield f"{name} {mismatch.mean:.1e} nats (max {mismatch.largest:.1e})"
            yield f"{short_number(mismatch.tokens)} tokens to step {mismatch.step}"
        else:
            yield f"{name} no token of lag 0"
        if mismatch.near_lag is not None:
            yield f"{mismatch.near_mean:.1e} at lag {mismatch.near_lag}"


def _versions(at: RunSnapshot) -> Iterator[str]:
    if at.version is None:
        yield "none yet"
        return
    yield f"v{at.version} newest ({short_number(at.version_bytes)}B)"
    alive = [rollout for rollout in at.rollouts if rollout.state != "silent"]
    if alive:
        versions = sorted({rollout.version for rollout in alive})
        which = f"v{versions[0]}" if len(versions) == 1 else f"v{versions[0]}–v{versions[-1]}"
        unsure = sum(not rollout.verified for rollout in alive)
        checked = f"{unsure} NOT VERIFIED" if unsure else "all verified"
        yield f"{which} in {len(alive)} rollout{'s' if len(alive) > 1 else ''}, {checked}"
    if at.evaluation:
        yield f"v{at.evaluation['step']:.0f} evaluated"


def _records(at: RunSnapshot) -> Iterator[str]:
    if not at.record_ages:
        yield "none yet"
    yield from (f"{topic} {age(seconds)}" for topic, seconds in at.record_ages.items())


def _dead_letters(at: RunSnapshot) -> Iterator[str]:
    if not at.dead_letters:
        yield "none"
    yield from (f"{count(letters.count)} of {t}" for t, letters in at.dead_letters.items())


def _restarts(at: RunSnapshot) -> Iterator[str]:
    yield str(at.restarts)
    worst = sorted(at.restarted.items(), key=lambda pair: -pair[1])
    yield from (f"{restarts}× {plain_text(role, 24)}" for role, restarts in worst[:3])
    for death in at.deaths[:3]:
        role = plain_text(death.role, 24)
        yield f"{role} ({describe_exit(death.code)}) {age(death.ago_s)} ago"
