"""Measures a run on two sites with a slow link between them (`testbed/hosts`), as root: the link is
cut for a minute, and later a host vanishes.

`hosts_cut` counts what audit and recount find lost or twice afterwards, in a run of the paced
engine and in the quickstart. The other cases are of the paced run, because three models and a
trainer would measure this machine's cores: the work that rollouts had and did not do in the cut
(`hosts_cut_idle`), the time until all slots run again (`hosts_back_s`), and the bytes that crossed
the link for weights, over those of the versions (`hosts_egress`).
"""

import tempfile
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.hosts.cut import Cut, back_s, idle_share
from rollstream.run.config.config import load
from rollstream.run.config.run_folder import open_run_log_for_writing, store_url
from rollstream.storage.archive.log_view import LogView
from rollstream.storage.archive.segments import LogRecord
from rollstream.storage.stores.connect import open_store
from rollstream.streams.records import WeightsAnnounced
from testbed.hosts.run import RELAY_PORT, HostsRun, Sampler
from testbed.hosts.sites import TwoSites, two_sites
from testbed.kills.final_counts import counted
from testbed.repository import ROOT
from testbed.run_process import read

CUT_S, BEFORE_S, AFTER_S = 60.0, 15.0, 40.0
BOUND_S = 1800.0
PACED = ROOT / "examples" / "longtail.toml"
PACED_SETTINGS = (
    "rollouts.on_update=in_flight", "rollouts.count=3", "rollouts.partial_s=1.0",
    "trainer.steps=24", "trainer.groups_per_step=48", "dispatch.ready_groups_max=384",
    "dispatch.queue_per_slot=4", "checkpoints.every=8", "truncate=false",
    "paced.lengths.median=800", "paced.lengths.p99=8000", "paced.time_scale=2",
    "paced.train_step_s=4", "paced.train_token_s=1e-6", "paced.weights_bytes=16000000",
)  # fmt: skip
"""Half a minute of work waits at each rollout, and a step takes 6 s. With 16 MB of weights a
version has about the bytes of the quickstart's.
"""
QUICKSTART = ROOT / "examples" / "quickstart.toml"
QUICKSTART_SETTINGS = (
    "trainer.steps=20", "trainer.groups_per_step=8", "warmup.steps=200", "warmup.documents=5000",
    "rollouts.slots=24", "checkpoints.every=5", "evaluation.enabled=false",
)  # fmt: skip


def cases(quick: bool) -> Iterator[Case]:
    """Quick: without the quickstart."""
    wrong = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        with two_sites([Path(folder) / "paced" / "a"]) as sites:
            yield from _paced(sites, Path(folder) / "paced", wrong)
        if not quick:
            with two_sites([Path(folder) / "quickstart" / "a"]) as sites:
                _quickstart(sites, Path(folder) / "quickstart", wrong)
    note = ", ".join(f"{count} {name}" for name, count in sorted(wrong.items()))
    yield alone("hosts_cut", sum(wrong.values()), "lost + twice", at_most=0, note=note)


def _paced(sites: TwoSites, folder: Path, wrong: Counter[str]) -> Iterator[Case]:
    with _started(sites, folder, PACED, PACED_SETTINGS) as (run, sampler):
        run.wait_for_step(3, BOUND_S)
        run.rest(BEFORE_S)
        cut = _cut(run)
        run.rest(AFTER_S)
        _vanish_and_end(run)
        counts, samples = sites.link.counts(), sampler.samples
        share = idle_share(samples, _log(run), cut, BEFORE_S)
        note = f"restarts in the whole run: {run.restarts() or 'none'}"
        yield alone("hosts_cut_idle", share, "slot-seconds", at_most=0.1, note=note)
        yield alone("hosts_back_s", back_s(samples, cut), "s", at_most=15)
        yield _egress(run, counts.from_a)
        _count(run, wrong)


def _quickstart(sites: TwoSites, folder: Path, wrong: Counter[str]) -> None:
    with _started(sites, folder, QUICKSTART, QUICKSTART_SETTINGS) as (run, _):
        run.wait_for_step(2, BOUND_S)
        _cut(run)
        run.wait_for_step(run.step() + 2, BOUND_S)
        _vanish_and_end(run)
        _count(run, wrong)


@contextmanager
def _started(
    sites: TwoSites, folder: Path, configuration: Path, settings: Sequence[str]
) -> Generator[tuple[HostsRun, Sampler]]:
    run, sampler = HostsRun(sites, folder, configuration, settings), Sampler(sites.hosts)
    try:
        run.make_model()
        run.start_all()
        yield run, sampler
    finally:
        sampler.close()
        run.close()


def _cut(run: HostsRun) -> Cut:
    begin_s = time.time()
    run.sites.link.cut()
    run.rest(CUT_S)
    run.sites.link.join()
    return Cut(begin_s, time.time())


def _vanish_and_end(run: HostsRun) -> None:
    """The last host vanishes, and dies before the run ends."""
    run.vanish(run.sites.hosts[-1])
    run.wait_for_step(min(run.steps, run.step() + 2), BOUND_S)
    run.sites.hosts[-1].close()
    run.wait_ended(BOUND_S)


def _log(run: HostsRun) -> list[LogRecord]:
    configuration = load(run.folder / "config.json")
    bus = open_run_log_for_writing(configuration, run.folder)
    try:
        view = LogView(bus, open_store(store_url(configuration, run.folder)), configuration.run)
        topics = ("assignments", "partials", "trajectories")
        return [one for topic in topics for one in view.topic(topic).records()]
    finally:
        bus.close()


def _egress(run: HostsRun, sent: Counter[int]) -> Case:
    """Bytes of IP packets from site A, of the bucket and of the trainer's pushes to relays."""
    versions = read(run.folder, "weights", WeightsAnnounced)
    needed = sum(one.bytes for one in versions)
    bucket, pushed = sent[run.sites.bucket.port], sent[RELAY_PORT]
    note = (
        f"{len(versions)} versions, {needed / 1e6:.1f} MB; pushed {pushed / 1e6:.1f} MB, "
        f"from the bucket {bucket / 1e6:.1f} MB"
    )
    return alone("hosts_egress", (bucket + pushed) / needed, "r", at_most=1.05, note=note)


def _count(run: HostsRun, wrong: Counter[str]) -> None:
    found = counted(run.folder, run.steps)
    wrong["lost"] += found.lost
    wrong["twice"] += found.twice
    if not found.is_clean:
        print(*found.wrong, sep="\n")
