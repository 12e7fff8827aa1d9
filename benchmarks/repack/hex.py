"""Rollouts on three unlike kinds of machines: what dispatch gains by knowing their speeds
(`hex_gain`; docs/explanation/scheduling.md, Unlike machines).

Real processes with `examples/longtail.toml`: one rollout paces like an H100, two like an L40S,
three like an L4, each kind with a configuration of its own, as separate machines have. The other
side of a pair is the same run with `dispatch.by_speed=false`, which treats all six alike. Both have
one seed, one admission and the same steps, which begin when all prompts were answered once, so that
lengths are known. `hex_simulated.py` has the same world, and a planned one, in the simulator.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.case import Case, paired
from benchmarks.repack.hex_simulated import GPUS, MODEL, simulated_plans, simulated_run
from benchmarks.repack.hex_world import KINDS, WARM, WORLD, Arm, settings_of
from benchmarks.runs.watched import EXAMPLE, SETTINGS, Watched, watched
from testbed.run_driver import RunDriver

PAIRS, PAIRS_QUICK = 5, 1
JOINED = 2  # steps after the last rollout has joined
STEPS, STEPS_QUICK = 8, 4
PACED = "paced engine: lengths drawn, times computed"


def cases(quick: bool) -> Iterator[Case]:
    """Yields the gain in real runs, then in the simulator."""
    with tempfile.TemporaryDirectory(prefix="rollstream-hex-") as scratch:
        steps, base = STEPS_QUICK if quick else STEPS, Path(scratch)
        pairs = [_pair(base, seed, steps) for seed in range(PAIRS_QUICK if quick else PAIRS)]
    yield _case("hex_gain", pairs, "the same run with dispatch.by_speed=false", 1.2, PACED)
    seeds = range(PAIRS_QUICK if quick else PAIRS)
    same = [(simulated_run(seed, steps, True), simulated_run(seed, steps, False)) for seed in seeds]
    yield _case("hex_gain_sim", same, "the same simulation, speeds unknown", None, "simulator")
    planned = [simulated_plans(seed, steps) for seed in seeds]
    note = f"simulator, {MODEL} on {GPUS}: a quarter of the cards, prompts and training"
    reference = "any kind trains (mean), speeds unknown"
    yield _case("hex_plan_sim", planned, reference, None, note)


def _case(
    name: str, pairs: Sequence[tuple[Arm, Arm]], reference: str, goal: float | None, note: str
) -> Case:
    known, alike = [one for one, _ in pairs], [other for _, other in pairs]
    lost = [statistics.fmean(arm.dropped for arm in arms) for arms in (alike, known)]
    return paired(
        name,
        [arm.tokens_per_s for arm in known],
        "tok/s",
        reference,
        [arm.tokens_per_s for arm in alike],
        goal,
        f"{note}; samples too old to be trained, per step: {lost[0]:.1f} → {lost[1]:.1f}",
    )


def _pair(base: Path, seed: int, steps: int) -> tuple[Arm, Arm]:
    """With known speeds and without; the arm that runs first alternates."""
    order = (True, False) if seed % 2 == 0 else (False, True)
    found = {known: _arm(base / f"{seed}-{known}", known, seed, steps) for known in order}
    return found[True], found[False]


def _arm(folder: Path, known: bool, seed: int, steps: int) -> Arm:
    shared = (
        *WORLD, f"seed={seed}", f"dispatch.by_speed={str(known).lower()}",
        f"bus=sqlite:{folder}/bus", f"store=file:{folder}/store",
    )  # fmt: skip
    first, *others = KINDS
    with ExitStack() as stack:
        run = stack.enter_context(watched(folder, (*shared, *settings_of(first))))
        run.wait_for(lambda: bool(run.beats))
        for kind in others:
            # As machines of this kind, with run folders of their own.
            settings = (*SETTINGS, *shared, *settings_of(kind))
            machines = stack.enter_context(RunDriver(Path(f"{folder}-{kind}"), EXAMPLE, settings))
            for number in range(KINDS[kind]):
                machines.start(f"{kind.lower()}-{number}", command="rollout")
        run.wait_for(lambda: len(run.beats) == sum(KINDS.values()))
        begin = max(WARM, max(run.steps, default=0) + JOINED)
        run.wait_for(lambda: begin + steps in run.steps)
        found = _measured(run, begin, begin + steps)
    for path in folder.parent.glob(f"{folder.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _measured(run: Watched, begin: int, end: int) -> Arm:
    steps = [run.steps[number] for number in range(begin + 1, end + 1)]
    seconds = run.steps[end].time_s - run.steps[begin].time_s
    trained = sum(step.metrics["tokens_trained"] for step in steps)
    dropped = sum(step.counts.get("dropped", 0) for step in steps)
    return Arm(trained / seconds, dropped / len(steps))
