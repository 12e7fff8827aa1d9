"""The processes of `rollstream run` on this machine, in the order of their start."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from rollstream.import_path import module_command, module_environment
from rollstream.run.config.run_folder import RunFolder
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import METRICS_PORT
from rollstream.run.role_catalogue import ROLES
from rollstream.run.supervisor.cards import GpuCard, visibility
from rollstream.run.supervisor.process import ProcessSpec

ACCEPT_CONFIG = "--accept-config"


def process_specs(
    configuration: Configuration,
    folder: RunFolder,
    accept_config: bool = False,
    cards: Mapping[str, Sequence[GpuCard]] = MappingProxyType({}),
) -> list[ProcessSpec]:
    """Returns the process specs with `accept_config` the role that records the run's configuration
    accepts a changed one. `cards` maps a process to the only GPUs that it sees (none without an
    entry); if it is empty, all see those of the supervisor.
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
    """It runs before all others and ends."""
    environment = _environment(configuration.warmup.threads)
    return ProcessSpec("warmup", _command(folder, "warmup"), environment=environment)


def with_metrics_ports(seats: Sequence[ProcessSpec], base: int) -> list[ProcessSpec]:
    """Puts ports in their environments: from `base` + 1 on, or any free ones if `base` is 0."""
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
        # Some data sets of reasoning_gym are ordered by string hashes.
        "PYTHONHASHSEED": "0",
    }
