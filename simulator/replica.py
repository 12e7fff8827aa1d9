"""Simulates one rollout's engine in virtual time: continuous batching over a KV cache of fixed size
(`Replica`), and the time integrals of its work and cache use (`ReplicaUsage`).

A step takes the time of `Roofline`, the paced engine's model of a device. Times are exact up to
rounding, although the replica jumps from event to event. The cache never holds more than its
capacity: the newest sequences return to the queue and are prefilled again later, as in vLLM.
"""

from bisect import insort
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from math import ceil, sqrt

from rollstream.producers.engines.roofline import Roofline
from rollstream.simulator.workload import SimulatedTrajectory

BARS_MAX = 2_000  # the timeline draws at most this many bars of one rollout


@dataclass(slots=True)
class ReplicaUsage:
    """Sums a replica's work since the start. `busy_s` is decoding and prefill, `kv_s` the integral
    of cached tokens; `bars` are times of decoding under one version.
    """

    until_s: float = 0.0
    busy_s: float = 0.0
    kv_s: float = 0.0
    tokens: int = 0
    prefilled_tokens: int = 0
    preempted: int = 0
    bars: list[tuple[float, float, int]] = field(default_factory=list[tuple[float, float, int]])

    def add_jump(
        self, begins_s: float, now_s: float, kv: tuple[int, int], tokens: int, version: int
    ) -> None:
        """Add a finished jump. The cache held `kv[0]` tokens before it and holds `kv[1]`
        after it.
        """
        if not tokens:
            self.kv_s += kv[0] * (now_s - self.until_s)
        else:
            lasted_s = now_s - begins_s
            self.kv_s += kv[0] * (begins_s - self.until_s) + sum(kv) / 2 * lasted_s
            self.busy_s += lasted_s
            self.tokens += tokens
            self._draw(begins_s, now_s, version)
        self.until_s = now_s

    def add_prefill(self, tokens: int, seconds: float) -> None:
        self.prefilled_tokens += tokens
        self.busy_s += seconds

    def _draw(self, begins_s: float, ends_s: float, version: int) -> None:
        if self.bars and self.bars[-1][2] == version and begins_s - self.bars[-1][1] < 1.0:
            self.bars[-1] = (self.bars[-1][0], ends_s, version)
        elif len(self.bars) < BARS_MAX:
            self.bars.append((begins_s, ends_s, version))


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """Holds the totals of one or several rollouts at one time."""

    busy_s: float = 0.0
    kv_s: float = 0.0
    tokens: int = 0
    prefilled_tokens: int = 0

    def __add__(self, other: "UsageTotals") -> "UsageTotals":
        return UsageTotals(
            self.busy_s + other.busy_s,
            self.kv_s + other.kv_s,
            self.tokens + other.tokens,
            self.prefilled_tokens + other.prefilled_tokens,
        )


def seconds_of_steps(roofline: Roofline, rows: int, kv_tokens: float, steps: int) -> float:
    """Returns the seconds that the next `steps` steps of the same rows take: up to rounding, the
    last value of `Roofline.ends_s`. While no trajectory joins or leaves, the batch is constant and
    the cache grows by one token per row and step, so step times sum in closed form.
    """
    free = min(steps, _compute_bound_steps(roofline, rows, kv_tokens))
    reading = steps - free
    row_s, step = rows * roofline.row_s, rows * roofline.kv_token_s
    first = roofline.weights_s + (kv_tokens + rows * free) * roofline.kv_token_s
    both = 0.0 if roofline.overlapping else row_s * steps
    read = reading * first + step * reading * (reading - 1) / 2
    return steps * roofline.overhead_s + both + free * row_s + read


def steps_lasting(roofline: Roofline, rows: int, kv_tokens: float, seconds: float) -> int:
    """Returns the smallest number of steps that takes at least `seconds`."""
    if seconds <= 0:
        return 0
    steps = _estimated_steps(roofline, rows, kv_tokens, seconds)
    while steps > 0 and seconds_of_steps(roofline, rows, kv_tokens, steps - 1) >= seconds:
        steps -= 1
    while seconds_of_steps(roofline, rows, kv_tokens, steps) < seconds:
        steps += 1
    return steps


def scaled_roofline(roofline: Roofline, speed: float) -> Roofline:
    """Returns the roofline of a rollout that is `speed` times as fast."""
    return replace(
        roofline,
        weights_s=roofline.weights_s / speed,
        kv_token_s=roofline.kv_token_s / speed,
        row_s=roofline.row_s / speed,
        overhead_s=roofline.overhead_s / speed,
        prefill_token_s=roofline.prefill_token_s / speed,
    )


