"""Properties of every simulated run: nothing is lost or made twice, the cache is never overfull, no
lag is above its bound, and equal seeds give equal runs.
"""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from rollstream.errors import ConfigurationError
from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.policies import POLICIES, ablation, policy_of
from rollstream.simulator.replica import Replica
from rollstream.simulator.results import SimulatedTrainer, SimulationResult
from rollstream.simulator.simulation import Simulation
from rollstream.simulator.workload import EnvironmentWaits, SimulatedTrajectory
from rollstream.simulator.world import World
from tests.simulator.small import DRAFTS, JOB, SMALL, TAILED, TOOLS, run, workload

GROWING = Roofline(weights_s=0.004, kv_token_s=1e-6, row_s=2e-4, prefill_token_s=1e-5)
WAVY = replace(JOB, groups_per_step=6, steps=6, skip=2, quota=6, queue_per_slot=0.5)
names = st.sampled_from(sorted(POLICIES))


@settings(max_examples=40, deadline=None)
@given(
    name=names,
    seed=st.integers(0, 10_000),
    failures=st.sampled_from([0.0, 400.0]),
    notice=st.sampled_from([0.0, 400.0]),
    speeds=st.sampled_from([(1.0,), (1.0, 0.5, 2.0)]),
    waits=st.sampled_from([None, TOOLS, replace(TOOLS, holds_kv=False)]),
)
def test_every_sample_is_accounted_for(
    name: str,
    seed: int,
    failures: float,
    notice: float,
    speeds: tuple[float, ...],
    waits: EnvironmentWaits | None,
):
    result = run(
        name, TAILED, WAVY, seed, waits, rollouts=3, slots=4, batch_max=4, roofline=GROWING,
        speeds=speeds, failures_per_hour=failures, preemptions_per_hour=notice, repair_s=5.0,
        drafts=DRAFTS, rollouts_per_host=2, host_pull_s=0.1,
    )  # fmt: skip
    assert result.counts.add_up(), result.counts
    assert len(result.steps) == WAVY.steps
    assert sum(result.lags.values()) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(name=names, seed=st.integers(0, 10_000), waits=st.sampled_from([None, TOOLS]))
def test_every_trained_sample_was_generated_once_and_whole(
    name: str, seed: int, waits: EnvironmentWaits | None
):
    world = World(
        replace(SMALL, rollouts=3, slots=4, batch_max=4, drafts=DRAFTS), WAVY, policy_of(name),
        workload(TAILED, seed, environment=waits),
    )  # fmt: skip
    received: list[str] = []
    receive = SimulatedTrainer.receive

    def check_then_receive(
        trainer: SimulatedTrainer, group: int, samples: list[SimulatedTrajectory]
    ) -> None:
        check_whole(samples, world.dispatching.workload.group(group))
        received.extend(work.name for work in samples)
        receive(trainer, group, samples)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SimulatedTrainer, "receive", check_then_receive)
        Simulation(world).run()
    assert len(received) == len(set(received)) > 0


def check_whole(samples: list[SimulatedTrajectory], lengths: list[int]) -> None:
    assert [work.done for work in sorted(samples, key=lambda w: w.name)] == lengths
    for work in samples:
        assert sum(tokens for _, tokens in work.spans) == work.done
        assert [v for v, _ in work.spans] == sorted({v for v, _ in work.spans})


def test_known_speeds_drop_fewer_answers_over_unlike_machines() -> None:
    """Long answers on the slow rollouts are too old; equal machines are not treated otherwise."""
    job = replace(WAVY, groups_per_step=12, steps=16, skip=6, quota=0, queue_per_slot=0.5)
    ours = replace(policy_of("ours_bounded"), drafts=False)

    def found(speeds: tuple[float, ...], known: bool) -> SimulationResult:
        policy = replace(ours, by_speed=known)
        return run(policy, TAILED, job, rollouts=6, slots=8, batch_max=8, speeds=speeds)

    known, alike = (found((1.0, 1.0, 0.3, 0.3, 0.1, 0.1), by_speed) for by_speed in (True, False))
    lost = [one.counts.expired + one.counts.dropped for one in (known, alike)]
    assert lost[0] < lost[1] / 2
    assert known.tokens_per_s > alike.tokens_per_s
    assert found((1.0,), True) == found((1.0,), False)


def test_a_rollout_has_its_share_of_the_cache() -> None:
    world = World(replace(SMALL, kv_shares=(1.0, 0.5)), WAVY, policy_of("ours"), workload(TAILED))
    assert [one.replica.capacity for one in world.rollouts.values()] == [10_000, 5_000]


