"""The retention plan as a pure function: invariant 11."""

from contextlib import closing
from pathlib import Path

from hypothesis import given, strategies as st

from rollstream.storage.stores.file import FileStore
from rollstream.storage.weights.pointer import Pointer
from rollstream.storage.weights.retention import (
    PIN_LIVE_S,
    PINNED_MAX,
    PinnedByReaders,
    StoredVersion,
    VersionPins,
    plan_retention,
)
from rollstream.streams.values import Version
from testbed.waiting import wait_for
from tests.support.hand_clock import HandClock


def anchors(*numbers, term=1):
    return [StoredVersion(Version(number, term)) for number in numbers]


def at(number, term=1, owner=None):
    return Pointer("run", owner or term, Version(number, term), "", "", None)


def left(versions, plan):
    return sorted({stored.version for stored in versions} - set(plan.delete))


def numbers(versions):
    return [version.number for version in versions]


def test_the_newest_stay():
    versions = anchors(*range(10))
    plan = plan_retention(versions, at(9), (), 0, 3)
    assert numbers(left(versions, plan)) == [7, 8, 9]
    assert plan.unpinned == ()


def test_pinned_ones_and_multiples_stay_before_other_newer_ones():
    versions = anchors(*range(10))
    plan = plan_retention(versions, at(9), {Version(1, 1)}, 5, 5)
    assert numbers(left(versions, plan)) == [0, 1, 5, 8, 9]


def test_where_the_bound_must_win_the_oldest_pinned_go_first_and_are_reported():
    versions = anchors(*range(10))
    pinned = {Version(number, 1) for number in (2, 4, 6)}
    plan = plan_retention(versions, at(9), pinned, 0, 4)
    assert numbers(left(versions, plan)) == [4, 6, 8, 9]
    assert numbers(plan.unpinned) == [2]


def test_what_a_trainer_needs_to_continue_stays_before_what_rollouts_hold():
    versions = anchors(*range(11))
    pinned = {Version(number, 1) for number in (7, 8, 9, 10)}
    plan = plan_retention(versions, at(10), pinned, 0, 4, to_continue={Version(5, 1)})
    assert numbers(left(versions, plan)) == [5, 8, 9, 10]
    assert numbers(plan.unpinned) == [7]
    both = plan_retention(versions, at(10), pinned, 0, 2, to_continue={Version(5, 1)})
    assert numbers(both.unpinned) == [5, 7, 8]


def test_what_is_being_published_stays_and_what_can_never_be_believed_goes():
    coming, newer, void = Version(11, 3), Version(12, 4), Version(11, 2)
    versions = [
        *anchors(9, 10),
        StoredVersion(coming, whole=False),
        StoredVersion(newer),
        StoredVersion(void),
    ]
    plan = plan_retention(versions, at(10, owner=3), (), 0, 16)
    assert plan.delete == (void,)
    pinned = plan_retention(versions, at(10, owner=3), {void}, 0, 16)
    assert pinned.delete == ()


def test_leftovers_without_a_manifest_go():
    half = StoredVersion(Version(3, 1), whole=False)
    plan = plan_retention([*anchors(4, 5), half], at(5), {half.version}, 0, 16)
    assert plan.delete == (half.version,)
    assert plan.unpinned == ()


def test_a_base_that_something_kept_needs_is_never_removed():
    chain = [
        StoredVersion(Version(0, 1)),
        *(StoredVersion(Version(n, 1), Version(n - 1, 1)) for n in range(1, 6)),
    ]
    plan = plan_retention(chain, at(5), (), 0, 2)
    assert plan.delete == ()
    versions = [*chain, *anchors(6, 7)]
    plan = plan_retention(versions, at(7), {Version(2, 1)}, 0, 5)
    assert numbers(left(versions, plan)) == [0, 1, 2, 6, 7]


@st.composite
def histories(draw):
    """Versions of several terms, some of them deltas on the one before; and a pointer."""
    count = draw(st.integers(1, 14))
    terms = sorted(draw(st.lists(st.integers(1, 3), min_size=count, max_size=count)))
    versions = []
    for number, term in enumerate(terms):
        whole = draw(st.integers(0, 9)) > 0  # without a manifest no base is known
        delta = whole and versions and draw(st.booleans())
        base = versions[-1].version if delta else None
        versions.append(StoredVersion(Version(number, term), base, whole))
    place = draw(st.sampled_from(versions)).version
    owner = draw(st.integers(place.term, 4))
    return versions, Pointer("run", owner, place, "", "", None)