def _compute_bound_steps(roofline: Roofline, rows: int, kv_tokens: float) -> int:
    """Returns how many of the next steps are bound by arithmetic, before the cache read takes
    longer.
    """
    over = rows * roofline.row_s - roofline.weights_s - kv_tokens * roofline.kv_token_s
    step = rows * roofline.kv_token_s
    if not roofline.overlapping or over <= 0:
        return 0
    return ceil(over / step) if step > 0 and over / step < 1e15 else 1 << 50


def _estimated_steps(roofline: Roofline, rows: int, kv_tokens: float, seconds: float) -> int:
    """Returns the number of steps, correct up to rounding: linear while compute-bound, then the
    positive root of a quadratic.
    """
    free = _compute_bound_steps(roofline, rows, kv_tokens)
    row_s = rows * roofline.row_s
    computing_s = row_s + roofline.overhead_s
    if free and seconds <= free * computing_s:
        return ceil(seconds / computing_s)
    rest = seconds - free * computing_s
    step = rows * roofline.kv_token_s
    first = roofline.weights_s + (kv_tokens + rows * free) * roofline.kv_token_s
    linear = first + roofline.overhead_s + (0.0 if roofline.overlapping else row_s) - step / 2
    if step * rest < 1e-12 * linear * linear:
        return free + ceil(rest / linear)
    return free + ceil(2 * rest / (linear + sqrt(linear * linear + 2 * step * rest)))


