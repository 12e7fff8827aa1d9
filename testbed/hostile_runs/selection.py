"""Which calls run on which cases: `every_call` names the cases on which all calls run, and
`rotating` gives each other case a few calls, so that each call meets every kind of case.
"""

from collections.abc import Iterable, Iterator, Sequence

from testbed.hostile_runs.calls import CALLS, Call
from testbed.hostile_runs.case import Case
from testbed.hostile_runs.cases import CASES

CORE = (
    "healthy run", "healthy archive", "healthy backup",
    "link ~writing to the project, relative", "link store/~locks to the project",
    "link bus to the project", "link store to the project", "link model to the project",
    "link metrics to the project", "link store/audit to the project", "link bus to the user's run",
    "link bus/ledger.db to a database", "link config.json to a key", "link report.html to a key",
    "link token-scores.parquet to a key", "link metrics/forward-tensorboard.json to a key",
    "link model/tokenizer.json to a key", "link a Parquet file to a key",
    "link the folder itself", "link loops", "dangling link report.html",
    "dangling link store/audit", "dangling link metrics/tensorboard", "FIFO config.json",
    "FIFO bus/ledger.db",
    "FIFO model/tokenizer.json", "device store/run.json", "hard link report.html",
    "archive: link ~writing", "backup: link ~writing",
    "trainer.advantage names sent_module", "trainer.loss names installed_module",
    "task.name names sent_module", "task.options.verifier names sent_module",
    "task.sandbox.backend names sent_module", "recorded configuration names modules",
    "backup: settings name modules", "modules in the working directory",
    "model with code of its own", "chat template that executes", "pickle in place of weights",
    "Kafka, password", "Kafka, token of a sent function", "Kafka over TLS, password",
    "S3 store at an endpoint", "archive: S3 store at an endpoint",
    "store is the project", "bus is the project, relative",
    "model manifest writes keys through a link", "model manifest names ..",
    "weight manifest names ..", "backup: store is the project", "JSON nested: other files",
    "SQLite triggers", "Parquet of other types", "names with escape sequences",
)  # fmt: skip
"""Cases on which every call runs: each kind of mechanism once or twice."""


def every_call() -> Iterator[tuple[Case, Sequence[Call]]]:
    """Yields each case of `CORE` with all calls, and the other cases with a few."""
    names = set(CORE)
    assert names <= {case.name for case in CASES}, names - {case.name for case in CASES}
    yield from ((case, CALLS) for case in CASES if case.name in names)
    yield from rotating((case for case in CASES if case.name not in names), 2)


def rotating(
    cases: Iterable[Case], count: int, calls: Sequence[Call] = CALLS
) -> Iterator[tuple[Case, Sequence[Call]]]:
    """Yields each case with `count` of the calls that take it, the next ones for each case."""
    turns: dict[str, int] = {}
    for case in cases:
        taking = [call for call in calls if case.kind in call.kinds]
        first = turns.get(case.kind, 0)
        # A stride that shares no factor with most lengths, so that neighbours get unlike calls.
        chosen = {taking[(first + 7 * number) % len(taking)].words: None for number in range(count)}
        turns[case.kind] = first + 1 + 7 * (count - 1)
        yield case, [call for call in taking if call.words in chosen]
