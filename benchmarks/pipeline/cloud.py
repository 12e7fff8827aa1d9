"""The quickstart over a real Kafka and a real S3 server against the same over SQLite and files.

`cloud_form_cost` compares trained tokens per second of pairs that run one after the other from the
same warm model; the order alternates from pair to pair. Broker and S3 server share the two cores
with the roles; they also run, idle, beside the embedded form. Truncation is off in both, since
times are read from the whole log. A short run over the broker comes first and does not count,
because a broker compiles its code only after a while.

The difference is processor time: a step of the quickstart takes about half a second of both cores,
and a request to the broker or to the S3 server costs a client 1 to 2 ms. So the number of requests
decides (docs/reference/kafka.md lists them). `cloud_cpu_*` gives CPU seconds of each process over
its whole life, the median of the pairs, against the embedded form's; the servers' are those of the
cloud runs. `cloud_records_*` are records of a topic per step.
"""

import resource
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from benchmarks.case import Case, against, alone, paired
from benchmarks.runs.measured import Measured, run
from benchmarks.runs.quickstart import ASYNC, QUICKSTART, warm_model
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import bus_url
from rollstream.storage.metrics_file import read_metrics
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import catalogue
from testbed.servers import kafka_broker, versity

PAIRS, PAIRS_QUICK = 5, 1
STEPS_QUICK = 12
GOAL = 0.8


def cases(quick: bool) -> Iterator[Case]:
    """Yields the cost of the cloud form."""
    forms = {"cloud": _cloud, "embedded": _embedded}
    runs: dict[str, list[Measured]] = {name: [] for name in forms}
    cpu: dict[str, list[dict[str, float]]] = {name: [] for name in forms}
    served: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="rollstream-cloud-") as scratch:
        base = Path(scratch)
        warm = warm_model(base)
        short = [f"model.path={warm}", "truncate=false", *ASYNC, f"trainer.steps={STEPS_QUICK}"]
        run(QUICKSTART, base / "first", [*short, *_cloud()])
        for pair in range(PAIRS_QUICK if quick else PAIRS):
            given = [f"model.path={warm}", f"seed={pair}", "truncate=false", *ASYNC]
            given += [f"trainer.steps={STEPS_QUICK}"] if quick else []
            for name in sorted(forms, reverse=bool(pair % 2)):
                settings, before = [*given, *forms[name]()], _servers()
                all_s = _children_s()
                measured = run(QUICKSTART, base / f"{name}-{pair}", settings)
                runs[name].append(measured)
                cpu[name].append(_cpu(measured.folder, _children_s() - all_s))
                if name == "cloud":
                    served.append({who: s - before.get(who, 0.0) for who, s in _servers().items()})
        records = _records(runs["cloud"][-1])
    note = f"{kafka_broker.VERSION} and VersityGW {versity.VERSION} on the same cores"
    reference = "sqlite and files"
    cloud, embedded = ([one.tokens_per_s for one in runs[name]] for name in forms)
    yield paired("cloud_form_cost", cloud, "token/s", reference, embedded, GOAL, f"Kafka {note}")
    for who in sorted(cpu["cloud"][0]):
        here, there = (_median(cpu[name], who) for name in forms)
        yield against(f"cloud_cpu_{who}", here, "s", reference, max(there, 0.01))
    for who in sorted(served[0]):
        yield alone(f"cloud_cpu_{who}", _median(served, who), "s", note="a server")
    for topic, count in records.items():
        yield alone(f"cloud_records_{topic}", count, "records/step")


def _cpu(folder: Path, all_s: float) -> dict[str, float]:
    """CPU seconds of each role of a run, as each wrote them when it ended; `others` are the
    supervisor and the workers of roles.
    """
    files = sorted((folder / "metrics").glob("process-*.jsonl"))
    found = {
        file.stem.removeprefix("process-"): sum(line["cpu_s"] for line in read_metrics(file))
        for file in files
    }
    return {**found, "others": all_s - sum(found.values())}


def _children_s() -> float:
    """CPU seconds of all ended children, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _servers() -> dict[str, float]:
    """CPU seconds of the servers so far: the children of this process that remain after a run."""
    children = psutil.Process().children(recursive=True)
    return {one.name(): sum(one.cpu_times()[:2]) for one in children}


def _median(found: Sequence[Mapping[str, float]], who: str) -> float:
    return statistics.median(one.get(who, 0.0) for one in found)


def _records(measured: Measured) -> dict[str, float]:
    """Records of each topic per step; nothing was truncated."""
    bus = open_bus(bus_url(load(measured.folder / "config.json"), measured.folder))
    steps = max(1, len(measured.done_s))
    ends = {t.name: sum(bus.end(t.name).values()) for t in catalogue() if "." not in t.name}
    bus.close()
    return {topic: count / steps for topic, count in ends.items() if count}


def _cloud() -> list[str]:
    return [f"bus={kafka_broker.new_url()}", f"store={versity.new_url()}"]


def _embedded() -> list[str]:
    """The servers run here too, so an idle broker is not part of the difference."""
    kafka_broker.server()
    versity.server()
    return []
