"""The gate against simulated machines, under a clock that only they move: it gains where drafts
pay, and loses less than a fiftieth where they do not, under changing load beside it.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from rollstream.producers.drafts.gate import DraftGate
from rollstream.producers.drafts.planner import StepCost

MEASURED_EACH = 4  # plain steps, of which the torch engine measures one
Load = Callable[[float], tuple[float, float]]
"""The factors by which a plain step and a pass take longer at a moment."""


def quiet(_: float) -> tuple[float, float]:
    return 1.0, 1.0


@dataclass
class Machine:
    """A pass verifies `draft` tokens per row and gains the `right` accepted ones and one more."""

    plain: StepCost
    passes: StepCost
    draft: int
    right: float
    rows: int = 8
    load: Load = quiet
    noise: float = 0.0
    now_s: float = 0.0
    tokens: float = 0.0
    changes: int = 0
    off_s: float = 0.0
    """The time at which drafting was last turned off."""
    draws: random.Random = field(default_factory=lambda: random.Random(5))

    def run(self, gate: DraftGate, seconds: float) -> float:
        """Tokens per second."""
        began, tokens, due, measured = self.now_s, self.tokens, 0, 0
        while self.now_s - began < seconds:
            if due <= 0:
                was = gate.on
                gate.decide(self.rows, self.now_s)
                due = gate.steps_to_decision
                self.changes += was != gate.on
                self.off_s = self.now_s if was and not gate.on else self.off_s
            due -= 1
            if gate.on:
                self._pass(gate)
            else:
                measured += 1
                self._plain(gate, measured % MEASURED_EACH == 0 or gate.probing)
        return (self.tokens - tokens) / (self.now_s - began)

    def best(self, drafts: bool) -> float:
        """Tokens per second at no load."""
        if not drafts:
            return self.rows / self.plain.seconds(self.rows)
        return self.rows * (1 + self.right) / self.passes.seconds(self.rows * (1 + self.draft))

    def _plain(self, gate: DraftGate, is_measured: bool) -> None:
        took = self._took(self.plain.seconds(self.rows), self.load(self.now_s)[0])
        self.tokens += self.rows
        if is_measured:
            gate.add_plain_steps(self.rows, took)
            gate.hit_rate.add(1, True)
            gate.acceptance_rate.add(self.draft, round(self.right))

    def _pass(self, gate: DraftGate) -> None:
        size = self.rows * (1 + self.draft)
        took = self._took(self.passes.seconds(size), self.load(self.now_s)[1])
        gained = self.rows + sum(self._right() for _ in range(self.rows))
        self.tokens += gained
        gate.hit_rate.add(1, True)
        gate.acceptance_rate.add(self.draft, round(self.right))
        gate.add_pass(self.rows, size, gained, took)

    def _right(self) -> int:
        """Accepted tokens of one row's draft: all or none, or the average."""
        if not self.noise:
            return round(self.right)
        return self.draft if self.draws.random() < self.right / self.draft else 0

    def _took(self, seconds: float, load: float) -> float:
        if self.noise:
            load *= self.draws.lognormvariate(0.0, self.noise)
            load *= 10.0 if self.draws.random() < 0.01 else 1.0
        took = seconds * load
        self.now_s += took
        return took


def pays(**more: object) -> Machine:
    """Twice as fast with drafts."""
    return Machine(StepCost(3e-3, 1e-4), StepCost(3e-3, 1e-4), 4, 3, **more)  # type: ignore[arg-type]


def loses(**more: object) -> Machine:
    """Three quarters as fast."""
    return Machine(StepCost(1e-3, 3e-4), StepCost(2e-3, 3e-4), 4, 3, 32, **more)  # type: ignore[arg-type]


def test_on_a_quiet_machine_drafts_are_on_where_they_pay() -> None:
    machine = pays()
    assert machine.run(DraftGate(), 60.0) > 0.97 * machine.best(True) > 1.5 * machine.best(False)


def test_where_drafts_lose_less_than_a_fiftieth_is_lost_by_trying() -> None:
    machine = loses()
    assert machine.best(True) < 0.85 * machine.best(False)
    assert machine.run(DraftGate(), 20.0) > 0.98 * machine.best(False)
    assert machine.run(DraftGate(), 60.0) > 0.98 * machine.best(False)


@pytest.mark.parametrize("make", [pays, loses])
@pytest.mark.parametrize("seed", range(3))
def test_noise_and_interruptions_turn_nothing_round(
    make: Callable[..., Machine], seed: int
) -> None:
    machine = make(noise=0.2, draws=random.Random(seed))
    steady = make(noise=0.2, draws=random.Random(seed))
    reference = steady.run(DraftGate(forced=make is pays), 60.0)
    assert machine.run(DraftGate(), 60.0) > 0.96 * reference
    assert machine.changes < 130  # two for each probe


