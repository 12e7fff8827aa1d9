"""A cluster in virtual time, which runs the service's own planners (`docs/simulator.md`).

`experiment` turns settings into runs, `predict` estimates a real run. `simulation` is the loop over
the events of a `world`: rollouts (`cluster`, with the engine in `replica`), `dispatch` with
`placement` and `repack`, the `trainer`, and `faults`. `policies` are the compared schedules,
`workload` the lengths of the answers, `constants` every assumed number with its source, `results`
the measurements.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollstream.simulator.cluster import Cluster, Job
    from rollstream.simulator.experiment import SimulationSettings, run_policies
    from rollstream.simulator.policies import SchedulingPolicy, policy_of
    from rollstream.simulator.results import SimulationResult
    from rollstream.simulator.simulation import simulate
    from rollstream.simulator.workload import Workload

__all__ = [
    "Cluster",
    "Job",
    "SchedulingPolicy",
    "SimulationResult",
    "SimulationSettings",
    "Workload",
    "policy_of",
    "run_policies",
    "simulate",
]

_MODULES = {
    "Cluster": "cluster",
    "Job": "cluster",
    "SchedulingPolicy": "policies",
    "SimulationResult": "results",
    "SimulationSettings": "experiment",
    "Workload": "workload",
    "policy_of": "policies",
    "run_policies": "experiment",
    "simulate": "simulation",
}


def __getattr__(name: str) -> object:
    """Import the module of an exported name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


if __name__ == "simulator":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.simulator", name="simulator")
