"""Groups with redundancy: which completions the audit lets a take name, and which it explains."""

import pytest

from rollstream.consumers.audit.folds import (
    AuditMessage,
    InvariantResult,
    LedgerIndex,
    NamedCompletion,
)
from rollstream.consumers.audit.groups import Admission, GroupAudit
from rollstream.consumers.audit.surplus import SurplusAudit
from rollstream.consumers.audit.trainer_reads import TrainerReads
from rollstream.streams.values import Address
from testbed.violations.healthy_run import completion

NAMES = ("0.0", "0.1", "0.2", "0.3")


def audited(finishes: str, named: list[int], needed: int = 2) -> SurplusAudit:
    """Completions 0, 1, … of the group in this order: `d` is dead; a take names some of them."""
    ledger = LedgerIndex(uses={f"0.{i}": NamedCompletion(0, Address(0, i), "") for i in named})
    groups = GroupAudit(ledger)
    groups.admitted[0] = Admission(NAMES, 0, 60.0, Address(0, 0), 0, needed)
    reads = TrainerReads(groups.admitted, begun={0: 0})
    audit = SurplusAudit(groups, ledger, reads, InvariantResult(2, ""))
    for index, finish in enumerate(finishes):
        record = completion(0, index, 0, finish="dead" if finish == "d" else "stop")
        audit.apply(AuditMessage("trajectories", Address(0, index), record, None, "", False, b""))
    return audit


@pytest.mark.parametrize(
    ("finishes", "named", "violations"),
    [
        ("ll", [0, 1], 0),
        ("lllx", [0, 1], 0),  # the third is surplus
        ("lll", [0, 1, 2], 1),
        ("ldl", [0, 1, 2], 0),  # a dead one is none of the needed
        ("ldll", [0, 1, 2, 3], 1),
    ],
)
def test_a_take_names_no_completion_after_the_last_needed_one(
    finishes: str, named: list[int], violations: int
) -> None:
    assert audited(finishes, named).result.violations == violations


def test_only_what_came_after_the_last_needed_one_is_explained() -> None:
    audit = audited("lll", [0, 2])
    assert not audit.is_surplus(0, Address(0, 1))  # the take left out one that came in time
    assert audit.is_surplus(0, Address(0, 3))
    assert not audited("l", [0]).is_surplus(0, Address(0, 3))


def test_without_redundancy_nothing_is_explained() -> None:
    audit = audited("llll", [0, 1, 2, 3], needed=0)
    assert (audit.result.violations, audit.is_surplus(0, Address(0, 9))) == (0, False)
