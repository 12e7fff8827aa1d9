"""Readers: they look at a run that they may not write, and at counts of one moment."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory

from rollstream.consumers.trainer.totals import TrainerTotals
from rollstream.metric_values import MetricHistogram
from rollstream.streams.connect import open_bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import StepDone
from rollstream.streams.values import Version
from rollstream.streams.writer import publish
from testbed.first_hour.case import FirstHourCase
from testbed.first_hour.looked_at_run import copied_run
from testbed.servers import bubblewrap

Fault = Callable[[Path], str]
WAIT_S = 60.0
LIGHT = (
    "query|{run}|SELECT count(*) FROM trajectories", "audit|{run}", "inspect|{run}|--last",
    "tail|{run}|ledger", "report|{run}|--output|{out}/report.html", "report|{run}",
    "diff|{run}|{run}", "ls|{runs}", "top|{run}|--once", "trace|{run}|--perfetto|{out}/trace.gz",
    "weights|list|{run}", "weights|show|{run}|latest", "checkpoints|list|{run}",
    "config|{run}|--changes", "backup|{run}|{out}/backup", "trust|{run}",
)  # fmt: skip
HEAVY = ("weights|verify|{run}", "fork|{run}|--at|latest|--out|{out}/fork")  # they import torch
LIVING = ("tail|{run}|ledger", "audit|{run}", "query|{run}|FROM steps", "top|{run}|--once")
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
MOUNTED = ("--bind", "/", "/", "--dev-bind", "/dev", "/dev", "--ro-bind")  # of bwrap
SEVERAL = """
import json, sys
from rollstream.run.cli.main import main
for words in json.loads(sys.argv[1]):
    code = main(words)
    print(f"exit {code}: {' '.join(words)}", file=sys.stderr, flush=True)
"""


def _read_only(lines: Sequence[str], is_mounted: bool = False, is_living: bool = False) -> Fault:
    """Looks at a run that cannot be written: root's run as the user nobody, or on a read-only
    mount. All commands run in one process.
    """

    def fault(folder: Path) -> str:
        with TemporaryDirectory(prefix="rollstream-read-only-") as place, ExitStack() as living:
            base, runs, out = Path(place), Path(place) / "runs", Path(place) / "out"
            base.chmod(0o755)
            out.mkdir()
            out.chmod(0o777)
            runs.mkdir()
            run = copied_run(runs / "before")
            if is_living:
                bus = living.enter_context(closing(open_bus(f"sqlite:{run / 'bus'}")))
                status = TopicReader(bus, "status", from_begin(bus, "status"))
                for received in status.read_to(bus.end("status")):
                    publish(bus, "status", received.key, received.record)
            before = _contents(run)
            subprocess.run(["chmod", "-R", "a=rX", str(runs)], check=True)
            places = {"run": run, "runs": runs, "out": out}
            words = [[word.format(**places) for word in line.split("|")] for line in lines]
            before_it: tuple[str, ...] = AS_NOBODY if os.getuid() == 0 else ()
            if is_mounted:
                before_it = (str(bubblewrap.program()), *MOUNTED, str(runs), str(runs))
            ended = subprocess.run(
                [*before_it, sys.executable, "-c", SEVERAL, json.dumps(words)], cwd=out,
                capture_output=True, timeout=WAIT_S, check=False,
                env={**os.environ, "HOME": str(out), "ROLLSTREAM_STATE": str(out / "state")},
            )  # fmt: skip
            has_changed = _contents(run) != before
            subprocess.run(["chmod", "-R", "u+w", str(runs)], check=True)
        errors = ended.stderr.decode()
        if ended.returncode or "Traceback" in errors or errors.count("exit ") < len(lines):
            return f"exit {ended.returncode}: {errors[-500:]}"
        allowed = {f"exit 1: report {run}"}
        failed = [one for one in errors.splitlines() if one.startswith("exit ") and one[5] != "0"]
        if set(failed) - allowed:
            return errors[-900:]
        return "the run's folder changed" if has_changed else ""

    return fault


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def _done(step: int, tokens: int) -> StepDone:
    return StepDone(
        step=step, version=Version(step, 1), state_hash="", takes=1,
        metrics={"tokens_trained": float(tokens)}, counts={}, time_s=0.0,
    )  # fmt: skip


def _tokens_and_lags(values: Mapping[str, object]) -> tuple[object, int]:
    lags = values["lag_steps"]
    assert isinstance(lags, MetricHistogram)
    return values["trainer_tokens_trained_total"], sum(lags.counts())


class _WatchedLags(dict[int, int]):
    """Lags during whose reading, in the middle of a step's counting, another thread scrapes."""

    def __init__(self, lags: Mapping[int, int], totals: TrainerTotals) -> None:
        super().__init__(lags)
        self._totals = totals
        self.seen: list[tuple[object, int]] = []
        self.scrape = threading.Thread(target=self._scrape)

    def _scrape(self) -> None:
        self.seen.append(_tokens_and_lags(self._totals.metric_values()))

    def items(self):
        self.scrape.start()
        self.scrape.join(0.2)  # in time if it shows half of a step, else blocked until its end
        return super().items()


def _scrape_inside_a_step(folder: Path) -> str:
    totals = TrainerTotals()
    totals.add(_done(1, 5), {0: 5}, {}, 0.1)
    lags = _WatchedLags({1: 7}, totals)
    totals.add(_done(2, 7), lags, {}, 0.1)
    lags.scrape.join(WAIT_S)
    return "" if lags.seen in ([(5, 5)], [(12, 12)]) else f"tokens and lags: {lags.seen}"


def _scrape_before_a_step(folder: Path) -> str:
    totals = TrainerTotals()
    totals.add(_done(1, 5), {0: 5}, {}, 0.1)
    values = totals.metric_values()
    totals.add(_done(2, 7), {1: 7}, {}, 0.1)
    shown = _tokens_and_lags(values)
    return "" if shown == (5, 5) else f"a scrape changed after it was taken: {shown}"


def _histogram_is_whole(folder: Path) -> str:
    histogram = MetricHistogram((1, 2))
    histogram.add(1.0, 3)
    counts, total = histogram.state
    histogram.add(2.0)
    return "" if (counts, total) == ((3, 0, 0), 3.0) else f"{counts} {total}"


CASES = (
    FirstHourCase("read_only_run", "reader_that_writes", _read_only(LIGHT), is_slow=True),
    FirstHourCase("read_only_heavy", "reader_that_writes", _read_only(HEAVY), is_slow=True),
    FirstHourCase("read_only_mount", "reader_that_writes", _read_only(LIVING, True), is_slow=True),
    FirstHourCase(
        "read_only_living",
        "reader_that_writes",
        _read_only(LIVING, False, True),
        is_slow=True,
    ),
    FirstHourCase(
        "read_only_mount_living",
        "reader_that_writes",
        _read_only(LIVING, True, True),
        is_slow=True,
    ),
    FirstHourCase("scrape_inside_a_step", "one_moment", _scrape_inside_a_step),
    FirstHourCase("scrape_before_a_step", "one_moment", _scrape_before_a_step),
    FirstHourCase("histogram_is_whole", "one_moment", _histogram_is_whole),
)