@given(histories(), st.data(), st.integers(0, 4), st.integers(2, 10))
def test_the_plan_keeps_its_promises(history, data, keep_every, versions_max):
    versions, pointer = history
    by_version = {stored.version: stored for stored in versions}
    pinned = data.draw(st.sets(st.sampled_from(list(by_version))))
    plan = plan_retention(versions, pointer, pinned, keep_every, versions_max)
    kept = set(left(versions, plan))
    whole_believed = by_version[pointer.version].whole
    assert pointer.version in kept or not whole_believed
    for version in kept:  # every existing base of a kept one is kept
        base = by_version[version].base
        assert base in kept or base not in by_version or not by_version[base].whole
    forced = {v for v in kept if v.term > pointer.term or v.number >= pointer.version.number}
    chains = {base for version in forced for base in bases(version, by_version)}
    assert len(kept) <= max(versions_max, len(forced | chains))
    readable = {v for v in by_version if all(by_version[b].whole for b in bases(v, by_version))}
    assert set(plan.unpinned) == (pinned - kept) & readable
    assert all(v in readable or v in forced for v in kept - chains)


def bases(version, by_version):
    while version in by_version:
        yield version
        version = by_version[version].base


@given(histories(), st.integers(0, 4), st.integers(2, 10))
def test_the_plan_is_stable_once_carried_out(history, keep_every, versions_max):
    versions, pointer = history
    plan = plan_retention(versions, pointer, (), keep_every, versions_max)
    rest = [stored for stored in versions if stored.version not in plan.delete]
    assert plan_retention(rest, pointer, (), keep_every, versions_max).delete == ()


@given(st.integers(2, 20), st.data())
def test_given_up_pins_are_older_than_kept_ones(count, data):
    versions = anchors(*range(count))
    names = [stored.version for stored in versions]
    pinned = data.draw(st.sets(st.sampled_from(names)))
    plan = plan_retention(versions, at(count - 1), pinned, 0, data.draw(st.integers(2, 6)))
    kept_pins = pinned - set(plan.delete)
    forced = {names[-1], names[-2]}
    assert all(gone < stays for gone in plan.unpinned for stays in kept_pins - forced)


NEVER_S = 3600.0  # no renewal by the thread within a test


def test_what_a_reader_that_is_behind_will_read_stays_until_it_has_read_it(tmp_path: Path):
    store, clock = FileStore(tmp_path), HandClock()
    pinned = PinnedByReaders(store, clock)
    with closing(VersionPins(store, "eval", NEVER_S)) as pins:
        pins.set([Version(2, 1), Version(4, 1)])
        plan = plan_retention(anchors(*range(10)), at(9), pinned(), 0, 5)
        assert numbers(left(anchors(*range(10)), plan)) == [2, 4, 7, 8, 9]
        pins.set([Version(4, 1)])
        assert pinned() == {Version(4, 1)}
    assert pinned() == set()


def test_pins_of_a_killed_reader_end_and_those_of_a_living_one_stay(tmp_path: Path):
    store, clock = FileStore(tmp_path), HandClock()
    pinned = PinnedByReaders(store, clock)
    with closing(VersionPins(store, "killed", NEVER_S)) as killed:
        killed.set(tuple(Version(n, 1) for n in range(9)))
        with closing(VersionPins(store, "living", 0.01)) as living:
            living.set([Version(5, 1)])
            assert len(pinned()) == PINNED_MAX + 1
            before = store.get("pins/living.json")
            wait_for(lambda: store.get("pins/living.json") != before)
            clock.now_s += PIN_LIVE_S
            assert pinned() == {Version(5, 1)}


def test_a_damaged_pin_pins_nothing_and_stops_no_retention(tmp_path: Path):
    store = FileStore(tmp_path)
    store.put("pins/eval.json", b"{")
    assert PinnedByReaders(store, HandClock())() == set()
