"""Simulates one rollout's engine in virtual time (`Replica`): continuous batching over a KV cache
of fixed size.

A step yields one token of every running row, in the time of the paced engine's `Roofline`; jumps
from event to event are exact up to rounding. When the cache is full, the newest sequences are
queued and prefilled again, as in vLLM.
"""

from bisect import insort
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush

from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.cache import KvCache
from rollstream.simulator.drafting import DraftModel, drafted_roofline
from rollstream.simulator.step_times import seconds_of_steps, steps_lasting
from rollstream.simulator.usage import ReplicaUsage, UsageTotals
from rollstream.simulator.workload import SimulatedTrajectory


def scaled_roofline(roofline: Roofline, speed: float) -> Roofline:
    return replace(
        roofline,
        weights_s=roofline.weights_s / speed,
        kv_token_s=roofline.kv_token_s / speed,
        row_s=roofline.row_s / speed,
        overhead_s=roofline.overhead_s / speed,
        prefill_token_s=roofline.prefill_token_s / speed,
    )


@dataclass(slots=True, eq=False)
class Replica:
    """Decodes in jumps: one lasts until the next answer ends or waits, a wait ends, or the cache is
    full. At `due_s` (None: no work) `Simulation` calls `finish_jump`, handles failures, new weights
    and moves, which happen only between two steps, and calls `start_jump`.

    At most `slots` trajectories run. `capacity` and `reserve` are tokens of the KV cache; a
    trajectory joins others only if `reserve` tokens stay free.
    """

    name: str
    roofline: Roofline
    slots: int
    capacity: int
    reserve: int
    longest_first: bool = False
    cache: KvCache = field(default_factory=KvCache)
    drafts: DraftModel | None = None
    holds_kv: bool = True
    """While it waits for its environment."""
    adapters: bool = False
    """A trajectory runs under its own version to its end."""
    version: int = 0
    running: dict[str, SimulatedTrajectory] = field(default_factory=dict[str, SimulatedTrajectory])
    """In the order of joining."""
    waiting: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
    parked: dict[str, SimulatedTrajectory] = field(default_factory=dict[str, SimulatedTrajectory])
    """Waiting for their environment, without decoding."""
    returns: list[tuple[float, str]] = field(default_factory=list[tuple[float, str]])
    """Heap of (time, trajectory whose wait ends then), also of trajectories that left."""
    ends: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Heap of (step, trajectory that ends or waits then), also of trajectories that left."""
    steps: int = 0
    """Up to the present jump's start."""
    known: int = 0
    """Running trajectories with earlier answers to their prompts."""
    begins_s: float = 0.0
    """Decoding of the present jump starts: after stalls and prefill."""
    jump: int = 0
    jump_roofline: Roofline = field(init=False)
    due_s: float | None = None
    ready_s: float = 0.0
    usage: ReplicaUsage = field(default_factory=ReplicaUsage)

    def __post_init__(self) -> None:
        self.jump_roofline = self.roofline

    @property
    def kv(self) -> int:
        """Returns the tokens at the present jump's start."""
        return self.cache.tokens

    def submit(self, trajectory: SimulatedTrajectory, now_s: float) -> None:
        """It runs from the end of the present step on if it fits. Resumed trajectories come first;
        `longest_first` puts the longest predicted of each kind first.
        """
        # Its environment is not ready yet.
        if trajectory.ready_s > now_s:
            self._park(trajectory)
            self.interrupt(now_s)
            return
        self._queue(trajectory)
        if self._fits(self.waiting[0]):
            self.interrupt(now_s)

    def interrupt(self, now_s: float) -> None:
        if not self.running or self.due_s is None:
            self.due_s, self.jump = max(now_s, self.ready_s), 0
            return
        rows, into_s = len(self.running), now_s - self.begins_s
        steps = steps_lasting(self.jump_roofline, rows, self.kv, into_s)
        if steps < self.jump:
            self.jump = steps
            self.due_s = self.begins_s + seconds_of_steps(self.jump_roofline, rows, self.kv, steps)

    def finish_jump(self, now_s: float) -> list[SimulatedTrajectory]:
        rows, kv = len(self.running), self.kv
        self.steps += self.jump
        self.cache.tokens += rows * self.jump
        tokens = rows * self.jump
        self.usage.add_jump(self.begins_s, now_s, (kv, self.kv), tokens, self.version)
        self.jump = 0
        finished: list[SimulatedTrajectory] = []
        while self.ends and self.ends[0][0] <= self.steps:
            entry = heappop(self.ends)
            if not self._is_current(entry):
                continue
            trajectory = self.running[entry[1]]
            # At the end of a turn a trajectory waits for its environment.
            if trajectory.has_turn():
                self._stop(trajectory)
                trajectory.ready_s = now_s + trajectory.next_wait_s()
                if self.holds_kv:
                    trajectory.is_held = True
                else:
                    self.cache.remove(trajectory)
                self._park(trajectory)
            else:
                finished.append(self.remove(entry[1]))
        return finished

    def start_jump(self, now_s: float) -> None:
        """Makes room if the cache is full, takes in trajectories that fit, and plans the
        next jump.
        """
        if self.is_empty():
            self.due_s = None
            return
        begins_s = max(now_s, self.ready_s)
        if begins_s > now_s and not self.running:
            self.due_s = begins_s
            return
        self._unpark(now_s)
        self._make_room()
        tokens = self._take_in()
        if not self.running:  # everything waits for its environment
            self.due_s = self.returns[0][0]
            return
        prefill_s = self.roofline.prefill_s(tokens)
        self.usage.add_prefill(tokens, prefill_s)
        self.begins_s = begins_s + prefill_s
        self._next_jump()

    def update(self, version: int, now_s: float, stall_s: float, recompute: bool) -> None:
        """Stops the replica for `stall_s`; with `recompute`, prefills all cached sequences again.
        Between two steps.
        """
        for trajectory in self.running.values():
            trajectory.done = self.steps - trajectory.step_offset
            trajectory.close_span(self._served(trajectory))
        self.version = version
        self.ready_s = max(now_s, self.ready_s) + stall_s
        if recompute and self.kv:
            cached = [t for t in (*self.parked.values(), *self.waiting) if t.is_held]
            self.cache.compute_again([*self.running.values(), *cached], version)
            seconds = self.roofline.prefill_s(self.kv)
            self.usage.add_prefill(self.kv, seconds)
            self.ready_s += seconds

    def remove_all(self) -> list[SimulatedTrajectory]:
        """To be called between two steps."""
        removed = [self.remove(name) for name in [*self.running, *self.parked]] + self.waiting
        for trajectory in self.waiting:
            if trajectory.is_held:
                self.cache.remove(trajectory)
        self.waiting = []
        self.ends.clear()
        self.returns.clear()
        return removed

    def remove(self, name: str) -> SimulatedTrajectory:
        """It runs or waits for its environment. Between two steps."""
        if name in self.parked:
            trajectory = self.parked.pop(name)
            if trajectory.is_held:
                self.cache.remove(trajectory)
            return trajectory
        trajectory = self.running[name]
        self._stop(trajectory)
        self.cache.remove(trajectory)
        return trajectory

    def kv_now(self, now_s: float) -> int:
        if not self.jump or now_s <= self.begins_s:
            return self.kv
        return self.kv + len(self.running) * self._made(now_s)

    def steps_now(self, now_s: float) -> int:
        """Returns decode steps until now. A running trajectory has generated this less its
        `step_offset`.
        """
        return self.steps + (self._made(now_s) if self.jump and now_s > self.begins_s else 0)

    def totals(self, now_s: float) -> UsageTotals:
        """Returns the totals with the elapsed part of the present jump."""
        usage, kv = self.usage, self.kv_now(now_s)
        begins_s = min(max(self.begins_s, usage.until_s), now_s) if self.jump else now_s
        kv_s = self.kv * (begins_s - usage.until_s) + (self.kv + kv) / 2 * (now_s - begins_s)
        return UsageTotals(
            usage.busy_s + now_s - begins_s,
            usage.kv_s + kv_s,
            usage.held_s + (now_s - usage.until_s if self.kv else 0.0),
            usage.tokens + kv - self.kv,
            usage.prefilled_tokens,
        )

    def is_empty(self) -> bool:
        return not self.running and not self.waiting and not self.parked

    def _made(self, now_s: float) -> int:
        into_s, rows = now_s - self.begins_s, len(self.running)
        return min(self.jump, steps_lasting(self.jump_roofline, rows, self.kv, into_s))

    def _served(self, trajectory: SimulatedTrajectory) -> int:
        return trajectory.version if self.adapters and trajectory.version >= 0 else self.version

    # ---- the batch and its waits

    def _queue(self, trajectory: SimulatedTrajectory) -> None:
        if self.longest_first:
            insort(self.waiting, trajectory, key=_urgency)
        elif trajectory.done:
            self.waiting.insert(0, trajectory)
        else:
            self.waiting.append(trajectory)

    def _stop(self, trajectory: SimulatedTrajectory) -> None:
        del self.running[trajectory.name]
        self.known -= trajectory.is_known
        trajectory.done = self.steps - trajectory.step_offset
        trajectory.close_span(self._served(trajectory))

    def _park(self, trajectory: SimulatedTrajectory) -> None:
        self.parked[trajectory.name] = trajectory
        heappush(self.returns, (trajectory.ready_s, trajectory.name))

    def _unpark(self, now_s: float) -> None:
        while self.returns:
            at_s, name = self.returns[0]
            trajectory = self.parked.get(name)
            is_current = trajectory is not None and trajectory.ready_s == at_s
            if is_current and at_s > now_s:
                return
            heappop(self.returns)
            if trajectory is not None and is_current:
                self._queue(self.parked.pop(name))

    def _take_in(self) -> int:
        tokens = 0
        while self.waiting:
            trajectory = self.waiting[0]
            if not self._fits(trajectory):
                is_full = len(self.running) >= self.slots
                # A sequence takes the room of those that wait for their environment, and in an
                # empty batch also that of queued ones.
                if is_full or not (self._drop_parked() or (not self.running and self._drop_held())):
                    break
                continue
            del self.waiting[0]
            trajectory.step_offset = self.steps - trajectory.done
            trajectory.version = self.version if trajectory.version < 0 else trajectory.version
            self.running[trajectory.name] = trajectory
            self.known += trajectory.is_known
            heappush(self.ends, (trajectory.step_offset + trajectory.stops_at(), trajectory.name))
            tokens += self.cache.add(trajectory, self._served(trajectory))
        return tokens

    # ---- the cache

    def _fits(self, trajectory: SimulatedTrajectory) -> bool:
        rows = len(self.running)
        free = self.capacity - self.reserve - self.kv - rows - 1  # minus the next step's tokens
        is_alone = not rows and not self.kv
        missing = self.cache.missing(trajectory, self._served(trajectory))
        return rows < self.slots and (is_alone or missing <= free)

    def _make_room(self) -> None:
        if self.kv + len(self.running) <= self.capacity:
            return
        while self.kv + len(self.running) > self.capacity - self.reserve:
            # Sequences that wait for their environment lose their cached tokens first.
            if self._drop_held():
                continue
            if len(self.running) <= 1:
                break
            self.waiting.insert(0, self.remove(next(reversed(self.running))))
            self.usage.preempted += 1

    def _drop_parked(self) -> bool:
        for trajectory in self.parked.values():
            if trajectory.is_held:
                self.cache.remove(trajectory)
                return True
        return False

    def _drop_held(self) -> bool:
        for trajectory in (*self.waiting, *reversed(self.parked.values())):
            if trajectory.is_held:
                self.cache.remove(trajectory)
                return True
        return False

    def _next_jump(self) -> None:
        while not self._is_current(self.ends[0]):
            heappop(self.ends)
        rows = len(self.running)
        fitting = (self.capacity - self.kv) // rows
        assert fitting > 0, "a step was left room, and one sequence alone always fits"
        self.jump_roofline = self.roofline
        if self.drafts is not None and self.known:
            self.jump_roofline = drafted_roofline(
                self.roofline, rows, self.kv, self.known / rows, self.drafts
            )
        self.jump = min(self.ends[0][0] - self.steps, fitting)
        if self.returns:
            until_s = self.returns[0][0] - self.begins_s
            waited = steps_lasting(self.jump_roofline, rows, self.kv, until_s)
            self.jump = min(self.jump, max(1, waited))
        lasts_s = seconds_of_steps(self.jump_roofline, rows, self.kv, self.jump)
        self.due_s = self.begins_s + lasts_s

    def _is_current(self, entry: tuple[int, str]) -> bool:
        trajectory = self.running.get(entry[1])
        return trajectory is not None and trajectory.step_offset + trajectory.stops_at() == entry[0]


def _urgency(trajectory: SimulatedTrajectory) -> tuple[bool, float]:
    return not trajectory.done, -trajectory.predicted
