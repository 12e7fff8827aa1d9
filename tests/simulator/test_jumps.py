"""The closed forms for many decode steps, and their inverses, agree with sums of single steps."""

import pytest
from hypothesis import given, strategies as st

from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.replica import scaled_roofline, seconds_of_steps, steps_lasting

seconds = st.floats(1e-6, 1.0)
rooflines = st.builds(
    Roofline,
    weights_s=seconds,
    kv_token_s=st.one_of(st.just(0.0), st.floats(1e-9, 1e-4)),
    row_s=st.one_of(st.just(0.0), st.floats(1e-7, 1e-2)),
    overhead_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e-1)),
    overlapping=st.booleans(),
)
batches = st.tuples(st.integers(1, 300), st.integers(1, 8_000)).map(lambda b: (b[0], b[0] * b[1]))


@given(roofline=rooflines, batch=batches, steps=st.integers(0, 3_000))
def test_a_jump_lasts_as_long_as_its_steps(roofline: Roofline, batch: tuple[int, int], steps: int):
    rows, kv = batch
    one_by_one = sum(roofline.step_s(rows, kv + rows * step) for step in range(steps))
    assert seconds_of_steps(roofline, rows, kv, steps) == pytest.approx(one_by_one, rel=1e-9)


@given(roofline=rooflines, batch=batches, steps=st.integers(1, 3_000), part=st.floats(0.001, 1.0))
def test_steps_until_is_the_first_step_that_ends_then_or_later(
    roofline: Roofline, batch: tuple[int, int], steps: int, part: float
):
    rows, kv = batch
    until = part * seconds_of_steps(roofline, rows, kv, steps)
    found = steps_lasting(roofline, rows, kv, until)
    assert seconds_of_steps(roofline, rows, kv, found) >= until
    assert found == 0 or seconds_of_steps(roofline, rows, kv, found - 1) < until


@given(roofline=rooflines, batch=batches, speed=st.floats(0.1, 10.0))
def test_a_faster_rollout_takes_less_by_its_speed(
    roofline: Roofline, batch: tuple[int, int], speed: float
):
    slow = seconds_of_steps(roofline, *batch, 100)
    assert seconds_of_steps(scaled_roofline(roofline, speed), *batch, 100) == pytest.approx(
        slow / speed
    )
