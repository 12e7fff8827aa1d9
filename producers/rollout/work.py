"""The trajectories that a rollout has in progress, from the assignment to the record that ends
each.

Keeps the rollout's half of invariants 2 and 4: one attempt of a trajectory at a time; a failure is
published as a completion; under `keep_version` nothing is resumed under another version.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from producers.engines.base import Emission, Engine
from producers.rollout.chain import ChainRequest, Gained, read_chains
from producers.rollout.growing import Growing
from producers.rollout.judging import Continued, Judging
from producers.rollout.voice import Voice
from streams.admissible import TrainingBounds, refusal
from streams.errors import DecodeError, EngineRefused
from streams.records import Assignment, Trajectory

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Work:
    """The trajectories of one rollout under one term. `done` are finished and not yet published."""

    engine: Engine
    judging: Judging
    voice: Voice
    keep_version: bool
    clock: Callable[[], float] = time.time
    bounds: TrainingBounds = TrainingBounds()  # noqa: RUF009  frozen, and bounds nothing
    growing: dict[str, Growing] = field(default_factory=dict[str, Growing])
    done: list[Trajectory] = field(default_factory=list[Trajectory])
    chains: dict[tuple[str, int], Gained | DecodeError] = field(
        default_factory=dict[tuple[str, int], Gained | DecodeError]
    )
    """By trajectory and attempt: the chain that was read for an assignment that starts soon."""
    broken: int = 0
    """Chains that could not be resumed."""

    def read_ahead(self, orders: Iterable[Assignment]) -> None:
        """Read the chains of all these assignments in one pass, for `start`. Chains read earlier
        are kept.
        """
        due = [order for order in orders if order.partial is not None]
        keys = {_key(order) for order in due}
        self.chains = {key: found for key, found in self.chains.items() if key in keys}
        missing = [order for order in due if _key(order) not in self.chains]
        if missing:
            found = read_chains(self.voice.bus, [_wanted(order) for order in missing])
            self.chains |= {_key(order): found[order.trajectory] for order in missing}

    def start(self, order: Assignment) -> None:
        """Submit the trajectory to the engine, resuming from its partials if any. A broken chain
        restarts from the prompt, which costs the generated tokens. A trajectory that cannot be
        generated is published as dead.
        """
        self.drop(order.trajectory)  # of an earlier attempt, replaced by this one
        growing = Growing.begin(order, self._gained(order), self.clock())
        exact = self.keep_version and order.kind == "resume"
        if exact and order.version != self.engine.version:
            # The engine swapped since dispatch planned, or could not load the version. A resume
            # never continues under another version.
            log.info("%s is given back: version %s is not held", order.trajectory, order.version)
            self.voice.give_up([growing])
            return
        if growing.partial is not None and not self._is_taken(growing):
            growing = Growing.begin(order, None, self.clock())
        if growing.partial is None:
            try:
                self.engine.submit(growing.request(hold=self.judging.dialogue))
            except EngineRefused as error:
                log.warning("%s cannot be generated: %s", order.trajectory, error)
                self.done.append(self.judging.died(growing, f"engine: {error}"))
                return
        self.growing[order.trajectory] = growing

    def _gained(self, order: Assignment) -> Gained | None:
        """The content of the assignment's chain; None for a start, and if the chain is broken."""
        if order.partial is None:
            return None
        if _key(order) not in self.chains:
            self.read_ahead([order])
        found = self.chains.pop(_key(order))
        if isinstance(found, DecodeError):
            self.broken += 1
            log.warning("%s starts again from its prompt: %s", order.trajectory, found)
            return None
        return found

    def _is_taken(self, growing: Growing) -> bool:
        """Whether the engine accepts the trajectory with the content of its chain."""
        try:
            self.engine.submit(growing.request(hold=self.judging.dialogue))
        except EngineRefused as error:
            self.broken += 1
            log.warning("%s starts again from its prompt: %s", growing.order.trajectory, error)
            return False
        return True

    def drop(self, trajectory: str) -> None:
        """Remove the trajectory and free its slot; nothing of it is published."""
        self.judging.forget(trajectory)
        if self.growing.pop(trajectory, None) is not None:
            self.engine.abort(trajectory)

    def forget_all(self) -> None:
        """Drop all trajectories in progress."""
        for trajectory in list(self.growing):
            self.drop(trajectory)
        self.judging.forget_all()

    def give_up(self, released: Assignment) -> None:
        """Hand the trajectory over to another rollout. A trajectory whose turn is being judged ends
        or continues here first, because its completion may be on its way. A release of an older
        attempt changes nothing.
        """
        growing = self.growing.get(released.trajectory)
        if growing is None or growing.order.attempt != released.attempt:
            return
        growing.leaving = True
        if not self.judging.has(released.trajectory):
            self._leave(growing)

    def give_up_all(self, waiting: Iterable[Assignment]) -> None:
        """Hand over all trajectories that are not being judged, and all waiting assignments.
        Afterwards only trajectories that wait for their environment hold slots.
        """
        for growing in list(self.growing.values()):
            growing.leaving = True
            if not self.judging.has(growing.order.trajectory):
                self._leave(growing)
        # Resumes need no final partial: their chain is already in the log.
        fresh = [order for order in waiting if order.partial is None]
        self.voice.give_up([Growing.begin(order, None, self.clock()) for order in fresh])

    def grow(self, emission: Emission) -> None:
        """Append the emission's tokens; if it finishes the turn, hand the trajectory to
        `judging`.
        """
        growing = self.growing[emission.trajectory]
        growing.extend(emission)
        if emission.finish is not None:
            if not (self.judging.dialogue and emission.finish == "stop"):
                del self.growing[emission.trajectory]
            self.judging.ended(growing, emission.finish)

    def collect_judged(self) -> None:
        """Move finished trajectories to `done`; trajectories with a reply continue in the slot that
        they kept.
        """
        for decided in self.judging.poll():
            if isinstance(decided, Continued):
                self._continue(decided)
                continue
            if self.growing.pop(decided.trajectory, None) is not None:
                self.engine.abort(decided.trajectory)  # its slot was held for the environment
            if decided.finish == "dead":
                log.warning("%s died: %s", decided.trajectory, decided.reason)
            self.done.append(decided)

    def publish(self) -> None:
        """Publish finished trajectories, and partials that are due."""
        done, self.done = self.done, []
        self.voice.trajectories([self._admissible(record) for record in done])
        unfinished = [g for t, g in self.growing.items() if not self.judging.has(t)]
        self.voice.partials(unfinished)
        self.voice.give_up(())

    def _admissible(self, record: Trajectory) -> Trajectory:
        """Turn a record that the trainer would refuse into a dead one with the reason (invariant
        12).
        """
        refused = None if record.finish == "dead" else refusal(record, self.bounds)
        if refused is None:
            return record
        log.warning("%s died: %s", record.trajectory, refused)
        return replace(record, finish="dead", reason=str(refused), reward=None, scores=None)

    def _leave(self, growing: Growing) -> None:
        """Free its slot and publish its last partial, unless it ends with this abort."""
        emission = self.engine.abort(growing.order.trajectory)
        if emission is not None and emission.finish is not None:
            self.grow(emission)
            return
        if emission is not None:
            growing.extend(emission)
        del self.growing[growing.order.trajectory]
        self.voice.give_up([growing])

    def _continue(self, decided: Continued) -> None:
        if (growing := self.growing[decided.trajectory]).leaving:
            self._leave(growing)
            return
        try:
            self.engine.append(decided.trajectory, decided.tokens)
        except EngineRefused as error:  # the environment's error ends one sample
            growing = self.growing.pop(decided.trajectory)
            self.engine.abort(decided.trajectory)
            self.done.append(self.judging.died(growing, f"environment: {error}"))


def _key(order: Assignment) -> tuple[str, int]:
    return order.trajectory, order.attempt


def _wanted(order: Assignment) -> ChainRequest:
    assert order.partial is not None, "only a resume has a chain"
    most = order.sampling.tokens_max
    return ChainRequest(order.trajectory, order.partial, order.first, len(order.tokens), most)
