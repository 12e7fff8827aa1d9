"""Opens a simulation as runs, one per policy and cluster: from the file of `rollstream simulate
--save` (`open_saved_runs`), or from the command's configuration (`simulate_runs`).

The steps become an archive that is read like every other; bars and moves stay in
`SimulatedLocation`. There are no trajectories, groups or weights.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from rollstream.look.explorer.simulated import SimulatedLocation
from rollstream.plan.simulation_settings import load_simulation
from rollstream.simulator.experiment import PolicyRun, policy_names, run_policies
from rollstream.simulator.results import SimulatedStep
from rollstream.simulator.saved_runs import load_saved_runs
from rollstream.storage.archive.file_names import archive_key
from rollstream.storage.archive.files import encode_file
from rollstream.streams.bus import Message
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.records import Fence, Opened, Record, StepDone
from rollstream.streams.values import Version

ROLE = "trainer"


def simulate_runs(
    source: str, folder: Path, runs_max: int, tell: Callable[[str], None]
) -> Iterator[SimulatedLocation]:
    """Yields the first `runs_max` simulated runs of the file, each written below `folder`. Raises
    `ConfigurationError` for wrong settings.
    """
    settings = load_simulation(Path(source), ())
    count = len(policy_names(settings)) * len(settings.clusters)
    if count > runs_max:
        tell(
            f"{source} simulates {count} runs: the first {runs_max} are shown; name fewer policies"
        )
    # Simulating again gives the same runs: the seed is a setting.
    for location in _opened(source, run_policies(settings), folder, runs_max):
        tell(f"simulated {location.run}")
        yield location


def open_saved_runs(
    path: Path, folder: Path, runs_max: int, tell: Callable[[str], None]
) -> Iterator[SimulatedLocation]:
    """Yields the first `runs_max` runs of a file of saved runs, each with its steps below `folder`.
    Raises `ConfigurationError` for a damaged file.
    """
    runs = load_saved_runs(path)
    if len(runs) > runs_max:
        tell(f"{path} holds {len(runs)} runs: the first {runs_max} are shown")
    yield from _opened(str(path), runs, folder, runs_max)


def _opened(
    source: str, runs: Iterable[PolicyRun], folder: Path, runs_max: int
) -> Iterator[SimulatedLocation]:
    for number, run in enumerate(islice(runs, runs_max)):
        name = f"{run.result.policy}-{run.cluster.model}-{run.cluster.gpus}"
        yield _written(source, name, folder / str(number), run)


def _written(source: str, name: str, store: Path, run: PolicyRun) -> SimulatedLocation:
    records: list[tuple[Record, float]] = [(Opened(ROLE, 1), 0.0)]
    records += [(_done(step), step.ended_s) for step in run.result.steps]
    messages = [
        Message("ledger", 0, at, round(1000 * time_s), ROLE.encode(), _encoded(record, at))
        for at, (record, time_s) in enumerate(records)
    ]
    path = store / archive_key("ledger", name, 0, 0, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(encode_file("ledger", messages, Fence()).data)
    return SimulatedLocation(source, f"file:{store}", run=name, share=run.share, result=run.result)


def _encoded(record: Record, at: int) -> bytes:
    return encode(record, Envelope(ROLE, 1, at))


def _done(step: SimulatedStep) -> StepDone:
    tokens = sum(step.lags.values())
    metrics = {
        "seconds": step.ended_s - step.begun_s,
        "tokens_trained": float(step.tokens),
        "lag_consumed_mean": sum(lag * n for lag, n in step.lags.items()) / max(1, tokens),
        "lag_consumed_max": float(max(step.lags, default=0)),
    }
    counts = {"trained": step.samples, "dropped": step.dropped, "masked_tokens": step.masked}
    return StepDone(step.number, Version(step.number, 1), "", 0, metrics, counts, step.ended_s)
