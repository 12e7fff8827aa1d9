"""The relays that a process takes for alive: by its own clock, from a topic read to its end."""

from rollstream.storage.relay.topology import RelayDirectory
from rollstream.streams.records import RelayStatus
from rollstream.streams.topics import catalogue
from rollstream.streams.writer import publish_all
from testbed.memory import MemoryBus
from tests.support.hand_clock import HandClock

TIMEOUT_S = 5.0


def beat(bus: MemoryBus, *names: str, time_s: float = 0.0) -> None:
    records = [
        RelayStatus(name, int(name[1:]), "node", f"http://{name}:1", (), "", time_s)
        for name in names
    ]
    publish_all(bus, "status", [(f"{record.relay}/1", record) for record in records])


def made() -> tuple[MemoryBus, HandClock, RelayDirectory]:
    bus, clock = MemoryBus(), HandClock()
    bus.create(catalogue(1))
    return bus, clock, RelayDirectory(bus, TIMEOUT_S, clock)


def test_a_relay_whose_clock_is_wrong_is_in_the_chain():
    """No decision compares the clocks of two machines (invariant 11)."""
    bus, clock, directory = made()
    beat(bus, "r1", time_s=0.0)
    directory.poll()
    assert [member.name for member in directory.members()] == ["r1"]
    clock.now_s += TIMEOUT_S + 1
    directory.poll()
    assert directory.members() == [], "it was dead before, or is now"


def test_relays_stay_for_the_time_out_after_a_silence_of_the_log():
    """The site's network was cut: its relays serve each other, and their heartbeats are late."""
    bus, clock, directory = made()
    beat(bus, "r1", "r2")
    directory.poll()
    clock.now_s += 60.0
    beat(bus, "r2")
    directory.poll(log_was_silent=True)
    assert [member.name for member in directory.members()] == ["r1", "r2"]
    clock.now_s += TIMEOUT_S + 1
    beat(bus, "r2")
    directory.poll()
    assert [member.name for member in directory.members()] == ["r2"], "r1 did not come back"


def test_after_a_stall_all_that_were_sent_meanwhile_are_alive():
    """One read returns 512."""
    bus, clock, directory = made()
    names = [f"r{number}" for number in range(1, 701)]
    for _ in range(2):
        beat(bus, *names)
        clock.now_s += 2 * TIMEOUT_S
        if directory.members():
            assert len(directory.members()) == 700, "it has not listened since its last poll"
        directory.poll()
        assert len(directory.members()) == 700
