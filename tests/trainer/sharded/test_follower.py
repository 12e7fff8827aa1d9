"""What a rank other than 0 reads in the ledger: the takes of the term that it follows, behind the
steps to repeat, past a zombie's; and its refusals.
"""

import pytest

from rollstream.consumers.settings import TrainerSettings
from rollstream.consumers.trainer.build import InitialModel, TrainerPlan
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.consumers.trainer.learn.paced import PacedModel
from rollstream.consumers.trainer.ledger import Ledger
from rollstream.consumers.trainer.sharded.follower import FollowedLedger, check_start
from rollstream.consumers.trainer.sharded.ranks import TermStart
from rollstream.errors import ConfigurationError, Fenced
from rollstream.storage.settings import CheckpointSettings, WeightsSettings
from rollstream.streams.records import Configured, Position, StepDone, Superseded, Take
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, GroupMembers, Member, Version
from testbed.memory import MemoryBus

CONFIGURED = Configured("configuration", "revision", 0)


@pytest.fixture
def bus():
    bus = MemoryBus()
    bus.create(catalogue())
    return bus


def take(step: int, number: int) -> Take:
    """A take of a group of its own."""
    member = Member(f"{step}.{number}", Address(0, number), "hash")
    groups = (GroupMembers(100 * step + number, (member,)),)
    return Take(step=step, update=0, micro_batch=number, members=(member,), groups=groups)


def done(step: int, term: int) -> StepDone:
    return StepDone(
        step=step, version=Version(step, term), state_hash="h", takes=1, metrics={}, counts={},
        time_s=0.0,
    )  # fmt: skip


def started(bus: MemoryBus, term: int) -> Ledger:
    ledger = Ledger(bus, term)
    ledger.open(Position())
    return ledger


def followed(bus: MemoryBus, term: int, ended: bool = False) -> FollowedLedger:
    return FollowedLedger(bus, term, lambda: ended)


def numbers(takes: list[Take]) -> list[int]:
    return [one.micro_batch for one in takes]


def test_takes_of_the_term_are_new_and_those_of_earlier_terms_are_repeated(bus):
    first = started(bus, 1)
    first.append([CONFIGURED, take(1, 0), done(1, 1), take(2, 0), take(2, 1)])
    second = started(bus, 2)
    second.append([CONFIGURED, take(2, 2)])
    ledger = followed(bus, 2)
    recorded = ledger.open(Position())
    assert {place: numbers(takes) for place, takes in recorded.takes.items()} == {
        (1, 0): [0], (2, 0): [0, 1],
    }  # fmt: skip
    assert recorded.done.keys() == {1}
    second.append([take(2, 3)])
    ledger.read(0.0)
    assert {place: numbers(takes) for place, takes in ledger.takes.items()} == {(2, 0): [2, 3]}


def test_a_take_that_a_replaced_trainer_appends_late_is_not_trained(bus):
    zombie = started(bus, 1)
    zombie.append([CONFIGURED, take(1, 0)])
    started(bus, 2).append([CONFIGURED])
    ledger = followed(bus, 2)
    ledger.open(Position())
    zombie.append([take(1, 1)])
    ledger.read(0.0)
    assert not ledger.takes


def test_a_follower_ends_when_a_higher_term_begins(bus):
    started(bus, 1).append([CONFIGURED])
    ledger = followed(bus, 1)
    ledger.open(Position())
    started(bus, 2)
    with pytest.raises(Fenced, match="term 1 was replaced by that of 2"):
        ledger.read(0.0)


def test_takes_that_this_term_superseded_train_no_sample(bus):
    """Rank 0 gives them up between its `Opened` and its `Configured`."""
    started(bus, 1).append([CONFIGURED, take(1, 0), take(1, 1)])
    second = started(bus, 2)
    second.append([Superseded(1, 0, (0,), (100,), "fails"), CONFIGURED])
    recorded = followed(bus, 2).open(Position())
    assert [bool(one.members) for one in recorded.takes[1, 0]] == [False, True]
    assert [bool(one.groups) for one in recorded.takes[1, 0]] == [False, True]


def test_a_follower_skips_what_was_truncated_behind_it(bus):
    first = started(bus, 1)
    first.append([CONFIGURED])
    ledger = followed(bus, 1)
    ledger.open(Position())
    first.append([done(1, 1), done(2, 1)])
    bus.truncate("ledger", {0: first.position().offset})
    ledger.read(0.0)
    first.append([take(3, 0)])
    ledger.read(0.0)
    assert numbers(ledger.takes[3, 0]) == [0]


def test_the_end_of_the_trainer_is_seen_once_the_ledger_is_read(bus):
    first = started(bus, 1)
    first.append([CONFIGURED, take(1, 0)])
    ledger = followed(bus, 1, ended=True)
    ledger.open(Position())
    assert not ledger.ended.is_set()
    ledger.read(0.01)
    assert ledger.ended.is_set()
    assert numbers(ledger.takes[1, 0]) == [0]


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"model": "other"}, "the model that this machine starts"), ({"lr": 1.0}, "the settings")],
)
def test_a_rank_with_another_model_or_other_settings_is_refused(changed, what):
    def plan(lr: float) -> TrainerPlan:
        settings = TrainerSettings(lr=lr)
        rule = training_rule(settings, None, False)
        return TrainerPlan(settings, rule, WeightsSettings(), CheckpointSettings())

    model = PacedModel(seed=0, weights_bytes=2, changed_share=1.0, step_s=0.0, token_s=0.0)
    initial = InitialModel(model, {"config.json": b"{}"}, None, "mine")
    start = TermStart(1, "mine", plan(1e-3).hash_with(initial.model_files), ())
    check_start(start, plan(1e-3), initial, 1)
    start = TermStart(1, changed.get("model", "mine"), start.settings, ())
    with pytest.raises(ConfigurationError, match=f"rank 1: {what}"):
        check_start(start, plan(changed.get("lr", 1e-3)), initial, 1)
