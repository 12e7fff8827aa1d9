"""Lists the processes that a configuration needs on this machine (`ProcessSpec`): their command
lines, environments and order. The supervisor starts them; nothing here does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rollstream.config.run_folder import RunFolder
from rollstream.config.settings import Configuration
from rollstream.config.sources import METRICS_PORT
from rollstream.import_path import module_command, module_environment
from rollstream.roles.catalogue import ROLES
from rollstream.supervisor.cards import GpuCard, visibility
from rollstream.supervisor.process import ProcessSpec

ACCEPT_CONFIG = "--accept-config"


def process_specs(
    configuration: Configuration,
    folder: RunFolder,
    accept_config: bool = False,
    cards: Mapping[str, Sequence[GpuCard]] = MappingProxyType({}),
) -> list[ProcessSpec]:
    """Returns the processes of all roles in the order of their start. `accept_config` passes
    `--accept-config` to the role that records the configuration. `cards` maps a process's name to
    the only GPUs that it sees; empty, each inherits the environment.
    """
    specs: list[ProcessSpec] = []
    for role in ROLES.values():
        accept = [ACCEPT_CONFIG] if accept_config and role.records_configuration else []
        for name in role.processes(configuration):
            spec = ProcessSpec(
                name,
                [*_command(folder, role.name), "--name", name, *accept],
                role.ends,
                role.single_holder,
                _environment(role.threads(configuration)) | visibility(cards, name),
                role.stops_last,
            )
            specs.append(spec)
    return specs


def warmup_spec(configuration: Configuration, folder: RunFolder) -> ProcessSpec:
    """Returns the process of the warm-up, which runs before all others."""
    environment = _environment(configuration.warmup.threads)
    return ProcessSpec("warmup", _command(folder, "warmup"), environment=environment)


def with_metrics_ports(seats: Sequence[ProcessSpec], base: int) -> list[ProcessSpec]:
    """Returns the processes, each with a port for its metrics: consecutive ones after `base`, or 0
    (any free port) if `base` is 0.
    """
    return [
        replace(seat, environment={**seat.environment, METRICS_PORT: str(base and base + number)})
        for number, seat in enumerate(seats, start=1)
    ]


def _command(folder: RunFolder, command: str) -> list[str]:
    return module_command("rollstream", command, str(folder.configuration))


def _environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **module_environment(),
        "PYTHONHASHSEED": "0",  # some data sets of reasoning_gym are ordered by string hashes
    }
