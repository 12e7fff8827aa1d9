"""What the explorer costs and how fast it is (docs/how-to/explore-a-run.md).

A server over a generated archive of a million trajectories: the time from the click on a trajectory
to its answer (`explorer_open_s`), the slowest view's (`explorer_view_s`), both medians over answers
that the server has not kept; the time in a browser until the first view is drawn
(`explorer_paint_s`, where a Chromium and playwright are installed); the server's largest memory
(`explorer_memory_mb`), and the bytes of the page as sent (`explorer_assets_kb`).

`explorer_cost` compares windows of one quickstart: the server follows it and a client asks what the
page asks, or both are stopped (SIGSTOP). A window that begins again pays for reading what the
stopped server missed, so the cost is an upper bound. The run hardly learns (`STILL_LR`): otherwise
its answers grow longer from window to window, by more than the explorer costs.
"""

import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, RemoteDisconnected
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.case import Case, alone, paired
from benchmarks.explorer.large_run import SAMPLES, STEP_ROWS, write_large_run
from rollstream.look.explorer.assets import load_assets, sent_bytes
from rollstream.look.query.locate import locate_run
from rollstream.look.query.session import QuerySession
from testbed.repository import ROOT
from testbed.run_driver import RunDriver

ROWS, QUICK_ROWS = 1_000_000, 100_000
OPENED, REPEATS = 25, 7
ASSETS_KB = 150.0
PAIRS, QUICK_PAIRS = 12, 2
WINDOW_S, WARMUP_S = 20.0, 15.0
STILL_LR = 1e-9
COST_GOAL = 0.98
READY_S = 600.0


def cases(quick: bool) -> Iterator[Case]:
    """Yields the size of the page, the cases of the large run, then the cost to a living one."""
    kilobytes = sent_bytes(load_assets()) / 1024
    yield alone("explorer_assets_kb", kilobytes, "kB", at_most=ASSETS_KB, note="gzip, as sent")
    with tempfile.TemporaryDirectory(prefix="rollstream-large-") as folder:
        rows = QUICK_ROWS if quick else ROWS
        write_large_run(Path(folder), rows)
        yield from large_run_cases(Path(folder), rows)
    yield from _cost(QUICK_PAIRS if quick else PAIRS)


class ExplorerClient:
    """Asks one server; not for several threads."""

    def __init__(self, port: int) -> None:
        self._connection = HTTPConnection("127.0.0.1", port, timeout=READY_S)

    def get(self, path: str) -> Any:
        """Returns the JSON of a route below `/api/`; raises `AssertionError` for an error."""
        return json.loads(self.read(path))

    def read(self, path: str) -> bytes:
        """Returns the bytes of the same answer."""
        try:
            self._connection.request("GET", f"/api/{path}")
            answer = self._connection.getresponse()
        except RemoteDisconnected:  # closed because it was idle for a while
            self._connection.close()
            self._connection.request("GET", f"/api/{path}")
            answer = self._connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (path, answer.status, body[:200])
        return body

    def seconds(self, path: str) -> float:
        started = time.perf_counter()
        self.get(path)
        return time.perf_counter() - started

    def wait_until_read(self) -> None:
        """Wait until the server has read its first run once."""
        until_s = time.monotonic() + READY_S
        while not self.get("runs")["runs"][0]["index"]["complete"]:
            assert time.monotonic() < until_s, "the run was not read within ten minutes"
            time.sleep(0.1)

    def close(self) -> None:
        self._connection.close()


