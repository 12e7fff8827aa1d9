"""Writes a `RunSnapshot`, the metrics of one moment, as the metric rows of the live view
(`rollstream run` and `top`). A row has a name and parts, which are short texts; `table.py` wraps
them to a width, and `view.py` draws them.

If there is little room, the view leaves out rows of the highest `rank` first; rank 0 always stays.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rollstream.monitor.format import (
    GAP,
    age,
    count,
    plain_text,
    plural,
    share,
    short_number,
    sparkline,
)
from rollstream.monitor.samples import DraftTotals
from rollstream.monitor.snapshot import RunSnapshot
from rollstream.supervisor.process import describe_exit

UNKNOWN = "–"  # stands for an unknown value
TASKS_MAX = 8  # most tasks shown in a row
DRAFTS_MAX = 4  # most (pass over the prompts, task) pairs shown


@dataclass(frozen=True, slots=True)
class MetricRow:
    """Holds a row: its name, its parts, its `rank`, and `line`, a sparkline (a curve drawn in
    characters) that follows the first line of parts; "" for none.
    """

    name: str
    parts: tuple[str, ...]
    rank: int = 0
    line: str = ""


def metric_rows(at: RunSnapshot, detailed: bool) -> Iterator[MetricRow]:
    """Yields the rows in display order. `detailed` adds the less important ones and leaves out the
    row `lag`, because the detailed view draws lag as histograms (`table.lag_lines`).
    """
    yield MetricRow("reward", (_metric(at, "reward_mean", ".3f"),), 0, sparkline(at.rewards))
    if len(at.task_rewards) > 1:
        yield MetricRow("by task", tuple(_tasks(at)), 1)
    yield MetricRow("accuracy", (evaluation_text(at) or UNKNOWN,), 1)
    yield MetricRow("tokens/s", _speeds(at))
    if detailed:
        yield MetricRow("pace", _pace(at), 1)
    else:
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


LAGS = (("finish", "at finish"), ("consumed", "trained"))
"""The two moments at which lag is measured (a trajectory finishes, a token is trained): in the name
of the metric, and as it is displayed.
"""


def evaluation_text(at: RunSnapshot) -> str:
    """Returns the accuracy on held-out prompts of the newest evaluated version; "" before the first
    evaluation.
    """
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
    """Returns mean and maximum of the lag in the last step; `when` is a moment of `LAGS`: `finish`
    or `consumed` (trained).
    """
    mean = _metric(at, f"lag_{when}_mean", ".1f")
    return f"{mean} (max {_metric(at, f'lag_{when}_max', '.0f')})"


def _metric(at: RunSnapshot, name: str, form: str) -> str:
    value = at.metrics.get(name)
    return UNKNOWN if value is None else format(value, form)


def _tasks(at: RunSnapshot) -> Iterator[str]:
    """Yields the `TASKS_MAX` lowest mean rewards of tasks, then the number of other tasks."""
    rewards = sorted(at.task_rewards.items(), key=lambda item: item[1])
    for task, reward in rewards[:TASKS_MAX]:
        yield f"{plain_text(task, 24)} {reward:.3f}"
    if len(rewards) > TASKS_MAX:
        yield f"… and {len(rewards) - TASKS_MAX} more"


def _speeds(at: RunSnapshot) -> tuple[str, ...]:
    trained = UNKNOWN if at.pace.trained_per_s is None else count(at.pace.trained_per_s)
    return (f"{trained} trained", f"{count(at.pace.generated_per_s)} generated")


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
    """Yields draft metrics by pass over the prompts and by task: all metrics of the newest pass,
    and the acceptance of the others.
    """
    newest = at.drafts[0].number
    mixed = len({one.task for one in at.drafts}) > 1
    for one in at.drafts[:DRAFTS_MAX]:
        which = "" if one.number is None else f"pass {one.number} "
        which += f"{plain_text(one.task, 24)} " if mixed else ""
        yield f"{which}{_acceptance(one.guesses)}"
        if one.number == newest:
            yield from _lookups(one.guesses)


def _acceptance(found: DraftTotals) -> str:
    accepted = UNKNOWN if found.acceptance is None else share(found.acceptance)
    return f"{accepted} accepted, {found.per_step:.1f} tokens a step"


def _lookups(found: DraftTotals) -> Iterator[str]:
    """Yields the share of look-ups that found a draft with their mean time, then the rejected draft
    tokens per generated token.
    """
    if found.hit_rate is not None and found.lookup_us is not None:
        yield f"{share(found.hit_rate)} found in {found.lookup_us:.0f}{GAP}µs each"
    yield f"{found.wrong_per_token:.2f} rejected per token"


def _moves(at: RunSnapshot) -> Iterator[str]:
    """Yields the number of moved requests and of moves in the last minute, then the newest moves
    with source and destination.
    """
    found = at.scheduling
    if not found.newest:
        yield "none yet"
        return
    requests, moves = plural(found.moved, "request"), plural(found.moves, "move")
    yield f"{requests} in {moves}, last minute" if found.moves else "none in the last minute"
    for move, ago_s in found.newest:
        source, destination = plain_text(move.source, 16), plain_text(move.destination, 16)
        yield f"{source} → {destination} ({move.requests}) {age(ago_s)} ago"


def _waiting(at: RunSnapshot) -> tuple[str, ...]:
    found = at.scheduling
    words = (f"{count(found.queued)} assignments", f"{count(found.waiting)} requests in engines")
    parked = (f"{count(found.parked)} dialogues for their environment",) if found.parked else ()
    return words + parked


def _predicted(at: RunSnapshot) -> Iterator[str]:
    found = at.scheduling.foreseen
    if found is not None:
        yield f"{found.expected:.0f} predicted, {found.real:.0f} generated"
        yield f"off by {share(found.error_share)}"


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
    """Yields each task's mismatch (mean |Δ log p| between engine and trainer, in nats), the largest
    first: that of tokens of lag 0, and, if the newest step had none, that at the smallest lag.
    """
    tasks = sorted(at.mismatch.items(), key=lambda one: -max(one[1].mean, one[1].near_mean))
    for task, found in tasks[:TASKS_MAX]:
        name = plain_text(task, 24)
        if found.tokens:
            yield f"{name} {found.mean:.1e} nats (max {found.largest:.1e})"
            yield f"{short_number(found.tokens)} tokens to step {found.step}"
        else:
            yield f"{name} no token of lag 0"
        if found.near_lag is not None:
            yield f"{found.near_mean:.1e} at lag {found.near_lag}"


def _versions(at: RunSnapshot) -> Iterator[str]:
    if at.version is None:
        yield "none yet"
        return
    yield f"v{at.version} newest ({short_number(at.version_bytes)}B)"
    alive = [one for one in at.rollouts if one.state != "silent"]
    if alive:
        held = sorted({one.version for one in alive})
        which = f"v{held[0]}" if len(held) == 1 else f"v{held[0]}–v{held[-1]}"
        unsure = sum(not one.verified for one in alive)
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
    yield from (f"{count(one.count)} of {t}" for t, one in at.dead_letters.items())


def _restarts(at: RunSnapshot) -> Iterator[str]:
    yield str(at.restarts)
    worst = sorted(at.restarted.items(), key=lambda one: -one[1])
    yield from (f"{restarts}× {plain_text(role, 24)}" for role, restarts in worst[:3])
    for death in at.deaths[:3]:
        role = plain_text(death.role, 24)
        yield f"{role} ({describe_exit(death.code)}) {age(death.ago_s)} ago"
