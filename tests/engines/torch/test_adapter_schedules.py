"""Random schedules: no row reads a prefix of another version, no adapter in use is unloaded."""

import random

from testbed.adapter_schedules import AdapterSchedules


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
