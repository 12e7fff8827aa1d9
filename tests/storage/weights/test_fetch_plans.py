"""Fetch plans as pure functions (invariant 9): the cheapest path, from no more manifests than it
needs.
"""

from hypothesis import given, strategies as st

from rollstream.storage.weights.fetch_plan import FetchPlanner, HeldTensors
from rollstream.storage.weights.manifest import (
    Delta,
    DeltaEntry,
    Manifest,
    TensorEntry,
    TensorFiles,
)
from rollstream.streams.values import Version

FULL = 100  # bytes of each tensor, as U8
NAMES = ("a", "b")


def version(number):
    return Version(number, 1)


def manifest(number, hashes, codings, anchor):
    """A version whose delta has, by tensor, (coding, bytes, base)."""
    entries = {
        name: TensorEntry("model" if anchor else "", 0, FULL, "U8", (FULL,), hashes[name])
        for name in NAMES
    }
    steps = {
        name: DeltaEntry(base, coding, "", 1, "d", 0, size, "")
        for name, (coding, size, base) in (codings or {}).items()
    }
    delta = Delta("", (), steps) if codings else None
    kind = "anchor" if anchor else "delta"
    parent = version(number - 1) if number else None
    files = TensorFiles((), entries, {})
    return Manifest("run", version(number), parent, version(0), kind, 0.0, files, (), delta)


@st.composite
def chains(draw):
    """Versions 0 … n, version 0 an anchor without a delta, newest first."""
    hashes = {name: f"{name}0" for name in NAMES}
    chain = [manifest(0, hashes, None, anchor=True)]
    for number in range(1, draw(st.integers(1, 8))):
        codings, new = {}, {}
        for name in NAMES:
            coding = draw(st.sampled_from(["same", "sparse", "sparse", "dense"]))
            sizes = {
                "same": st.just(0),
                "sparse": st.integers(1, 60),
                "dense": st.integers(50, FULL),
            }
            codings[name] = coding, draw(sizes[coding]), hashes[name]
            new[name] = hashes[name] if coding == "same" else f"{name}{number}"
        hashes = new
        is_anchor = draw(st.integers(0, 3)) == 0
        with_delta = not is_anchor or draw(st.booleans())
        chain.append(manifest(number, hashes, codings if with_delta else None, is_anchor))
    return chain[::-1]


def cheapest(chain, name, held):
    """The cheapest path by trying every version as its start, as far back as the reader looks."""
    found, cost = [], 0.0
    for one in chain:
        if held.hashes.get(name) == one.weights.tensors[name].hash:
            found.append(cost)
        if one.kind == "anchor":
            found.append(cost + FULL)
        if one.delta is None:
            break
        step = one.delta.tensors[name]
        cost += step.bytes
        if step.coding == "dense":
            found.append(cost)
        if found and (name not in held.hashes or one.version.number <= held.number):
            break
    return min(found)


def plan_fetch(chain, names, held, broken=()):
    planning = FetchPlanner(names, held, broken)
    for one in chain:
        if planning.is_complete:
            break
        planning.examine(one)
    return planning.paths()


def held_of(chain, draw):
    """The versions that a reader holds, some tensors of them half-written."""
    if draw(st.booleans()):
        return HeldTensors()
    base = draw(st.sampled_from(chain))
    hashes = {name: entry.hash for name, entry in base.weights.tensors.items()}
    torn = dict.fromkeys(draw(st.sets(st.sampled_from(NAMES))), "torn")
    return HeldTensors({**hashes, **torn}, base.version.number)


@given(chains(), st.data())
def test_every_way_is_the_cheapest_there_is_and_leads_to_the_tensor(chain, data):
    held = held_of(chain, data.draw)
    ways = plan_fetch(chain, NAMES, held)
    for name, way in ways.items():
        assert way.bytes == cheapest(chain, name, held)  # pyright: ignore[reportOptionalMemberAccess]
        numbers = [step.version.number for step in way.steps]  # pyright: ignore[reportOptionalMemberAccess]
        assert numbers == sorted(set(numbers))
        assert not any(step.is_whole for step in way.steps[1:])  # pyright: ignore[reportOptionalMemberAccess]
        assert leads(way, held.hashes.get(name)) == chain[0].weights.tensors[name].hash


def leads(way, held):
    """The hash of the tensor after the path's steps, each of which must fit the tensor before
    it.
    """
    now = held
    for step in way.steps:
        assert step.is_whole or step.delta.base == now
        now = step.entry.hash
    return now


@given(chains(), st.data())
def test_no_more_manifests_are_looked_at_than_can_matter(chain, data):
    held = held_of(chain, data.draw)
    planning = FetchPlanner(NAMES, held)
    looked = 0
    for one in chain:
        if planning.is_complete:
            break
        planning.examine(one)
        looked += 1
    costs = {name: path.bytes for name, path in planning.paths().items()}  # pyright: ignore[reportOptionalMemberAccess]
    assert costs == {name: cheapest(chain, name, held) for name in NAMES}
    if not held.hashes:  # no further back than to the first whole version
        assert all(one.kind == "delta" for one in chain[: looked - 1])


@given(chains(), st.data())
def test_a_reader_behind_reads_less_than_a_full_version_whenever_it_can(chain, data):
    base = data.draw(st.sampled_from(chain))
    hashes = {name: entry.hash for name, entry in base.weights.tensors.items()}
    between = [one for one in chain if one.version > base.version]
    ways = plan_fetch(chain, NAMES, HeldTensors(hashes, base.version.number))
    total = sum(way.bytes for way in ways.values())  # pyright: ignore[reportOptionalMemberAccess]
    if all(one.delta for one in between):
        deltas = sum(entry.bytes for one in between for entry in one.delta.tensors.values())
        assert total <= deltas
    assert total <= len(NAMES) * FULL + sum(
        one.delta.tensors[name].bytes for one in between if one.delta for name in NAMES
    )


@given(chains(), st.data())
def test_what_was_found_broken_is_not_on_any_way(chain, data):
    ways = plan_fetch(chain, NAMES, HeldTensors())
    broken = {way.steps[-1].key for way in ways.values() if data.draw(st.booleans())}  # pyright: ignore[reportOptionalMemberAccess]
    for way in plan_fetch(chain, NAMES, HeldTensors(), broken).values():
        assert way is None or not broken.intersection(step.key for step in way.steps)
