"""Simulates repack (moving the last running trajectories together, so that rollouts become empty)
and the migration of outliers. The service's planners decide over values of the simulator; this
module carries their moves out and charges the time for them.

The check runs every few seconds and after each version, as in Laminar. A move starts between two
decode steps of its source; the moved trajectories stand still for `move_s` and are prefilled again.
"""

from collections import Counter
from dataclasses import dataclass, field

from rollstream.consumers.dispatch import repack
from rollstream.simulator.cluster import SimulatedRollout
from rollstream.simulator.workload import SimulatedTrajectory
from rollstream.simulator.world import World
from rollstream.streams.values import Version

RESTART = ""  # this in place of a target means that the trajectory restarts


@dataclass(frozen=True, slots=True)
class ArrivingMove:
    """Holds moved trajectories that arrive at `target`."""

    target: str
    trajectories: tuple[SimulatedTrajectory, ...]


@dataclass(slots=True, eq=False)
class SimulatedRepack:
    """Plans moves, carries them out and counts them: `moves` by source and target, `moved` by
    trajectory; `restarts` counts trajectories that restart instead.
    """

    world: World
    moves: int = 0
    moved: int = 0
    restarts: int = 0
    steps: repack.StepDuration = field(default_factory=repack.StepDuration)

    def check(self) -> None:
        """Plan from the rollouts' present status, and ask the sources to give trajectories up."""
        world = self.world
        self.steps.observe(world.visible_version, world.now)
        loads = [self._load(rollout) for rollout in world.rollouts.values()]
        for rollout, load in zip(world.rollouts.values(), loads, strict=True):
            before = rollout.kv_previous if world.policy.peak else 0
            rollout.kv_previous = max(before, load.kv_used)
        moves = repack.plan_repack(loads, world.keeps) if world.policy.repack else ()
        for move in moves:
            source = world.rollouts[move.source]
            source.moving = dict.fromkeys(source.replica.running, move.destination)
            self._request_moves(source)
        if world.policy.migrate:
            taking = {move.destination for move in moves}
            self._move_outliers([load for load in loads if load.rollout not in taking])

    def send(self, rollout: SimulatedRollout) -> None:
        """Send the requested trajectories that still run on their way. Call it between two decode
        steps of the source `rollout`.
        """
        world, requested = self.world, rollout.moving or {}
        rollout.moving = None
        by_target: dict[str, list[SimulatedTrajectory]] = {}
        for name, target in requested.items():
            if name in rollout.replica.running:
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
        """Resume the trajectories at their target if it is open and holds their version; otherwise
        dispatch places them.
        """
        world, rollout = self.world, self.world.rollouts[landing.target]
        rollout.expecting -= len(landing.trajectories)
        for trajectory in landing.trajectories:
            fits = not world.keeps or trajectory.version == rollout.replica.version
            if rollout.is_open() and fits:
                world.dispatching.assign(trajectory, rollout)
                rollout.replica.submit(trajectory, world.now)
            else:
                world.dispatching.unassigned.append(trajectory)
        world.plan_wake(rollout)
        world.check_empty(rollout)
        world.plan_dispatch()

    def cancel(self, rollout: SimulatedRollout) -> None:
        """Cancel the moves of a source that died before it gave trajectories up."""
        if rollout.moving is not None:
            self._correct_expected(rollout.moving, {})
            rollout.moving = None

    def _request_moves(self, source: SimulatedRollout) -> None:
        assert source.moving is not None
        for target in source.moving.values():
            if target != RESTART:
                self.world.rollouts[target].expecting += 1
        source.replica.interrupt(self.world.now)
        self.world.plan_wake(source)

    def _correct_expected(self, requested: dict[str, str], left: dict[str, int]) -> None:
        """Reduce the targets' expected trajectories by those that finished meanwhile."""
        for target, count in Counter(requested.values()).items():
            if target == RESTART:
                continue
            rollout = self.world.rollouts[target]
            rollout.expecting -= count - left.get(target, 0)
            self.world.check_empty(rollout)

    def _load(self, rollout: SimulatedRollout) -> repack.RolloutLoad:
        replica = rollout.replica
        return repack.RolloutLoad(
            rollout=replica.name,
            version=Version(replica.version, 0),
            running=len(replica.running),
            waiting=len(replica.waiting) + rollout.expecting,
            kv_used=replica.kv_now(self.world.now),
            kv_previous=rollout.kv_previous,
            kv_capacity=replica.capacity,
            batch_max=self.world.cluster.batch_max,
            ready=rollout.is_open(),
            gains=self.world.dispatching.gains(rollout),
        )

    def _move_outliers(self, loads: list[repack.RolloutLoad]) -> None:
        """Request moves and restarts of outliers (answers that run far longer than predicted) in
        waves that are nearly done. Rollouts that take part in a repack are left out.
        """
        rollouts = self.world.rollouts
        free = [load for load in loads if rollouts[load.rollout].is_open()]
        running = {request.trajectory: request for request in self._running()}
        plan = repack.plan_outliers(list(running.values()), free, self._budget())
        requested: dict[str, dict[str, str]] = {}
        for name, target in {**plan.moves, **dict.fromkeys(plan.restarts, RESTART)}.items():
            requested.setdefault(running[name].rollout, {})[name] = target
        for source, names in requested.items():
            rollouts[source].moving = names
            self._request_moves(rollouts[source])

    def _budget(self) -> repack.LagBudget | None:
        """Returns the lag bound, seconds per step and seconds per token by which `plan_outliers`
        decides whether an answer that starts now ends in time. Its speed is that of the present
        batches on rollouts of the newest version.
        """
        world = self.world
        speeds = [
            1 / rollout.replica.roofline.step_s(rows, rollout.replica.kv_now(world.now))
            for rollout in world.rollouts.values()
            if rollout.replica.version == world.visible_version
            and (rows := len(rollout.replica.running))
        ]
        return repack.lag_budget(world.dispatching.pace.max_lag, self.steps.lasts_s, speeds)

    def _running(self) -> list[repack.RunningRequest]:
        """Returns running trajectories of waves with a small unfinished share; no others can be
        outliers.
        """
        world, found = self.world, list[repack.RunningRequest]()
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
                    found.append(world.dispatching.running(trajectory, rollout, tokens, share))
        return found
