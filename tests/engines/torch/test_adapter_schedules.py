"""Random schedules: no row reads a prefix of another version, no adapter in use is unloaded."""

import random

from testbed.adapter_schedules import STRENGTHS, AdapterSchedules, tolerance


def test_no_prefix_is_stale_and_no_adapter_in_use_is_unloaded() -> None:
    schedules, drawn = AdapterSchedules(), random.Random(1)
    for _ in range(150):
        schedules.run(drawn)
    assert schedules.counts.rows > 1000
    assert (schedules.counts.stale, schedules.counts.unloaded) == (0, 0)


def test_a_prefix_cache_without_versions_would_be_seen(monkeypatch) -> None:
    from rollstream.producers.engines.torch import prefill

    def unkeyed(sequence):
        return None, sequence.prefix.tobytes()

    monkeypatch.setattr(prefill, "_key", unkeyed)
    schedules, drawn = AdapterSchedules(), random.Random(1)
    for _ in range(20):
        schedules.run(drawn)
    assert schedules.counts.stale > 0


def test_the_next_version_is_seen_however_many_came_before() -> None:
    """The values of each token differ between any two strengths by more than is tolerated."""
    added = AdapterSchedules().added.abs().max(dim=1).values
    assert float(added.min()) > 5 * tolerance(STRENGTHS)


def test_a_stale_prefix_is_seen_after_many_thousand_versions(monkeypatch) -> None:
    from rollstream.producers.engines.torch import prefill

    monkeypatch.setattr(prefill, "_key", lambda one: (None, one.prefix.tobytes()))
    schedules, drawn = AdapterSchedules(), random.Random(1)
    schedules.newest = 50_000
    for _ in range(20):
        schedules.run(drawn)
    assert schedules.counts.stale > 0
