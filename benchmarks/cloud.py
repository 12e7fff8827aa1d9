"""The quickstart over a real Kafka and a real S3 server against the same over SQLite and files.

`cloud_form_cost` compares trained tokens per second of pairs that run one after the other from the
same warm model; who goes first changes from pair to pair. Broker and S3 server run on the same two
cores as the roles, also while the embedded form runs, where they have nothing to do. Truncation is
off in both, since the clock is read from the whole log. A short run over the broker comes first and
counts for nothing: a broker that has been up for a while has compiled its own code.

What is missed against the goal is processor time: a step of the quickstart takes about half a
second of both cores, and the same step through kafka-python and the broker about half as much again
(the broker a fifth of a core, the rest in the clients of seven processes, by the record and by the
request). Short single pairs on a quiet machine gave .36 at first, .59 once idle looks stopped to
ask the broker where a topic ends (three of four requests of a run); three whole pairs .69 after
rollouts published beside decoding, one consumer followed all topics of a process, and what is said
within 50 ms went together.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.case import Case, paired
from benchmarks.measured_run import run
from benchmarks.pipeline import ASYNC, QUICKSTART, warm_model
from tests.servers import kafka_broker, versity

PAIRS, PAIRS_QUICK = 5, 1
STEPS_QUICK = 12
GOAL = 0.85


def cases(quick: bool) -> Iterator[Case]:
    """What the two URLs cost."""
    forms = {"cloud": _cloud, "embedded": _embedded}
    speeds: dict[str, list[float]] = {name: [] for name in forms}
    with tempfile.TemporaryDirectory(prefix="rollstream-cloud-") as scratch:
        base = Path(scratch)
        warm = warm_model(base)
        short = [f"model.path={warm}", "truncate=false", *ASYNC, f"trainer.steps={STEPS_QUICK}"]
        run(QUICKSTART, base / "first", [*short, *_cloud()])
        for pair in range(PAIRS_QUICK if quick else PAIRS):
            given = [f"model.path={warm}", f"seed={pair}", "truncate=false", *ASYNC]
            given += [f"trainer.steps={STEPS_QUICK}"] if quick else []
            for name in sorted(forms, reverse=bool(pair % 2)):
                measured = run(QUICKSTART, base / f"{name}-{pair}", [*given, *forms[name]()])
                speeds[name].append(measured.tokens_per_s)
    note = f"{kafka_broker.VERSION} and VersityGW {versity.VERSION} on the same cores"
    reference = "sqlite and files"
    cloud, embedded = speeds["cloud"], speeds["embedded"]
    yield paired("cloud_form_cost", cloud, "token/s", reference, embedded, GOAL, f"Kafka {note}")


def _cloud() -> list[str]:
    return [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}"]


def _embedded() -> list[str]:
    """The servers run here too: an idle broker is no part of what is compared."""
    kafka_broker.server()
    versity.server()
    return []