def test_a_neighbour_that_slows_both_alike_changes_nothing() -> None:
    for make in pays, loses:
        machine = make(load=lambda at: (1.8, 1.8) if 20 < at < 40 else (1.0, 1.0))
        steady = make(load=machine.load)
        reference = steady.run(DraftGate(forced=make is pays), 60.0)
        assert machine.run(DraftGate(), 60.0) > 0.97 * reference


@pytest.mark.parametrize("make", [pays, loses])
@pytest.mark.parametrize("period_s", [0.7, 4.0, 30.0])
def test_neighbours_that_come_and_go_turn_nothing_round(
    make: Callable[..., Machine], period_s: float
) -> None:
    """A cost of plain steps that was measured beside a neighbour makes slow passes look fast once
    the neighbour is gone: drafts stayed on for a minute.
    """

    def load(at: float) -> tuple[float, float]:
        return (1.8, 1.8) if at % period_s < period_s / 2 else (1.0, 1.0)

    machine, steady = make(load=load), make(load=load)
    reference = steady.run(DraftGate(forced=make is pays), 60.0)
    assert machine.run(DraftGate(), 60.0) > 0.97 * reference


def test_a_sudden_load_that_makes_drafts_lose_turns_them_off_within_a_second() -> None:
    """A neighbour takes the caches, for example, so that passes suffer more: a stale cost of plain
    steps would keep drafts on, or turn them off where everything is slower.
    """
    machine = pays(load=lambda at: (1.3, 4.0) if at > 30 else (1.0, 1.0))
    gate = DraftGate()
    machine.run(gate, 30.0)
    assert gate.on
    machine.run(gate, 1.0)
    assert not gate.on
    assert 30.0 < machine.off_s < 31.0
    before = machine.now_s
    loaded = machine.run(gate, 60.0)
    assert loaded > 0.97 * machine.best(False) / 1.3
    assert machine.now_s > before


def test_drafts_come_back_when_the_load_is_gone() -> None:
    machine = pays(load=lambda at: (1.3, 4.0) if 10 < at < 30 else (1.0, 1.0))
    gate = DraftGate()
    machine.run(gate, 30.0)
    machine.run(gate, 20.0)
    assert gate.on
    assert machine.run(gate, 20.0) > 0.97 * machine.best(True)


def test_drafts_that_went_off_at_the_end_of_a_batch_are_on_early_in_the_next() -> None:
    """The time to the next probe, up to 8 s after some that confirmed, keeps no drafts off."""
    machine, gate = pays(), DraftGate()
    machine.run(gate, 30.0)
    machine.rows, machine.right = 1, 0
    machine.run(gate, 3.0)
    assert not gate.on
    machine.rows, machine.right = 8, 3
    machine.run(gate, 0.5)
    assert gate.on
    assert machine.run(gate, 2.0) > 0.95 * machine.best(True)


def test_plain_steps_are_probed_seldom_and_cheaply_while_drafts_pay() -> None:
    machine, gate = pays(), DraftGate()
    machine.run(gate, 5.0)
    machine.changes = 0
    machine.run(gate, 60.0)
    assert 2 < machine.changes < 80  # two for each probe


def test_plain_steps_that_became_faster_are_found_by_a_probe() -> None:
    """No running measurement shows it: only a probe can."""
    machine = pays(load=lambda at: (0.3, 1.0) if at > 10 else (1.0, 1.0))
    gate = DraftGate()
    machine.run(gate, 10.0)
    assert gate.on
    machine.run(gate, 10.0)
    assert not gate.on


def test_the_switch_stays_off_without_history_rows_or_measured_steps() -> None:
    gate = DraftGate()
    assert not gate.decide(1, 0.0)
    for _ in range(50):
        gate.hit_rate.add(1, True)
        gate.acceptance_rate.add(8, 8)
    assert not gate.decide(1, 0.0)
    for _ in range(5):
        gate.add_plain_steps(1, 1e-3)
    assert not gate.decide(0, 0.0)
    assert gate.decide(1, 0.0)
    for _ in range(1000):
        gate.acceptance_rate.add(8, 0)
    assert not gate.decide(1, 0.1)


def test_an_interrupted_first_pass_does_not_end_the_trial() -> None:
    machine = pays(load=lambda at: (1.0, 30.0) if 0.2 < at < 0.3 else (1.0, 1.0))
    gate = DraftGate()
    machine.run(gate, 5.0)
    assert machine.run(gate, 20.0) > 0.97 * machine.best(True)
