"""A cluster in virtual time, which runs the service's own planners
(`docs/explanation/simulator.md`).

`experiment` turns settings into runs and estimates real ones. `simulation` is the loop over the
events of a `world`, with its failures: rollouts (`cluster`, with the engine in `replica`, `cache`,
`drafting`, `step_times`, `usage`), `dispatch`, `repack`. `policies` are the compared schedules,
`settings` and `workload` the work, `constants` every assumed number, `results` the measurements,
`saved_runs` their file.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.simulator.cluster import (
        Cluster as Cluster,
        Job as Job,
    )
    from rollstream.simulator.experiment import (
        SimulationSettings as SimulationSettings,
        run_policies as run_policies,
    )
    from rollstream.simulator.policies import (
        SchedulingPolicy as SchedulingPolicy,
        policy_of as policy_of,
    )
    from rollstream.simulator.results import SimulationResult as SimulationResult
    from rollstream.simulator.simulation import simulate as simulate
    from rollstream.simulator.workload import Workload as Workload

__getattr__ = lazy_exports(__name__)

if __name__ == "simulator":  # found beside the package, in a checkout
    raise ImportError("import it as rollstream.simulator", name="simulator")
