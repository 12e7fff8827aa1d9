"""Warnings about log and versions: unreadable records, a late archive, unverified weights.

Pure; the comment of each threshold holds its arithmetic.
"""

from collections.abc import Iterator

from rollstream.monitor.snapshot import RunSnapshot
from rollstream.monitor.format import age, count, plain_text, shortened
from rollstream.monitor.concern import RunWarning

ARCHIVE_ROLLS = 3.0
"""Multiple of `archive.roll_s`, the longest time after which the archive writes a record: by then
it should have been written twice.
"""


def dead_letters(at: RunSnapshot) -> Iterator[RunWarning]:
    if not at.dead_letters:
        return
    counts = ", ".join(f"{count(one.count)} in {t}.dead" for t, one in at.dead_letters.items())
    worst = max(at.dead_letters.values(), key=lambda one: one.count)
    reason = f"; the newest: {plain_text(worst.reason, 120)}" if worst.reason else ""
    topic = next(t for t, one in at.dead_letters.items() if one is worst)
    yield RunWarning(
        "dead_letters",
        f"records that could not be decoded: {counts}{reason}",
        f"rollstream tail {topic}.dead shows bytes, position and reason; find the program that "
        "writes them",
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
