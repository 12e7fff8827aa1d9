"""When a version must be an anchor, so that retention need not choose between needed chains."""

from hypothesis import given, strategies as st

from rollstream.storage.weights.anchors import AnchorChain, AnchorRule, anchor_due, is_kept_beside
from rollstream.storage.weights.pointer import Pointer
from rollstream.storage.weights.retention import StoredVersion, plan_retention
from rollstream.streams.values import Version

RULE = AnchorRule(every=25, versions_max=100, keep_every=0)


def test_the_first_and_every_kth_version_are_anchors():
    assert anchor_due(0, None, RULE)
    assert not anchor_due(7, AnchorChain(24, 1, 1000), RULE)
    assert anchor_due(8, AnchorChain(25, 1, 1000), RULE)


def test_a_chain_ends_where_its_deltas_pass_a_third_of_a_full_version():
    assert not anchor_due(5, AnchorChain(3, 333, 1000), RULE)
    assert anchor_due(5, AnchorChain(3, 334, 1000), RULE)


def test_multiples_of_keep_every_are_anchors_where_chains_between_them_would_fill_the_store():
    crowded = AnchorRule(every=25, versions_max=16, keep_every=10)
    assert anchor_due(20, AnchorChain(2, 1, 1000), crowded)
    assert not anchor_due(21, AnchorChain(2, 1, 1000), crowded)
    roomy = AnchorRule(every=25, versions_max=80, keep_every=10)
    assert not anchor_due(20, AnchorChain(2, 1, 1000), roomy)


def test_an_anchor_holds_a_small_delta_beside_it():
    assert is_kept_beside(50, 100)
    assert not is_kept_beside(51, 100)


@given(
    st.integers(1, 40), st.integers(2, 20), st.lists(st.integers(0, 40), min_size=1, max_size=80)
)
def test_a_version_held_by_a_rollout_of_the_chain_before_always_stays(every, versions_max, sizes):
    rule = AnchorRule(every, versions_max, keep_every=0)
    chain, stored = None, []
    for number, size in enumerate(sizes):
        due = anchor_due(number, chain, rule)
        base = None if due or not stored else stored[-1].version
        stored.append(StoredVersion(Version(number, 1), base))
        chain = (
            AnchorChain(1, 0, 100)
            if due
            else AnchorChain(chain.length + 1, chain.delta_bytes + size, 100)  # pyright: ignore[reportOptionalMemberAccess]
        )
        assert chain.length <= max(1, versions_max // 2)
        pointer = Pointer("run", 1, Version(number, 1), "", "", None)
        held = {stored[-2].version} if number else set()
        plan = plan_retention(stored, pointer, held, 0, versions_max)
        assert not plan.unpinned
        stored = [one for one in stored if one.version not in plan.delete]
        assert len(stored) <= versions_max
        assert all(one.base is None or one.base in {s.version for s in stored} for one in stored)
