"""Warnings about log, versions and mismatch: unreadable records, a late archive, wrong weights.

Pure, one function per warning; the comment of each threshold holds its arithmetic. The mismatch
warning compares log-probabilities of engine and trainer for the same tokens and version;
`docs/explanation/learning.md` lists its causes.
"""

from collections.abc import Iterator

from rollstream.monitor.format import age, count, plain_text, shortened
from rollstream.monitor.snapshot import RunSnapshot, RunWarning

TOKENS_MIN = 256
"""The spread of |Δ| is about its mean, so the mean over 256 tokens is known to 6 %."""
EXACT_NATS = 1e-3
"""Mean |Δ| with float32 everywhere: rounding alone stays below 1e-4 (vLLM: at most 5e-5)."""
ROUNDED_NATS = 0.05
"""Mean |Δ| with 16-bit values. bfloat16 has 8 significant bits: a logit of 16 is stored in steps
of 0.06, so its mean error is 0.016, and that of log-probabilities about as much. The bound is three
times that.
"""
NEAR_NATS = 0.5
"""Per step of lag: |Δ| then includes the learning in between, 0.03 to 0.14 a step in the
quickstart after a short warm-up. Wrong weights differ by several nats.
"""
MISMATCH_ADVICE = (
    "likely causes, in this order: the engine's log-probabilities are not at sampling.temperature "
    "or are of a filtered distribution; it serves other weights than it reports (rollstream audit) "
    "or prefix-cache blocks of other weights; the output head has 16 bits on one side "
    "(rollouts.vllm.head_float32); see docs/explanation/learning.md"
)


def engine_mismatch(at: RunSnapshot) -> Iterator[RunWarning]:
    """One warning per task; at a lag above 0 only for more than training can explain."""
    bound = EXACT_NATS if at.plan.is_float32 else ROUNDED_NATS
    for task, found in at.mismatch.items():
        name = plain_text(task, 40)
        if found.tokens >= TOKENS_MIN and found.mean > bound:
            what = (
                f"engine and trainer are {found.mean:.2g} nats apart on average (bound: {bound:g}) "
                f"for the same {count(found.tokens)} tokens of task {name} under the same version; "
                f"KL {found.kl:.2g}, largest {found.largest:.2g}"
            )
        elif found.near_lag is not None and found.near_mean > NEAR_NATS * found.near_lag:
            what = (
                f"engine and trainer are {found.near_mean:.2g} nats apart on average for tokens of "
                f"task {name} at lag {found.near_lag}, more than training explains (the last step "
                "had none of lag 0)"
            )
        else:
            continue
        yield RunWarning(f"mismatch/{name}", what, MISMATCH_ADVICE)


MISMATCH_CHECKS = (engine_mismatch,)


ARCHIVE_ROLLS = 3.0
"""Multiple of `archive.roll_s`, the longest time after which the archive writes a record: by then
it should have been written twice.
"""


def dead_letters(at: RunSnapshot) -> Iterator[RunWarning]:
    if not at.dead_letters:
        return
    counts = ", ".join(f"{count(one.count)} of {t}" for t, one in at.dead_letters.items())
    worst = max(at.dead_letters.values(), key=lambda one: one.count)
    reason = f"; the newest: {plain_text(worst.reason, 120)}" if worst.reason else ""
    yield RunWarning(
        "dead_letters",
        f"records that could not be decoded: {counts}{reason}",
        "rollstream tail dead shows bytes, position and reason; find the program that writes them",
    )


def archive_behind(at: RunSnapshot) -> Iterator[RunWarning]:
    behind = {
        t: left
        for t, left in at.unarchived_s.items()
        if left[1] > ARCHIVE_ROLLS * at.plan.archive_roll_s
    }
    if behind:
        topic, (records, oldest_s) = max(behind.items(), key=lambda one: one[1][1])
        yield RunWarning(
            "archive_behind",
            f"the archive is behind: {count(records)} records of {topic} are not archived, the "
            f"oldest for {age(oldest_s)}",
            "check that the archive role runs (logs/archive.log) and that the store accepts "
            "writes; until it has caught up, the log is not truncated",
        )


def unverified_versions(at: RunSnapshot) -> Iterator[RunWarning]:
    wrong = [one for one in at.rollouts if one.is_alive() and not one.verified]
    if wrong:
        names = ", ".join(f"{shortened(one.name, 24)} (v{one.version})" for one in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        yield RunWarning(
            "unverified_versions",
            f"weights that were not verified, or differ from the announced ones: {names}{more}",
            "restart these rollouts: they fetch the version again and check every tensor's hash",
        )


LOG_CHECKS = (unverified_versions, dead_letters, archive_behind)
