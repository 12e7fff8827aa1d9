"""The simulator's short cuts give the same results as the service's longer computations."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

import rollstream.consumers.dispatch.lengths as service
import rollstream.simulator.dispatch as simulated
from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.dispatch import LengthForecast
from rollstream.simulator.replica import Replica
from rollstream.simulator.workload import SimulatedTrajectory
from rollstream.streams.records import Prompt
from rollstream.streams.values import Sampling
from tests.simulator.small import TAILED, workload

PROMPTS = 64  # of the small workload
FEW = 5
notes = st.lists(st.tuples(st.integers(0, 3 * PROMPTS), st.integers(1, 1_600)), max_size=60)


def prompt(number: int) -> Prompt:
    key = number % PROMPTS
    return Prompt(key, "simulated", np.array([key], np.uint32), 2, Sampling(), 0)


@given(notes=notes)
def test_what_is_expected_is_what_the_service_expects_of_the_same_answers(
    notes: list[tuple[int, int]],
):
    """The previous pass is known once a prompt is asked for; with too many prompts, the one asked
    longest ago is evicted.
    """
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(service, "PROMPTS_MAX", FEW)
        patched.setattr(simulated, "PROMPTS_MAX", FEW)
        known, work = service.LengthHistory(), workload(TAILED)
        foresight = LengthForecast(work)
        for number, tokens in notes:
            if known.of_prompt(prompt(number)) is None:
                for earlier in work.history(number % PROMPTS):
                    known.note(prompt(number), earlier)
            assert foresight.length_of(number) == known.of_prompt(prompt(number))
            foresight.add(number, tokens)
            known.note(prompt(number), tokens)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4), part=st.floats(0, 1))
def test_tokens_in_the_midst_of_a_jump_are_those_of_its_single_steps(
    lengths: list[int], part: float
):
    roofline = Roofline(weights_s=0.004, kv_token_s=1e-6, row_s=2e-4)
    replica = Replica("r", roofline, slots=4, capacity=10_000, reserve=0)
    for index, length in enumerate(lengths):
        replica.submit(SimulatedTrajectory(f"0.{index}", 0, 0, 10, length), 0.0)
    replica.finish_jump(0.0)
    replica.start_jump(0.0)
    assert replica.due_s is not None
    now_s, rows, kv, passed_s, steps = part * replica.due_s, len(lengths), replica.kv, 0.0, 0
    while passed_s < now_s * (1 - 1e-12):
        passed_s += roofline.step_s(rows, kv + rows * steps)
        steps += 1
    assert replica.steps_now(now_s) == min(steps, min(lengths))
