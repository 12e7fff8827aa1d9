"""Invariant 5: no token is trained above `max_lag`; what the trainer masked is counted again.

A token's lag is the version that its step trains from (step - 1) minus its span's. The ledger does
not name masked tokens, so each step is held to its sums: tokens trained and masked must be what
trajectories, versions and `max_lag` give. Tokens of a version that never was believed are masked
too (invariant 6). Grows with the run: three numbers per step.
"""

from collections import Counter
from dataclasses import dataclass, field

from consumers.audit.seen import Coverage, Seen, begins_whole
from consumers.audit.taken import Taken
from consumers.audit.tally import Tally
from streams.records import Address, StepDone, Trajectory


@dataclass(frozen=True, slots=True)
class Policy:
    """What the run was configured with; `known` is False where no configuration is left."""

    max_lag: int | None = None
    keep_version: bool = False
    known: bool = True


@dataclass(slots=True)
class Lag:
    """The ledger comes before `trajectories`."""

    taken: Taken
    policy: Policy
    tally: Tally = field(default_factory=lambda: Tally(5, "no token is trained above max_lag"))
    _sums: Counter[tuple[int, str]] = field(default_factory=Counter[tuple[int, str]])
    _done: list[tuple[StepDone, Address]] = field(default_factory=list[tuple[StepDone, Address]])

    def apply(self, seen: Seen) -> None:
        if seen.void:
            return
        record = seen.record
        if isinstance(record, StepDone) and seen.topic == "ledger":
            self._done.append((record, seen.address))
        elif isinstance(record, Trajectory) and seen.topic == "trajectories":
            use = self.taken.uses.get(record.trajectory)
            if use is not None and use.step and use.at == seen.address:
                self._weigh(record, use.step, seen)

    def finish(self, coverage: Coverage) -> None:
        if not self.policy.known:
            self.tally.cannot("dispatch.max_lag is not known without the run's config.json")
            return
        bound = self.policy.max_lag
        if bound is None:
            self.tally.notes.append("max_lag = null: ready_groups_max bounds it")
        gone, ledger_whole = 0, begins_whole(coverage["ledger"])
        for done, at in self._done:
            whole = self.taken.is_whole(done.step, ledger_whole=ledger_whole)
            if whole and self._sums[done.step, "trajectories"] == self.taken.trained[done.step]:
                self._compare(done, at)
            else:
                gone += 1
        if gone:
            self.tally.cannot(f"{gone} steps whose takes or completions are gone")
        for topic in ("trajectories", "ledger"):
            if coverage[topic] == "absent":
                self.tally.cannot(f"{topic} is not there")

    def _weigh(self, record: Trajectory, step: int, seen: Seen) -> None:
        trained = masked = 0
        for span in record.spans:
            lag, tokens = step - 1 - span.version.number, span.end - span.start
            if lag < 0:
                what = f"step {step} trained {record.trajectory} before {span.version} was there"
                self.tally.offend(what, seen.topic, seen.address)
            bound = self.policy.max_lag
            is_above = bound is not None and lag > bound
            if is_above or not self.taken.is_believed(span.version):
                masked += tokens
            else:
                trained += tokens
                self.tally.counts["is the highest lag"] = max(
                    self.tally.counts["is the highest lag"], lag
                )
        self._sums[step, "trajectories"] += 1
        self._sums[step, "trained"] += trained
        self._sums[step, "masked"] += masked
        if self.policy.known and (not trained or (masked and self.policy.keep_version)):
            oldest = min((span.version.number for span in record.spans), default=0)
            what = f"step {step} trained {record.trajectory} at lag {step - 1 - oldest}"
            self.tally.offend(f"{what}, max_lag is {self.policy.max_lag}", seen.topic, seen.address)

    def _compare(self, done: StepDone, at: Address) -> None:
        found = {name: self._sums[done.step, name] for name in ("trained", "masked")}
        self.tally.counts["tokens trained"] += found["trained"]
        self.tally.counts["masked"] += found["masked"]
        said = {
            "trained": done.metrics.get("tokens_trained"),
            "masked": float(done.counts.get("masked_tokens", 0)),
        }
        for name, number in said.items():
            if number is None:
                self.tally.cannot(f"step {done.step} does not say how many tokens it trained")
            elif number != found[name]:
                what = f"step {done.step} says {number:g} tokens {name}, it should be {found[name]}"
                self.tally.offend(what, "ledger", at)
        lag, bound = done.metrics.get("lag_consumed_max", 0.0), self.policy.max_lag
        if bound is not None and lag > bound:
            self.tally.offend(f"step {done.step} says that it trained at lag {lag:g}", "ledger", at)