@contextmanager
def served(folder: Path) -> Generator[tuple[psutil.Process, int]]:
    """Runs `rollstream explore` on the folder until the block ends; gives process and port."""
    command = [sys.executable, "-m", "rollstream", "explore", str(folder), "--no-browser"]
    process = subprocess.Popen([*command, "--port", "0"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().rstrip().rstrip("/").rpartition(":")[2])
        yield psutil.Process(process.pid), port
    finally:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        process.wait(30)


def large_run_cases(folder: Path, rows: int) -> Iterator[Case]:
    """Yields the cases of a server over the large run in `folder`."""
    started = time.perf_counter()
    with served(folder) as (process, port):
        client = ExplorerClient(port)
        first = client.get("runs")
        first_s = time.perf_counter() - started
        client.wait_until_read()
        ready_s = time.perf_counter() - started
        cpu = sum(process.cpu_times()[:2])
        note = f"{rows:,} trajectories; read in {ready_s:.1f} s ({cpu:.1f} s of CPU) once"
        paint = _paint_seconds(port)
        if paint:
            value = statistics.median(paint)
            text = f"Chromium, {len(paint)} loads; first answer {first_s:.2f} s after the start"
            yield alone("explorer_paint_s", value, "s", at_most=1.0, note=f"{text}; {note}")
        yield _open(client, rows)
        yield _view(client, rows, first["runs"][0])
        peak = _peak_mb(process)
        yield alone("explorer_memory_mb", peak, "MB", at_most=400.0, note=f"VmHWM; {note}")
        client.close()


def _open(client: ExplorerClient, rows: int) -> Case:
    names = random.Random(1).sample(range(rows), OPENED)
    times = [client.seconds(f"r/0/trajectories/{n // SAMPLES}.{n % SAMPLES}") for n in names]
    note = f"{OPENED} at random, largest {max(times):.3f} s"
    return alone("explorer_open_s", statistics.median(times), "s", at_most=0.3, note=note)


def _view(client: ExplorerClient, rows: int, run: dict[str, Any]) -> Case:
    """The slowest view: the largest of their medians, each over requests that differ."""
    span = client.get("runs")["runs"][0]["span"]
    del run
    medians: dict[str, float] = {}
    for name, paths in _views(rows, span).items():
        medians[name] = statistics.median(client.seconds(path) for path in paths)
    slowest = max(medians, key=lambda name: medians[name])
    note = ", ".join(f"{name} {value:.3f}" for name, value in medians.items())
    return alone("explorer_view_s", medians[slowest], "s", at_most=1.0, note=f"{slowest}: {note}")


def _views(rows: int, span: Sequence[float]) -> dict[str, list[str]]:
    """Returns the requests of each view, `REPEATS` different ones each."""
    steps, groups = rows // STEP_ROWS, rows // SAMPLES
    draw = random.Random(2)
    z = math.ceil(math.log2(span[1] - span[0]))

    def some(most: int) -> list[int]:
        return [draw.randrange(1, most) for _ in range(REPEATS)]

    def tiles(z: int) -> list[str]:
        times = [draw.uniform(span[0], span[1]) for _ in range(REPEATS)]
        return [f"r/0/lanes?i={math.floor(at / 2.0**z)}&z={z}" for at in times]

    return {
        "overview": ["r/0/sheet"],
        "steps": [f"r/0/steps?cursor={n}" for n in some(steps)],
        "step": [f"r/0/steps/{n}" for n in some(steps)],
        "groups": [f"r/0/groups?cursor={n}" for n in some(groups)],
        "group": [f"r/0/groups/{n}" for n in some(groups)],
        "lanes": [*tiles(z), *tiles(z - 1), *tiles(z - 2)],
        "lanes near": tiles(3),
        "questions": ["r/0/questions"],
        "weights": ["r/0/weights"] * REPEATS,
        "lag map": [f"r/0/map/lag?reward_max=1&tokens_min={n}" for n in some(9)],
        "length map": [f"r/0/map/length?tokens_min={n}" for n in some(9)],
        "brush": [f"r/0/search?lag_max=1&reward_min=0.5&tokens_min={n}" for n in some(30)],
        "longest": [f"r/0/search?order=-tokens&tokens_max={n}" for n in some(200)],
        "compare": ["compare"] * REPEATS,
    }


def _paint_seconds(port: int) -> list[float]:
    """Returns the times from navigation until the overview is drawn, each in a new browser context;
    [] without playwright or a Chromium.
    """
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return []
    if not Path("/usr/bin/chromium").is_file():
        return []
    found: list[float] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(
            executable_path="/usr/bin/chromium", args=["--no-sandbox", "--disable-gpu"]
        )
        for _ in range(REPEATS):
            context = browser.new_context()
            page = context.new_page()
            started = time.perf_counter()
            page.goto(f"http://127.0.0.1:{port}/", wait_until="commit")
            page.locator("main canvas, main svg").first.wait_for(state="visible")
            found.append(time.perf_counter() - started)
            context.close()
        browser.close()
    return found


def _peak_mb(process: psutil.Process) -> float:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    (peak,) = (line for line in lines if line.startswith("VmHWM"))
    return int(peak.split()[1]) / 1024


def _cost(pairs: int) -> Iterator[Case]:
    """The cost to a quickstart with a short warm-up and short steps, in windows in turns (ABBA)."""
    with tempfile.TemporaryDirectory(prefix="rollstream-explored-") as scratch:
        folder, example = Path(scratch) / "run", ROOT / "examples" / "quickstart.toml"
        settings = [
            "trainer.steps=100000", "warmup.steps=100", "trainer.groups_per_step=8",
            "evaluation.enabled=false", f"trainer.lr={STILL_LR}",
        ]  # fmt: skip
        with RunDriver(folder, example, settings) as run:
            run.start()
            run.wait_for_step(3, READY_S)
            time.sleep(WARMUP_S)
            with served(folder) as (process, port):
                windows = _windows(process, port, psutil.Process(run.newest().pid), pairs)
            run.newest().stop(bound_s=60)
        yield _cost_case(_rates(folder, windows), windows)


@dataclass(frozen=True, slots=True)
class CostWindow:
    """A window of the run: whether the explorer watched it, its start and end (seconds since the
    epoch), and the shares of one core that the server and the run's processes took.
    """

    is_watched: bool
    start_s: float
    end_s: float
    server_share: float
    run_share: float


def _windows(
    process: psutil.Process, port: int, run: psutil.Process, pairs: int
) -> list[CostWindow]:
    """Returns the windows of the pairs, in the order in which they passed."""
    page = WatchingPage(port)
    page.thread.start()
    page.wait_until_read()
    windows: list[CostWindow] = []
    for number in range(2 * pairs):
        watched = number % 4 in (0, 3)
        page.is_watching.set() if watched else page.is_watching.clear()
        process.resume() if watched else process.suspend()
        server_s, run_s, start_s = _cpu_s(process), _cpu_s(run), time.time()
        time.sleep(WINDOW_S)
        end_s = time.time()
        shares = (_cpu_s(process) - server_s, _cpu_s(run) - run_s)
        server, roles = (share / (end_s - start_s) for share in shares)
        windows.append(CostWindow(watched, start_s, end_s, server, roles))
    process.resume()
    page.is_over.set()
    page.is_watching.set()
    page.thread.join(30)
    return windows


def _cpu_s(process: psutil.Process) -> float:
    """Returns the processor time of the process and of its children."""
    return sum(
        sum(one.cpu_times()[:2]) for one in (process, *process.children(recursive=True))
    )  # fmt: skip


class WatchingPage:
    """Makes the requests of an open page: at each change the overview, and the steps or the newest
    tile of time in turns.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.is_watching, self.is_over = threading.Event(), threading.Event()
        self.requests = 0
        self.is_watching.set()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def wait_until_read(self) -> None:
        """Wait until the server has read the run once."""
        client = ExplorerClient(self._port)
        client.wait_until_read()
        client.close()

    def _follow(self) -> None:
        stream = HTTPConnection("127.0.0.1", self._port, timeout=READY_S)
        stream.request("GET", "/api/events")
        events = stream.getresponse()
        client = ExplorerClient(self._port)
        while not self.is_over.is_set():
            line = events.readline()
            self.is_watching.wait()
            if line.startswith(b"event: change"):
                self.requests += 1
                client.read("r/0/sheet")
                if self.requests % 2:
                    client.read("r/0/steps")
                else:
                    client.read(f"r/0/lanes?i={math.floor(time.time() / 64)}&z=6")


def _rates(folder: Path, windows: Sequence[CostWindow]) -> list[tuple[bool, float]]:
    """Returns the trained tokens per second of each window, by the steps' own times; a step that
    lies across an edge counts by its share of time.
    """
    with QuerySession(locate_run(str(folder)), lambda text: None) as session:
        answer = session.answer("SELECT epoch(done), tokens_trained FROM steps ORDER BY step")
        rows = [row for batch in answer.batches for row in batch]
    times = [float(row[0]) for row in rows]
    sums: list[float] = []
    for row in rows:
        sums.append((sums[-1] if sums else 0.0) + float(row[1] or 0))

    def trained(at: float) -> float:
        for number, (before, after) in enumerate(pairwise(times)):
            if before <= at <= after:
                share = (at - before) / max(1e-9, after - before)
                return sums[number] + share * (sums[number + 1] - sums[number])
        return sums[-1]

    return [
        (one.is_watched, (trained(one.end_s) - trained(one.start_s)) / (one.end_s - one.start_s))
        for one in windows
    ]


def _cost_case(rates: Sequence[tuple[bool, float]], windows: Sequence[CostWindow]) -> Case:
    watched = [rate for seen, rate in rates if seen]
    alone_ = [rate for seen, rate in rates if not seen]
    server = statistics.mean(one.server_share for one in windows if one.is_watched)
    roles = [
        statistics.mean(one.run_share for one in windows if one.is_watched is seen)
        for seen in (True, False)
    ]
    note = (
        f"windows of {WINDOW_S:g} s of one quickstart of 8 groups a step that hardly learns; the "
        f"server took {server:.1%} of a core, the run's processes {roles[0]:.0%} while it was "
        f"watched and {roles[1]:.0%} while not"
    )
    return paired("explorer_cost", watched, "tokens/s", "not watched", alone_, COST_GOAL, note)
