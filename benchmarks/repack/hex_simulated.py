"""Unlike machines in the simulator: the world of the benchmark `hex` in virtual time
(`simulated_run`), and a run as `rollstream plan` assigns it to three kinds of cards
(`simulated_plans`), where treating all alike may also let the wrong kind train.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from math import exp

from benchmarks.repack.hex_world import KINDS, WARM, WORLD, Arm, kv_tokens, settings_of
from benchmarks.runs.watched import EXAMPLE, SETTINGS
from rollstream.plan.engines import MEAN_SHARE, SAMPLES, SLOTS_MAX, PlanRequest
from rollstream.plan.planner import LAG_MAX
from rollstream.plan.rates import DECODE_BANDWIDTH, DECODE_FLOPS, STEP_OVERHEAD_S, TRAIN_FIXED_S
from rollstream.plan.unlike import UnlikePlan, plan_unlike, plans_of
from rollstream.producers.engines.paced.batch import SPARE_SHARE
from rollstream.producers.engines.paced.build import lengths_from, roofline_from
from rollstream.producers.engines.paced.lengths import LogNormal
from rollstream.producers.engines.roofline import batch_max, roofline_of_hardware
from rollstream.run.config.config import load
from rollstream.run.sizes.arithmetic import BFLOAT16
from rollstream.run.sizes.devices import ACCELERATORS, CardKind, parse_kinds
from rollstream.run.sizes.shapes import find_shape
from rollstream.simulator.cluster import Cluster, Job
from rollstream.simulator.constants import CONSTANTS
from rollstream.simulator.experiment import MOVE_S, ROUND_S
from rollstream.simulator.policies import OURS_BOUNDED
from rollstream.simulator.simulation import simulate
from rollstream.simulator.workload import AnswerLengths, Workload

PULL_S = 0.2  # of the wall: until a version of 20 MB is out, and again until a rollout has it
MODEL, GPUS, CONTEXT = "qwen2.5-7b", "8xH100,16xL40S,16xL4", 4096
PROMPT_TOKENS = int(CONSTANTS["prompt_tokens"].value)
PARTS = 4
"""The planned run is simulated on this part of its rollouts, groups and training: the load of each
rollout stays the same.
"""


def simulated_run(seed: int, steps: int, known: bool) -> Arm:
    """Returns the world of the real runs in virtual time, in seconds of the accelerators. Speeds
    are those of the cards' bandwidths, which bind here.
    """
    c = load(EXAMPLE, (*SETTINGS, *WORLD, *settings_of("H100")))
    kinds = [kind for kind, count in KINDS.items() for _ in range(count)]
    roofline, slots, scale = roofline_from(c.paced.roofline), c.rollouts.slots, c.paced.time_scale
    cluster = Cluster(
        rollouts=len(kinds),
        roofline=roofline,
        slots=slots,
        kv_capacity=kv_tokens(kinds[0]),
        batch_max=batch_max(roofline, slots),
        train_token_s=c.paced.train_token_s,
        train_fixed_s=c.paced.train_step_s,
        update_s=PULL_S * scale,
        arrive_s=PULL_S * scale,
        kv_reserve=SPARE_SHARE,
        move_s=MOVE_S * scale,
        repack_every_s=c.dispatch.repack_every_s * scale,
        speeds=tuple(
            ACCELERATORS[kind].bandwidth / ACCELERATORS[kinds[0]].bandwidth for kind in kinds
        ),
        kv_shares=tuple(kv_tokens(kind) / kv_tokens(kinds[0]) for kind in kinds),
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
    drawn, options = lengths_from(c.paced.lengths), c.task.options
    workload = Workload(
        AnswerLengths(drawn.distribution, drawn.correlation, c.sampling.tokens_max),
        c.trainer.samples_per_group,
        int(str(options["prompts"])),
        int(str(options["prompt_tokens"])),
        seed,
    )
    return _simulated(cluster, job, workload, known)


def simulated_plans(seed: int, steps: int) -> tuple[Arm, Arm]:
    """Returns the assignment that `rollstream plan` proposes, with known speeds, and the mean over
    the kinds that can train, each with all of its cards while the others generate, with unknown
    speeds.
    """
    request = PlanRequest(
        shape=find_shape(MODEL),
        card=ACCELERATORS["H100"],
        cards=0,
        context=CONTEXT,
        store_gbps=10,
        network_gbps=100,
    )
    kinds = parse_kinds(GPUS)
    best = plan_unlike(request, kinds)
    assert best is not None, "an H100 machine holds the trainer"
    known = _simulated_plan(best, seed, steps, True)
    alike = [_simulated_plan(plan, seed, steps, False) for plan in _any_kind_trains(request, kinds)]
    return known, Arm(
        statistics.fmean(arm.tokens_per_s for arm in alike),
        statistics.fmean(arm.dropped for arm in alike),
    )


def _any_kind_trains(request: PlanRequest, kinds: Sequence[CardKind]) -> list[UnlikePlan]:
    """Returns, for each kind that holds the trainer, the fastest training on all of its cards while
    the others generate.
    """
    found: dict[str, UnlikePlan] = {}
    for plan in plans_of(request, kinds):
        training = [work.kind for work in plan.works if work.trainer_cards]
        if len(training) == 1 and plan.trainer_cards == training[0].cards:
            name = training[0].card.name
            known = found.setdefault(name, plan)
            found[name] = max(known, plan, key=lambda one: one.train_tokens_per_s)
    return list(found.values())


def _simulated_plan(plan: UnlikePlan, seed: int, steps: int, known: bool) -> Arm:
    shape = plan.request.shape
    generating = [work for work in plan.works if work.engine is not None and work.engines]
    sizes = [
        (work.kind.card, work.engine)
        for work in generating
        for _ in range(max(1, round(work.engines / PARTS)))
        if work.engine is not None
    ]
    card, size = max(sizes, key=lambda one: one[0].bandwidth * one[1].tensor_parallel)
    fastest, cached = card.bandwidth * size.tensor_parallel, size.kv_tokens
    roofline = roofline_of_hardware(
        BFLOAT16 * shape.parameters,
        fastest * DECODE_BANDWIDTH,
        BFLOAT16 * shape.kv_numbers,
        2 * shape.active_parameters,
        card.flops * size.tensor_parallel * DECODE_FLOPS,
        STEP_OVERHEAD_S,
    )
    groups = plan.request.groups // PARTS
    cluster = Cluster(
        rollouts=len(sizes),
        roofline=roofline,
        slots=SLOTS_MAX,
        kv_capacity=cached,
        batch_max=batch_max(roofline, SLOTS_MAX),
        train_token_s=PARTS
        * max(0.0, 1 / plan.train_tokens_per_s - TRAIN_FIXED_S / plan.request.step_tokens),
        train_fixed_s=TRAIN_FIXED_S,
        update_s=BFLOAT16 * shape.parameters / CONSTANTS["pull_bandwidth"].value,
        arrive_s=BFLOAT16 * shape.parameters / CONSTANTS["relay_chain_bandwidth"].value,
        move_s=CONSTANTS["move_s"].value,
        speeds=tuple(c.bandwidth * s.tensor_parallel / fastest for c, s in sizes),
        kv_shares=tuple(s.kv_tokens / cached for _, s in sizes),
    )
    job = Job(groups_per_step=groups, steps=WARM + steps, skip=WARM, max_lag=LAG_MAX)
    ratio = CONSTANTS["length_p99_over_median"].value
    median = CONTEXT / MEAN_SHARE / exp(LogNormal(1.0, ratio).spread ** 2 / 2)
    lengths = AnswerLengths(
        LogNormal(median, ratio * median),
        CONSTANTS["length_between_prompts"].value,
        CONTEXT - PROMPT_TOKENS,
    )
    return _simulated(
        cluster, job, Workload(lengths, SAMPLES, 4 * groups, PROMPT_TOKENS, seed), known
    )


def _simulated(cluster: Cluster, job: Job, workload: Workload, known: bool) -> Arm:
    found = simulate(cluster, job, replace(OURS_BOUNDED, by_speed=known, drafts=False), workload)
    lost = found.counts.expired + found.counts.dropped
    return Arm(found.tokens_per_s, lost / job.steps)
