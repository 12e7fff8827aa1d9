"""Declares every role once. It imports none, so `--help` and the supervisor start at once."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rollstream.run.config.settings import Configuration
    from rollstream.run.roles.context import RoleContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """`supervisor.process.ProcessSpec` explains `ends`, `single_holder` and `stops_last`."""

    name: str
    """The command, and the label of metrics."""
    purpose: str
    runs: str
    """`module:function` below `rollstream.run.roles`, which returns whether the role's work is
    done.
    """
    processes: Callable[["Configuration"], Sequence[str]]
    """Names of the processes that `rollstream run` starts."""
    threads: Callable[["Configuration"], int] = lambda c: 1
    ends: Literal["run", "itself", "never"] = "never"
    single_holder: bool = False
    stops_last: bool = False
    reads_only: bool = False
    """The role never writes to the store, so conditional writes are not probed."""
    follows_configuration: bool = False
    """It continues under every configuration that the run takes."""
    needs_model: bool = True
    """It starts only once the run's model is in the store or on this host."""
    records_configuration: bool = False
    """It records the run's configuration and takes `--accept-config`."""

    def load(self) -> Callable[["RoleContext"], bool]:
        """The import may take seconds (torch)."""
        module, _, function = self.runs.partition(":")
        return getattr(import_module(f"rollstream.run.roles.{module}"), function)


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}-{number}" for number in range(count)]


_ALL = (
    Role(
        name="prompts",
        purpose="publish prompts in the task's seeded order",
        runs="roles:run_prompts",
        processes=lambda c: ["prompts"],
        single_holder=True,
    ),
    Role(
        name="dispatch",
        purpose="admit groups and assign their trajectories to rollouts",
        runs="roles:run_dispatch",
        processes=lambda c: ["dispatch", *["dispatch-standby"][: c.dispatch.standby]],
        single_holder=True,
        needs_model=False,
    ),
    Role(
        name="train",
        purpose="train on trajectories and publish versions (trainer.processes: number of ranks)",
        runs="train:run_train",
        processes=lambda c: ["trainer"],
        threads=lambda c: c.trainer.threads,
        ends="run",
        single_holder=True,
        records_configuration=True,
    ),
    Role(
        name="relay",
        purpose="cache versions in this node's memory for its rollouts and for other nodes",
        runs="relay:run_relay",
        processes=lambda c: ["relay"][: c.relay.enabled],
        needs_model=False,
    ),
    Role(
        name="rollout",
        purpose="generate trajectories, updating weights on the way",
        runs="rollout:run_rollout",
        processes=lambda c: _numbered("rollout", c.rollouts.count),
        threads=lambda c: c.rollouts.threads,
    ),
    Role(
        name="endpoint",
        purpose="give the agents of all rollouts one address, by their sessions' keys",
        runs="roles:run_endpoint",
        processes=lambda c: ["endpoint"][: bool(c.agent.front)],
    ),
    Role(
        name="score",
        purpose="write annotations (late rewards) about finished trajectories",
        runs="scorer:run_scorer",
        processes=lambda c: _numbered("scorer", c.scoring.count),
        threads=lambda c: c.trainer.threads if c.scoring.holds_reference else 1,
        # It checks its function before it waits.
        needs_model=False,
    ),
    Role(
        name="eval",
        purpose="evaluate versions on held-out prompts: new ones as they appear, or stored ones",
        runs="evaluation:evaluate_announced",
        processes=lambda c: ["eval"][: c.evaluation.enabled],
        threads=lambda c: c.evaluation.threads,
        ends="itself",
        reads_only=True,
    ),
    Role(
        name="archive",
        purpose="write the log as Parquet files into the store, exactly once",
        runs="roles:run_archive",
        processes=lambda c: ["archive"][: c.archive.enabled],
        single_holder=True,
        stops_last=True,
        needs_model=False,
    ),
    Role(
        name="observe",
        purpose="serve the metrics and concerns of the whole run, where no `run` command does",
        runs="observe:run_observe",
        processes=lambda c: [],
        ends="itself",
        reads_only=True,
        follows_configuration=True,
        needs_model=False,
    ),
)
ROLES: Mapping[str, Role] = {role.name: role for role in _ALL}
"""In the order of starting."""
