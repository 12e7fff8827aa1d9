"""Restarts back off and are bounded."""

from hypothesis import given, strategies as st

from rollstream.run.supervisor.process import RestartPolicy

POLICY = RestartPolicy(deaths_max=3, within_s=60, first_s=0.5, longest_s=1.5)


def test_the_delay_doubles_up_to_its_bound_and_then_restarts_end():
    deaths = [0.0, 1.0, 2.0, 3.0]
    delays = [POLICY.delay_s(deaths[:count], 3.0) for count in (1, 2, 3, 4)]
    assert delays == [0.5, 1.0, 1.5, None]


def test_old_deaths_do_not_count():
    assert POLICY.delay_s([0.0, 1.0, 2.0, 100.0], 100.0) == 0.5


@given(st.lists(st.floats(0, 1000), max_size=30), st.floats(1000, 2000))
def test_a_role_restarts_exactly_while_its_recent_deaths_are_within_the_bound(deaths, now):
    recent = [death for death in deaths if now - death < POLICY.within_s]
    delay = POLICY.delay_s(deaths, now)
    assert (delay is None) == (len(recent) > POLICY.deaths_max)
    assert delay is None or POLICY.first_s <= delay <= POLICY.longest_s