@dataclass(slots=True, eq=False)
class Replica:
    """Decodes in jumps of several steps: a jump lasts until the next answer ends or the cache is
    full. At `due_s` (None: the replica has nothing to do) `Simulation` calls `finish_jump`, handles
    what happens only between two steps (a failure, new weights, moves), and calls `start_jump`.
    `interrupt` ends the jump earlier, with the current step.

    At most `slots` trajectories run. `capacity`, `reserve` and `kv` are tokens of the KV cache. A
    trajectory joins others only if `reserve` tokens stay free.
    """

    name: str
    roofline: Roofline
    slots: int
    capacity: int
    reserve: int
    longest_first: bool = False
    version: int = 0
    running: dict[str, SimulatedTrajectory] = field(default_factory=dict[str, SimulatedTrajectory])
    """Running trajectories in the order in which they joined the batch."""
    waiting: list[SimulatedTrajectory] = field(default_factory=list[SimulatedTrajectory])
    ends: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Heap of (step, trajectory that finishes then). Entries of trajectories that left
    are skipped.
    """
    steps: int = 0
    """Decode steps up to the present jump's start."""
    kv: int = 0
    """Tokens in the cache at the present jump's start."""
    begins_s: float = 0.0
    """Time at which decoding of the present jump starts: after stalls and prefill."""
    jump: int = 0
    """Steps of the present jump."""
    due_s: float | None = None
    ready_s: float = 0.0
    """The replica stands still until then."""
    usage: ReplicaUsage = field(default_factory=ReplicaUsage)

    def submit(self, trajectory: SimulatedTrajectory, now_s: float) -> None:
        """Queue the trajectory. It runs from the end of the present step on if it fits. Resumed
        trajectories come before new ones; `longest_first` puts the longest predicted of each kind
        first.
        """
        if self.longest_first:
            insort(self.waiting, trajectory, key=_urgency)
        elif trajectory.done:
            self.waiting.insert(0, trajectory)
        else:
            self.waiting.append(trajectory)
        if self._fits(self.waiting[0]):
            self.interrupt(now_s)

    def interrupt(self, now_s: float) -> None:
        """End the present jump with the current step."""
        if not self.running or self.due_s is None:
            self.due_s, self.jump = max(now_s, self.ready_s), 0
            return
        rows, into_s = len(self.running), now_s - self.begins_s
        steps = steps_lasting(self.roofline, rows, self.kv, into_s)
        if steps < self.jump:
            self.jump = steps
            self.due_s = self.begins_s + seconds_of_steps(self.roofline, rows, self.kv, steps)

    def finish_jump(self, now_s: float) -> list[SimulatedTrajectory]:
        """Complete the jump; returns the trajectories that it finished."""
        rows, kv = len(self.running), self.kv
        self.steps += self.jump
        self.kv += rows * self.jump
        tokens = rows * self.jump
        self.usage.add_jump(self.begins_s, now_s, (kv, self.kv), tokens, self.version)
        self.jump = 0
        finished: list[SimulatedTrajectory] = []
        while self.ends and self.ends[0][0] <= self.steps:
            entry = heappop(self.ends)
            if self._is_current(entry):
                finished.append(self.remove(entry[1]))
        return finished

    def start_jump(self, now_s: float) -> None:
        """Make room if the cache is full, take in what fits, and plan the next jump."""
        if self.is_empty():
            self.due_s = None
            return
        begins_s = max(now_s, self.ready_s)
        if begins_s > now_s and not self.running:
            self.due_s = begins_s
            return
        self._make_room()
        tokens = self._take_in()
        prefill_s = self.roofline.prefill_s(tokens)
        self.usage.add_prefill(tokens, prefill_s)
        self.begins_s = begins_s + prefill_s
        self._next_jump()

    def update(self, version: int, now_s: float, stall_s: float, recompute: bool) -> None:
        """Take new weights, which stops the replica for `stall_s`; with `recompute`, prefill all
        running sequences again. Call it between two steps.
        """
        for trajectory in self.running.values():
            trajectory.done = self.steps - trajectory.step_offset
            trajectory.close_span(self.version)
        self.version = version
        self.ready_s = max(now_s, self.ready_s) + stall_s
        if recompute and self.kv:
            seconds = self.roofline.prefill_s(self.kv)
            self.usage.add_prefill(self.kv, seconds)
            self.ready_s += seconds

    def remove_all(self) -> list[SimulatedTrajectory]:
        """Remove and return all trajectories. Call it between two steps."""
        left = [self.remove(name) for name in list(self.running)] + self.waiting
        self.waiting = []
        self.ends.clear()
        return left

    def remove(self, name: str) -> SimulatedTrajectory:
        """Remove and return a running trajectory. Call it between two steps."""
        trajectory = self.running.pop(name)
        trajectory.done = self.steps - trajectory.step_offset
        trajectory.close_span(self.version)
        self.kv -= trajectory.cache_tokens()
        return trajectory

    def kv_now(self, now_s: float) -> int:
        """Returns the tokens in the cache now."""
        if not self.jump or now_s <= self.begins_s:
            return self.kv
        return self.kv + len(self.running) * self._made(now_s)

    def steps_now(self, now_s: float) -> int:
        """Returns the decode steps until now. A running trajectory has generated this number minus
        its `step_offset` of tokens.
        """
        return self.steps + (self._made(now_s) if self.jump and now_s > self.begins_s else 0)

    def totals(self, now_s: float) -> UsageTotals:
        """Returns the usage totals now, including the elapsed part of the present jump."""
        usage, kv = self.usage, self.kv_now(now_s)
        begins_s = min(max(self.begins_s, usage.until_s), now_s) if self.jump else now_s
        kv_s = self.kv * (begins_s - usage.until_s) + (self.kv + kv) / 2 * (now_s - begins_s)
        return UsageTotals(
            usage.busy_s + now_s - begins_s,
            usage.kv_s + kv_s,
            usage.tokens + kv - self.kv,
            usage.prefilled_tokens,
        )

    def is_empty(self) -> bool:
        return not self.running and not self.waiting

    def _made(self, now_s: float) -> int:
        into_s = now_s - self.begins_s
        return min(self.jump, steps_lasting(self.roofline, len(self.running), self.kv, into_s))

    def _fits(self, trajectory: SimulatedTrajectory) -> bool:
        rows = len(self.running)
        free = self.capacity - self.reserve - self.kv - rows - 1  # minus the next step's tokens
        return rows < self.slots and (not rows or trajectory.cache_tokens() <= free)

    def _take_in(self) -> int:
        """Move fitting trajectories from the queue to the batch; returns the tokens to prefill."""
        tokens = 0
        while self.waiting and self._fits(self.waiting[0]):
            trajectory = self.waiting.pop(0)
            trajectory.step_offset = self.steps - trajectory.done
            trajectory.version = self.version if trajectory.version < 0 else trajectory.version
            self.running[trajectory.name] = trajectory
            heappush(self.ends, (trajectory.step_offset + trajectory.length, trajectory.name))
            self.kv += trajectory.cache_tokens()
            tokens += trajectory.cache_tokens()
        return tokens

    def _make_room(self) -> None:
        """Return the newest sequences to the queue if the next step does not fit, until the reserve
        is free.
        """
        if self.kv + len(self.running) <= self.capacity:
            return
        while len(self.running) > 1 and self.kv + len(self.running) > self.capacity - self.reserve:
            self.waiting.insert(0, self.remove(next(reversed(self.running))))
            self.usage.preempted += 1

    def _next_jump(self) -> None:
        while not self._is_current(self.ends[0]):
            heappop(self.ends)
        rows = len(self.running)
        fitting = (self.capacity - self.kv) // rows
        assert fitting > 0, "a step was left room, and one sequence alone always fits"
        self.jump = min(self.ends[0][0] - self.steps, fitting)
        self.due_s = self.begins_s + seconds_of_steps(self.roofline, rows, self.kv, self.jump)

    def _is_current(self, entry: tuple[int, str]) -> bool:
        trajectory = self.running.get(entry[1])
        return trajectory is not None and trajectory.step_offset + trajectory.length == entry[0]


def _urgency(trajectory: SimulatedTrajectory) -> tuple[bool, float]:
    return not trajectory.done, -trajectory.predicted
