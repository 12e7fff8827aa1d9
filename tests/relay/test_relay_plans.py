"""The planners of the chain and of the cache, for all inputs (invariants 8 and 9)."""

import pytest
from hypothesis import given, strategies as st

from rollstream.storage.relay.topology import (
    CachedVersion,
    ChainMember,
    head_of,
    living_chain,
    unexpired_suspects,
    upstream_of,
    versions_to_keep,
)
from rollstream.streams.values import Version

TIMEOUT_S = 5.0
NOW_S = 100.0

MEMBERS = st.lists(
    st.builds(
        ChainMember,
        name=st.sampled_from("abcdefgh"),
        term=st.integers(1, 40),
        url=st.sampled_from(["http://x:1", ""]),
        heartbeat_s=st.sampled_from([NOW_S, NOW_S - TIMEOUT_S, NOW_S - TIMEOUT_S - 1]),
        site=st.sampled_from(["", "a", "b"]),
    ),
    max_size=16,
    unique_by=lambda member: member.term,  # one counter assigns them
)
VIEWS = st.lists(st.tuples(MEMBERS, st.sets(st.integers(1, 40))), min_size=1, max_size=6)


def member(name: str, term: int, heard_s: float = NOW_S, site: str = "") -> ChainMember:
    return ChainMember(name, term, f"http://{name}:1", heard_s, site)


def chained(*members: ChainMember, suspected: tuple[int, ...] = ()) -> list[str]:
    return [m.name for m in living_chain(members, NOW_S, TIMEOUT_S, suspected)]


def test_relays_stand_in_the_order_of_their_starts() -> None:
    assert chained(member("c", 3), member("a", 7), member("b", 5)) == ["c", "b", "a"]


def test_a_dead_neighbour_is_spliced_out_and_a_dead_head_replaced_by_the_next() -> None:
    a, b, c = member("a", 1), member("b", 2), member("c", 3)
    assert upstream_of(3, living_chain([a, b, c], NOW_S, TIMEOUT_S)) == b
    assert upstream_of(3, living_chain([a, b, c], NOW_S, TIMEOUT_S, {2})) == a
    assert upstream_of(2, living_chain([a, b, c], NOW_S, TIMEOUT_S, {1})) is None
    silent = member("a", 1, NOW_S - TIMEOUT_S - 0.1)
    assert chained(silent, b, c) == ["b", "c"]


def test_a_restarted_relay_and_a_late_one_stand_at_the_end() -> None:
    assert chained(member("a", 1), member("b", 2), member("a", 9)) == ["b", "a"]
    assert chained(member("a", 1), member("b", 2), member("late", 10)) == ["a", "b", "late"]


@given(MEMBERS, st.sets(st.integers(1, 40)))
def test_the_chain_holds_the_living_once_each_in_order(
    members: list[ChainMember], suspected: set[int]
) -> None:
    ordered = living_chain(members, NOW_S, TIMEOUT_S, suspected)
    assert [m.term for m in ordered] == sorted({m.term for m in ordered})
    assert len({m.name for m in ordered}) == len(ordered)
    for one in ordered:
        assert one.url
        assert one.term not in suspected
        assert one.heartbeat_s >= NOW_S - TIMEOUT_S
        assert one.term == max(m.term for m in members if m.name == one.name)


def test_each_site_has_a_chain_and_one_relay_of_it_reads_over_the_link() -> None:
    sites = {"a": "near", "b": "far", "c": "near", "d": "far", "e": "far"}
    ordered = [member(name, n, site=site) for n, (name, site) in enumerate(sites.items(), 1)]
    upstream = {m.name: upstream_of(m.term, ordered, m.site) for m in ordered}
    assert {name: found and found.name for name, found in upstream.items()} == {
        "a": None, "b": "a", "c": "a", "d": "b", "e": "d",
    }  # fmt: skip
    crossings = [name for name, one in upstream.items() if one and one.site != sites[name]]
    assert crossings == ["b"]


@pytest.mark.parametrize(("site", "head"), [("near", "b"), ("far", "a"), ("third", "a"), ("", "a")])
def test_a_trainer_pushes_to_the_first_relay_of_its_site(site: str, head: str) -> None:
    found = head_of([member("a", 1, site="far"), member("b", 2, site="near")], site)
    assert found is not None
    assert found.name == head


def test_without_a_relay_nothing_is_pushed() -> None:
    assert head_of([], "near") is None


@given(VIEWS, st.lists(st.integers(0, 5), min_size=1, max_size=60), st.sampled_from(["", "a", "b"]))
def test_no_cycle_of_waiting_whatever_each_relay_sees(
    views: list, turns: list[int], site: str
) -> None:
    """Each relay reads by a view of its own; following upstreams, each time by another view, ends
    at the bucket.
    """
    at, steps = 41, 0
    while steps < 200:
        members, suspected = views[turns[steps % len(turns)] % len(views)]
        upstream = upstream_of(at, living_chain(members, NOW_S, TIMEOUT_S, suspected), site)
        if upstream is None:
            break
        assert upstream.term < at
        at, steps, site = upstream.term, steps + 1, upstream.site
    assert steps <= 40


@given(st.dictionaries(st.integers(1, 9), st.floats(0, 100)), st.floats(0, 50))
def test_suspects_are_forgiven_in_time(suspects: dict[int, float], forgive_s: float) -> None:
    assert unexpired_suspects(suspects, NOW_S + 51, forgive_s).keys() <= suspects.keys()
    assert unexpired_suspects(suspects, NOW_S + 151, forgive_s) == {}


# ---- the cache -----------------------------------------------------------------------------------


@st.composite
def holdings(draw: st.DrawFn) -> list[CachedVersion]:
    numbers = sorted(draw(st.sets(st.integers(1, 12), max_size=8)))
    held: list[CachedVersion] = []
    for at, number in enumerate(numbers):
        has_base = at > 0 and draw(st.booleans())
        base = held[-1].version if has_base else None
        held.append(CachedVersion(Version(number, 1), draw(st.integers(0, 50)), base))
    return held


@given(holdings(), st.integers(1, 4), st.integers(1, 150))
def test_what_is_kept_is_within_both_bounds(
    held: list[CachedVersion], versions_max: int, bytes_max: int
) -> None:
    kept = versions_to_keep(held, versions_max, bytes_max)
    known = {holding.version: holding for holding in held}
    assert sum(known[version].bytes for version in kept) <= bytes_max
    newest = sorted(known, reverse=True)[:versions_max]
    needed = {known[v].base for v in kept}
    assert all(version in newest or version in needed for version in kept)
    if held and known[max(known)].bytes <= bytes_max:
        assert max(known) in kept


def test_bases_of_kept_deltas_stay_while_they_fit() -> None:
    one, two, three = (Version(number, 1) for number in (1, 2, 3))
    held = [CachedVersion(one, 80), CachedVersion(two, 5, one), CachedVersion(three, 5, two)]
    assert versions_to_keep(held, 1, 100) == {one, two, three}
    assert versions_to_keep(held, 1, 60) == {two, three}
    assert versions_to_keep(held, 1, 9) == {three}
    assert versions_to_keep([CachedVersion(one, 80), CachedVersion(three, 5)], 1, 100) == {three}
