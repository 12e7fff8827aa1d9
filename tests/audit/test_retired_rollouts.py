"""`applied` records of rollouts whose names dispatch deleted, beside living and foreign ones."""

from rollstream.consumers.audit.folds import AuditMessage, LedgerIndex
from rollstream.consumers.audit.versions import KnownRollouts, VersionAudit
from rollstream.storage.terms import ROLLOUTS, RoleTerms, next_term
from rollstream.streams.records import Applied, Record, WeightsAnnounced
from rollstream.streams.values import Address, Version
from testbed.memory import MemoryStore

VERSION = Version(1, 1)


def judged(store: MemoryStore, *records: Record) -> VersionAudit:
    """The version was announced with the manifest `h`."""
    audit = VersionAudit(LedgerIndex(), KnownRollouts(store))
    announced = WeightsAnnounced("run", VERSION, "manifest", "h", "anchor", None, 1, 0.0)
    for offset, record in enumerate((announced, *records)):
        topic = "applied" if isinstance(record, Applied) else "weights"
        audit.apply(AuditMessage(topic, Address(0, offset), record, None, "", False, b""))
    return audit


def applied(rollout: str, term: int, manifest: str = "h") -> Applied:
    return Applied(rollout, term, VERSION, manifest, "hashes", 1, 0.0, 0.0)


def test_another_hash_of_a_retired_rollout_is_noted_and_of_a_known_one_a_violation():
    store = MemoryStore()
    dead = next_term(store, ROLLOUTS, "dead")
    RoleTerms(store, lambda: 0.0).retire(ROLLOUTS, {"dead": dead})
    living = next_term(store, ROLLOUTS, "living")
    records = [applied("dead", dead), applied("dead", dead, "x"), applied("living", living)]
    result = judged(store, *records).result
    assert result.state == "kept"
    assert (result.counts["applied"], result.counts["applied by retired rollouts"]) == (1, 2)
    (note,) = result.notes
    assert f"dead, which the store no longer knows, served {VERSION} with manifest x" in note
    assert judged(store, applied("living", living, "x")).result.state == "violated"


def test_a_name_that_no_store_can_have_known_is_foreign():
    store = MemoryStore()
    term = next_term(store, ROLLOUTS, "living")
    assert judged(store, applied("other", term, "x")).result.counts["foreign applied"] == 1
    RoleTerms(store, lambda: 0.0).retire(ROLLOUTS, {})
    result = judged(store, applied("other", 1 << 40, "x"), applied("other", 0, "x")).result
    assert result.counts["foreign applied"] == 2
    assert not result.notes
