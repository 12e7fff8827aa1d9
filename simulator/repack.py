"""Simulates repack and the migration of outliers. Every few seconds and after each new version
`check` calls the service's planners, as in Laminar (arXiv 2510.12633); `send` takes trajectories
off their source, between two decode steps; `receive` resumes them after `Cluster.move_s` seconds,
prefilled again.
"""

from collections import Counter
from dataclasses import dataclass, field

from rollstream.consumers.dispatch import repack
from rollstream.simulator.cluster import SimulatedRollout
from rollstream.simulator.workload import SimulatedTrajectory
from rollstream.simulator.world import World
from rollstream.streams.values import Version

RESTART = ""  # in place of a target's name: the trajectory restarts from its prompt


@dataclass(frozen=True, slots=True)
class ArrivingMove:
    target: str
    trajectories: tuple[SimulatedTrajectory, ...]


@dataclass(slots=True, eq=False)
class SimulatedRepack:
    """`moves` counts moves of one or several trajectories from one rollout to another, `moved`
    their trajectories, and `restarts` those that restarted instead.
    """

    world: World
    moves: int = 0
    moved: int = 0
    restarts: int = 0
    steps: repack.StepDuration = field(default_factory=repack.StepDuration)

    def check(self) -> None:
        world = self.world
        self.steps.observe(world.visible_version, world.now)
        loads = [self._load(rollout) for rollout in world.rollouts.values()]
        for rollout, load in zip(world.rollouts.values(), loads, strict=True):
            before = rollout.kv_previous if world.policy.peak else 0
            rollout.kv_previous = max(before, load.kv_used)
        moves = repack.plan_repack(loads, world.policy.drains) if world.policy.repack else ()
        for move in moves:
            source = world.rollouts[move.source]
            trajectories = [*source.replica.running, *source.replica.parked]
            source.moving = dict.fromkeys(trajectories, move.destination)
            self._request_moves(source)
        if world.policy.migrate:
            taking = {move.destination for move in moves}
            self._move_outliers([load for load in loads if load.rollout not in taking])

    def send(self, rollout: SimulatedRollout) -> None:
        """Takes the requested trajectories that still run off `rollout`, and plans their arrival or
        restarts them. Between two decode steps.
        """
        world, requested = self.world, rollout.moving or {}
        rollout.moving = None
        by_target: dict[str, list[SimulatedTrajectory]] = {}
        for name, target in requested.items():
            if name in rollout.replica.running or name in rollout.replica.parked:
                trajectory = rollout.replica.remove(name)
                rollout.tokens -= trajectory.predicted
                by_target.setdefault(target, []).append(trajectory)
        for trajectory in by_target.pop(RESTART, []):
            self.restarts += 1
            world.dispatching.restart_trajectory(trajectory)
            world.dispatching.unassigned.append(trajectory)
        for target, trajectories in by_target.items():
            self.moves += 1
            self.moved += len(trajectories)
            for trajectory in trajectories:
                trajectory.moves += 1
                trajectory.attempt += 1
            world.recorder.note_move(
                rollout, world.rollouts[target], world.now, world.cluster.move_s
            )
            world.plan(
                world.now + world.cluster.move_s, "land", ArrivingMove(target, tuple(trajectories))
            )
        self._correct_expected(
            requested, {t: len(trajectories) for t, trajectories in by_target.items()}
        )

    def receive(self, landing: ArrivingMove) -> None:
        world, rollout = self.world, self.world.rollouts[landing.target]
        rollout.expecting -= len(landing.trajectories)
        for trajectory in landing.trajectories:
            fits = not world.policy.drains or trajectory.version == rollout.replica.version
            if rollout.is_open() and fits:
                world.dispatching.assign(trajectory, rollout)
                rollout.replica.submit(trajectory, world.now)
            else:
                world.dispatching.unassigned.append(trajectory)
        world.plan_wake(rollout)
        world.check_empty(rollout)
        world.plan_dispatch()

    def cancel(self, rollout: SimulatedRollout) -> None:
        """Cancels the moves for a rollout that died before `send` was called."""
        if rollout.moving is not None:
            self._correct_expected(rollout.moving, {})
            rollout.moving = None

    def _request_moves(self, source: SimulatedRollout) -> None:
        assert source.moving is not None
        for target in source.moving.values():
            if target != RESTART:
                self.world.rollouts[target].expecting += 1
        # At the end of its present decode step the simulation calls `send`.
        source.replica.interrupt(self.world.now)
        self.world.plan_wake(source)

    def _correct_expected(self, requested: dict[str, str], departed: dict[str, int]) -> None:
        for target, count in Counter(requested.values()).items():
            if target == RESTART:
                continue
            rollout = self.world.rollouts[target]
            # The others finished, or their source died.
            rollout.expecting -= count - departed.get(target, 0)
            self.world.check_empty(rollout)

    def _load(self, rollout: SimulatedRollout) -> repack.RolloutLoad:
        replica = rollout.replica
        return repack.RolloutLoad(
            rollout=replica.name,
            version=Version(replica.version, 0),
            running=len(replica.running) + len(replica.parked),
            waiting=len(replica.waiting) + rollout.expecting,
            kv_used=replica.kv_now(self.world.now),
            kv_previous=rollout.kv_previous,
            kv_capacity=replica.capacity,
            batch_max=self.world.cluster.batch_max,
            ready=rollout.is_open(),
            gains=self.world.dispatching.gains(rollout),
            kind=rollout.kind,
        )

    def _move_outliers(self, loads: list[repack.RolloutLoad]) -> None:
        rollouts = self.world.rollouts
        free = [load for load in loads if rollouts[load.rollout].is_open()]
        running = {request.trajectory: request for request in self._running()}
        moves, restarts = repack.plan_outliers(list(running.values()), free, self._budget())
        requested: dict[str, dict[str, str]] = {}
        for name, target in {**moves, **dict.fromkeys(restarts, RESTART)}.items():
            requested.setdefault(running[name].rollout, {})[name] = target
        for source, names in requested.items():
            rollouts[source].moving = names
            self._request_moves(rollouts[source])

    def _budget(self) -> repack.LagBudget | None:
        """Returns None while a quantity is unknown."""
        world = self.world
        speeds = [
            1 / rollout.replica.jump_roofline.step_s(rows, rollout.replica.kv_now(world.now))
            for rollout in world.rollouts.values()
            if rollout.replica.version == world.visible_version
            and (rows := len(rollout.replica.running))
        ]
        return repack.lag_budget(world.dispatching.pace.max_lag, self.steps.lasts_s, speeds)

    def _running(self) -> list[repack.RunningRequest]:
        """Returns the running trajectories of waves that are nearly done; no others can be
        outliers.
        """
        world, requests = self.world, list[repack.RunningRequest]()
        late = {
            w: s for w, s in world.dispatching.unfinished().items() if s <= repack.UNFINISHED_MAX
        }
        for rollout in world.rollouts.values() if late else ():
            if not rollout.is_open():
                continue
            steps = rollout.replica.steps_now(world.now)
            for trajectory in rollout.replica.running.values():
                if trajectory.wave in late:
                    tokens, share = steps - trajectory.step_offset, late[trajectory.wave]
                    requests.append(world.dispatching.running(trajectory, rollout, tokens, share))
        return requests
