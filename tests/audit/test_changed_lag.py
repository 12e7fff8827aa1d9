"""A run whose `max_lag` was changed at a resume: which bound the audit holds each group to."""

import pytest

from rollstream.consumers.audit.folds import AuditMessage, LedgerIndex
from rollstream.consumers.audit.lags import LagAudit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.streams.records import Configured, Record, StepDone, Take
from rollstream.streams.values import Address, GroupMembers, Version


def violations(records: list[Record]) -> list[str]:
    """Those of a ledger whose first configuration allows a lag of 4, and its second one of 0."""
    ledger = LedgerIndex()
    audit = LagAudit(ledger, AuditPolicy(0, max_lags={"first": 4, "second": 0}))
    for offset, record in enumerate(records):
        message = AuditMessage("ledger", Address(0, offset), record, None, "", False, b"")
        ledger.apply(message)
        audit.apply(message)
    audit.finish({"ledger": "whole", "trajectories": "whole"})
    return [offender.what for offender in audit.result.offenders]


def begun(step: int, group: int) -> Take:
    return Take(step, 0, group, (), (GroupMembers(group, ()),))


def done(step: int, lag: float) -> StepDone:
    metrics = {"tokens_trained": 0.0, "lag_consumed_max": lag}
    return StepDone(step, Version(step, 1), "", 1, metrics, {}, 0.0)


@pytest.mark.parametrize(("lag", "wrong"), [(4.0, []), (5.0, ["step 1 states lag 5 > 4"])])
def test_a_step_that_two_terms_began_may_have_the_lag_of_the_first(lag: float, wrong: list[str]):
    first, second = Configured("first", "", 0), Configured("second", "", 0, accepted=True)
    assert violations([first, begun(1, 0), second, begun(1, 1), done(1, lag)]) == wrong


def test_a_later_step_has_the_bound_of_its_own_term():
    first, second = Configured("first", "", 0), Configured("second", "", 0, accepted=True)
    steps = [begun(1, 0), done(1, 3.0), second, begun(2, 1), done(2, 3.0)]
    assert violations([first, *steps]) == ["step 2 states lag 3 > 0"]
