"""Rollouts on three unlike kinds of machines: what dispatch gains by knowing their speeds
(`hex_gain`; docs/explanation/scheduling.md, Unlike machines).

Real processes with `examples/longtail.toml`: one rollout paces like an H100, two like an L40S,
three like an L4, each kind with a configuration of its own, as separate machines have. The other
side of a pair is the same run with `dispatch.by_speed=false`, which treats all six alike. Both have
one seed, one admission and the same steps, which begin when all prompts were answered once, so that
lengths are known. `hex_gain_sim` is the same world in the simulator.
"""

import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import Popen

from benchmarks.case import Case, paired
from benchmarks.runs.watched import EXAMPLE, SETTINGS, Watched, watched
from rollstream.config.config import load
from rollstream.producers.engines.factory import lengths_from, roofline_from
from rollstream.producers.engines.paced.batch import SPARE_SHARE
from rollstream.producers.engines.roofline import batch_max
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.experiment import MOVE_S, ROUND_S
from rollstream.simulator.policies import OURS
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, Workload
from rollstream.sizes.devices import ACCELERATORS
from testbed.run_process import running

PAIRS, PAIRS_QUICK = 5, 1
WARM = 4  # steps; two are one pass over the prompts, after which lengths are known
JOINED = 2  # steps after the last rollout has joined
STEPS, STEPS_QUICK = 8, 4
KINDS: Mapping[str, int] = {"H100": 1, "L40S": 2, "L4": 3}
"""Rollouts of each kind of card, the fastest first: `rollstream run` starts those of the first."""
PACED = "paced engine: lengths drawn, times computed"
WORLD = (
    "trainer.steps=40", "trainer.groups_per_step=64", "task.options.prompts=128",
    "dispatch.max_lag=4", "paced.weights_bytes=20000000", "paced.time_scale=4",
)  # fmt: skip
MODEL_BYTES, KV_TOKEN_BYTES, MEMORY_SHARE = 15.2e9, 57_344, 0.9
SHARES = 2.7 / 3.35, 6e14 / 989e12
"""Shares of its peak bandwidth and arithmetic that a card reaches: those of the example's H100."""
PULL_S = 0.2  # of the wall: until a version of 20 MB is out, and again until a rollout has it


@dataclass(frozen=True, slots=True)
class Arm:
    """The measured steps of one run."""

    tokens_per_s: float
    dropped: float
    """Samples per step that were too old to be trained."""


def cases(quick: bool) -> Iterator[Case]:
    """Yields the gain in real runs, then in the simulator."""
    with tempfile.TemporaryDirectory(prefix="rollstream-hex-") as scratch:
        steps, base = STEPS_QUICK if quick else STEPS, Path(scratch)
        pairs = [_pair(base, seed, steps) for seed in range(PAIRS_QUICK if quick else PAIRS)]
    yield _case("hex_gain", pairs, "the same run with dispatch.by_speed=false", 1.2, PACED)
    simulated = [_simulated_pair(seed, steps) for seed in range(PAIRS)]
    yield _case("hex_gain_sim", simulated, "the same simulation, speeds unknown", None, "simulator")


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


def settings_of(kind: str) -> tuple[str, ...]:
    """Returns the settings of a machine with this card: its bandwidth, arithmetic and memory."""
    card = ACCELERATORS[kind]
    kv_tokens = (card.memory * MEMORY_SHARE - MODEL_BYTES) / KV_TOKEN_BYTES
    return (
        f"rollouts.count={KINDS[kind]}",
        f"paced.roofline.bandwidth={card.bandwidth * SHARES[0]:.4g}",
        f"paced.roofline.flops={card.flops * SHARES[1]:.4g}",
        f"paced.kv_tokens={int(kv_tokens)}",
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
        run.until(lambda: bool(run.beats))
        for kind in others:
            for number in range(KINDS[kind]):
                stack.enter_context(_rollout(folder, kind, number, shared))
        run.until(lambda: len(run.beats) == sum(KINDS.values()))
        begin = max(WARM, max(run.steps, default=0) + JOINED)
        run.until(lambda: begin + steps in run.steps)
        found = _measured(run, begin, begin + steps)
    for path in folder.parent.glob(f"{folder.name}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def _rollout(
    folder: Path, kind: str, number: int, shared: Sequence[str]
) -> AbstractContextManager[Popen[bytes]]:
    """Starts a rollout as a machine of this kind does, with a run folder of its own."""
    own = Path(f"{folder}-{kind}")
    line = [sys.executable, "-m", "rollstream", "rollout", str(EXAMPLE), "--run", str(own)]
    line += ["--name", f"{kind.lower()}-{number}"]
    settings = (*SETTINGS, *shared, *settings_of(kind))
    line += [word for setting in settings for word in ("--set", setting)]
    return running(line, Path(f"{own}-{number}.log"))


def _measured(run: Watched, begin: int, end: int) -> Arm:
    steps = [run.steps[number] for number in range(begin + 1, end + 1)]
    seconds = run.steps[end].time_s - run.steps[begin].time_s
    trained = sum(step.metrics["tokens_trained"] for step in steps)
    dropped = sum(step.counts.get("dropped", 0) for step in steps)
    return Arm(trained / seconds, dropped / len(steps))


def _simulated_pair(seed: int, steps: int) -> tuple[Arm, Arm]:
    return _simulated(seed, steps, True), _simulated(seed, steps, False)


def _simulated(seed: int, steps: int, known: bool) -> Arm:
    """The same world in virtual time, in seconds of the accelerators."""
    c = load(EXAMPLE, (*SETTINGS, *WORLD, *settings_of("H100")))
    cards = [ACCELERATORS[kind] for kind, count in KINDS.items() for _ in range(count)]
    caches = [int(settings_of(card.name)[-1].partition("=")[2]) for card in cards]
    roofline, slots, scale = roofline_from(c.paced.roofline), c.rollouts.slots, c.paced.time_scale
    cluster = Cluster(
        rollouts=len(cards),
        roofline=roofline,
        slots=slots,
        kv_capacity=caches[0],
        batch_max=batch_max(roofline, slots),
        train_token_s=c.paced.train_token_s,
        train_fixed_s=c.paced.train_step_s,
        update_s=PULL_S * scale,
        arrive_s=PULL_S * scale,
        kv_reserve=SPARE_SHARE,
        move_s=MOVE_S * scale,
        repack_every_s=c.dispatch.repack_every_s * scale,
        speeds=tuple(card.bandwidth / cards[0].bandwidth for card in cards),
        kv_shares=tuple(cache / caches[0] for cache in caches),
    )
    assert c.dispatch.max_lag is not None, "WORLD bounds the lag"
    job = Job(
        groups_per_step=c.trainer.groups_per_step,
        steps=WARM + steps,
        skip=WARM,
        max_lag=c.dispatch.max_lag,
        queue_per_slot=c.dispatch.queue_per_slot,
        dispatch_every_s=ROUND_S * scale,
    )
    drawn, prompts = lengths_from(c.paced.lengths), int(str(c.task.options["prompts"]))
    lengths = AnswerLengths(drawn.distribution, drawn.correlation, c.sampling.tokens_max)
    tokens = int(str(c.task.options["prompt_tokens"]))
    workload = Workload(lengths, c.trainer.samples_per_group, prompts, tokens, seed)
    found = simulate(cluster, job, replace(OURS, by_speed=known), workload)
    lost = found.counts.expired + found.counts.dropped
    return Arm(found.tokens_per_s, lost / (WARM + steps))
