"""How good the settings are that `rollstream tune` proposes (`tune_regret`): the best of all
settings that were tried by hand over the proposed ones, in trained tokens per second of real runs,
minus 1.

Two worlds: the paced engine (lengths are drawn and times computed, all processes are real), whose
accelerators are split between rollouts and trainer, and the quickstart, whose rollouts and trainer
share the cores. `tune` reads one recorded run under the present settings, nothing else. Results are
kept in a folder of the system's temporary ones until all is measured, so that a second start goes
on; delete it to begin again.
"""

import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks.case import Case, alone
from benchmarks.runs.quickstart import QUICKSTART, warm_model
from benchmarks.runs.watched import EXAMPLE
from benchmarks.tune.hand import (
    KeptResults,
    Overrides,
    TuningWorld,
    chosen,
    proposed,
    recorded_machine,
)

REGRET_MAX = 0.05
SKIP = 8  # simulated steps in which a run fills
RUNS = 3  # of the best settings and of the proposed ones, in turn
TRAIN_TOKEN_S = 1e-4  # of one accelerator: with four rollouts a step waits for the trainer
KEEP, FLIGHT = "rollouts.on_update=keep_version", "rollouts.on_update=in_flight"


def split(rollouts: int, trainer: int) -> Overrides:
    """Five accelerators in the paced world; the trainer's are part of its seconds per token."""
    return f"rollouts.count={rollouts}", f"paced.train_token_s={TRAIN_TOKEN_S / trainer:g}"


PACED = TuningWorld(
    name="paced",
    example=EXAMPLE,
    settings=(
        "trainer.groups_per_step=24", "task.options.prompts=48", "paced.lengths.median=400",
        "paced.lengths.p99=4000", "sampling.tokens_max=4000", "rollouts.context_max=4096",
        "paced.kv_tokens=44000", "paced.weights_bytes=20000000", "paced.time_scale=3",
        "paced.train_step_s=0.5", f"paced.train_token_s={TRAIN_TOKEN_S}", "dispatch.max_lag=4",
        KEEP,
    ),
    gpus=5,
    hand=(
        (),
        split(3, 2),
        split(2, 3),
        (*split(4, 1), FLIGHT),
        (*split(3, 2), FLIGHT),
        (*split(2, 3), FLIGHT),
        (*split(3, 2), FLIGHT, "rollouts.slots=128"),
        (*split(3, 2), FLIGHT, "rollouts.slots=32"),
        (*split(3, 2), FLIGHT, "dispatch.max_lag=2"),
        (*split(3, 2), FLIGHT, "dispatch.max_lag=1"),
        (*split(3, 2), "dispatch.repack=false"),
        (*split(3, 2), "rollouts.slots=128"),
    ),
    first=4,
    last=14,
)  # fmt: skip
TORCH = TuningWorld(
    name="torch",
    example=QUICKSTART,
    settings=("evaluation.enabled=false", "rollouts.slots=48"),
    gpus=4,
    hand=(
        (),
        ("rollouts.slots=96",),
        ("rollouts.count=1", "trainer.workers=3"),
        ("rollouts.count=3", "trainer.workers=1"),
        ("dispatch.max_lag=2",),
        (KEEP,),
    ),
    first=8,
    last=28,
)


def cases(quick: bool) -> Iterator[Case]:
    """Yields `tune_regret`, the larger of both worlds'; if `quick`, of the first settings of the
    paced world.
    """
    folder = Path(tempfile.gettempdir()) / f"rollstream-tune{'-quick' if quick else ''}"
    folder.mkdir(exist_ok=True)
    kept, worlds = KeptResults(folder), [replace(PACED, hand=PACED.hand[:4])]
    if not quick:
        torch = replace(TORCH, settings=(*TORCH.settings, f"model.path={warm_model(folder)}"))
        worlds = [PACED, torch]
    found = [regret(kept, world, 1 if quick else RUNS) for world in worlds]
    note = "; ".join(text for _, text in found)
    yield alone("tune_regret", max(one for one, _ in found), "", at_most=REGRET_MAX, note=note)
    shutil.rmtree(folder)


def regret(kept: KeptResults, world: TuningWorld, runs: int) -> tuple[float, str]:
    """Returns the regret of one world, and its figures as text. The best settings tried by hand are
    chosen by one run each; then they and the proposed ones are measured `runs` times in turn.
    """
    speeds = {settings: kept.measured(world, settings) for settings in world.hand}
    settings, expected = proposed(world, kept.recorded(world))
    by_hand = max(world.hand, key=lambda one: speeds[one])
    for number in range(1, runs + 1):
        kept.measured(world, by_hand, number)
        kept.measured(world, settings, number)
    best, mine = kept.measured(world, by_hand), kept.measured(world, settings)
    ranks = sorted(speeds.values())
    off = prediction_errors(world, kept.recorded(world), speeds)
    return best / mine - 1, (
        f"{world.name}: {mine:,.0f} tok/s by {_words(settings)} (predicted {expected:,.0f}), "
        f"{best:,.0f} by {_words(by_hand)}, best of {len(ranks)} tried by hand ({ranks[0]:,.0f} to "
        f"{ranks[-1]:,.0f}), {speeds[()]:,.0f} before; medians of {runs}; hand settings predicted "
        f"from the one recorded run: error {statistics.median(off):.0%} in the median, "
        f"{max(off):.0%} at most"
    )


def prediction_errors(
    world: TuningWorld, recorded: Path, speeds: Mapping[Overrides, float]
) -> list[float]:
    """Returns the relative errors of the predicted speeds of the settings tried by hand. The
    recorded run's own are left out.
    """
    machine, found = recorded_machine(world, recorded), list[float]()
    for settings, real in speeds.items():
        predicted = machine.predicted(chosen(world, settings), SKIP) if settings else None
        if predicted is not None:
            found.append(abs(predicted.tokens_per_s / real - 1))
    return found


def _words(settings: Overrides) -> str:
    return " ".join(settings) or "the present settings"