@settings(max_examples=25, deadline=None)
@given(
    name=names,
    seed=st.integers(0, 10_000),
    waits=st.sampled_from([None, TOOLS, replace(TOOLS, holds_kv=False)]),
)
def test_the_cache_is_never_above_its_capacity(
    name: str, seed: int, waits: EnvironmentWaits | None
):
    """One answer needs up to 1 610 tokens, four slots do not fit 2 000."""
    world = World(
        replace(SMALL, slots=4, batch_max=4, kv_capacity=2_000, drafts=DRAFTS), WAVY,
        policy_of(name), workload(TAILED, seed, environment=waits),
    )  # fmt: skip
    simulation = Simulation(world)
    while simulation.advance():
        for rollout in world.rollouts.values():
            replica = rollout.replica
            assert 0 <= replica.kv_now(world.now) <= replica.capacity
            assert replica.kv == cached(replica)
            assert len(replica.running) <= replica.slots


def cached(replica: Replica) -> int:
    """Counts the cached tokens again: of answers that run or are held, and of their prompts."""
    running = replica.running.values()
    held = [w for w in (*replica.parked.values(), *replica.waiting) if w.is_held]
    answers = sum(replica.steps - w.step_offset for w in running) + sum(w.done for w in held)
    shared = replica.cache.shares_prompts
    prompts = {(w.group, w.cached_under) if shared else w.name: w.prompt for w in (*running, *held)}
    return answers + sum(prompts.values())


@settings(max_examples=25, deadline=None)
@given(name=names, seed=st.integers(0, 10_000), lag=st.integers(0, 3), strict=st.booleans())
def test_no_token_is_trained_above_the_lag_bound(name: str, seed: int, lag: int, strict: bool):
    policy = replace(POLICIES[name], strict=strict or POLICIES[name].strict)
    bound = lag if policy.lag is None else policy.lag
    result = run(policy, TAILED, replace(WAVY, max_lag=lag), seed, slots=4, batch_max=4)
    if (policy.strict and policy.bounded) or policy.wave == "all":
        assert result.lag_max() <= bound
    if not policy.strict:
        assert result.counts.dropped == result.counts.masked_tokens == 0


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_equal_seeds_give_equal_runs_and_others_do_not(name: str):
    first, again = (run(name, TAILED, WAVY, 7, failures_per_hour=200.0) for _ in range(2))
    assert first == again
    assert run(name, TAILED, WAVY, 8).steps != first.steps


@pytest.mark.parametrize("seed", range(4))
def test_an_answer_that_would_be_too_late_again_does_not_start_again(seed: int):
    """The longest last longer than η steps: restarting them costs up to an eighth of the
    throughput.
    """
    long = replace(WAVY, steps=30, skip=5)
    with_, without = (
        run(name, TAILED, long, seed, rollouts=3, slots=8, batch_max=8)
        for name in ("ours_bounded", "ours_bounded-migration")
    )
    assert with_.counts.lost_tokens == 0
    assert with_.counts.expired > 0
    assert with_.tokens_per_s >= 0.99 * without.tokens_per_s


def test_a_policy_without_a_mechanism_is_named_and_an_unknown_one_is_refused():
    without = ["laminar-repack", "laminar-relay", "laminar-prefix"]
    assert list(ablation("laminar")) == ["laminar", *without]
    assert not policy_of("ours-repack").repack
    with pytest.raises(ConfigurationError, match="known: synchronous, one_step"):
        policy_of("synchronuos")
    with pytest.raises(ConfigurationError, match="synchronous has no 'repack'"):
        policy_of("synchronous-repack")


def test_the_newest_sequence_goes_back_when_the_cache_is_full_and_ends_later():
    replica = Replica("r", GROWING, slots=2, capacity=100, reserve=4)
    for name in ("old", "new"):
        replica.submit(SimulatedTrajectory(name, 0, 0, 10, 60), 0.0)
    finished: list[str] = []
    while replica.due_s is not None:
        now = replica.due_s
        finished += [work.name for work in replica.finish_jump(now)]
        replica.start_jump(now)
    assert finished == ["old", "new"]
    assert replica.usage.preempted == 1
    assert replica.usage.tokens == 120, "nothing is decoded twice"


def test_a_run_without_progress_ends_with_an_error():
    with pytest.raises(ConfigurationError, match="laminar: no step follows step 0 of 6"):
        run("laminar", TAILED, WAVY, failures_per_hour=3600.0, repair_s=1e9)
