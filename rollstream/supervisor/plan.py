"""The processes that a configuration needs on this machine, with their command lines."""

from collections.abc import Sequence
from dataclasses import replace

from rollstream.config.run_folder import RunFolder
from rollstream.config.settings import Configuration
from rollstream.config.sources import METRICS_PORT
from rollstream.import_path import module_command, module_environment
from rollstream.supervisor.process import ProcessSpec

ACCEPT_CONFIG = "--accept-config"


def process_specs(
    configuration: Configuration, folder: RunFolder, accept_config: bool = False
) -> list[ProcessSpec]:
    """Prompt source, dispatch (and a standby if configured), trainer, relay, rollouts, scorers,
    evaluation and archive, in the order of their start; `accept_config` is passed on to the
    trainer.
    """
    c = configuration
    trainer = _role_spec(folder, "train", "trainer", c.trainer.threads, single=True)
    if accept_config:
        trainer = replace(trainer, command=[*trainer.command, ACCEPT_CONFIG])
    seats = [
        _role_spec(folder, "prompts", "prompts", 1, single=True),
        _role_spec(folder, "dispatch", "dispatch", 1, single=True),
        trainer,
    ]
    if c.dispatch.standby:
        seats.append(_role_spec(folder, "dispatch", "dispatch-standby", 1, single=True))
    if c.relay.enabled:
        seats.append(_role_spec(folder, "relay", "relay", 1))
    for number in range(c.rollouts.count):
        seats.append(_role_spec(folder, "rollout", f"rollout-{number}", c.rollouts.threads))
    for number in range(c.scoring.count):
        seats.append(_role_spec(folder, "score", f"scorer-{number}", 1))
    if c.evaluation.enabled:
        seats.append(_role_spec(folder, "eval", "eval", c.evaluation.threads))
    if c.archive.enabled:
        archive = _role_spec(folder, "archive", "archive", 1, single=True)
        seats.append(replace(archive, stops_last=True))
    return seats


def warmup_spec(configuration: Configuration, folder: RunFolder) -> ProcessSpec:
    """The warm-up, which runs before all others."""
    return _role_spec(folder, "warmup", "warmup", configuration.warmup.threads)


def with_metrics_ports(seats: Sequence[ProcessSpec], base: int) -> list[ProcessSpec]:
    """The processes with a port each for their metrics: those after `base`, or free ones (0) if
    `base` is 0.
    """
    return [
        replace(seat, environment={**seat.environment, METRICS_PORT: str(base and base + number)})
        for number, seat in enumerate(seats, start=1)
    ]


def _role_spec(
    folder: RunFolder, command: str, name: str, threads: int, single: bool = False
) -> ProcessSpec:
    line = module_command("rollstream", command, str(folder.configuration))
    if command != "warmup":
        line += ["--name", name]
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **module_environment(),
        "PYTHONHASHSEED": "0",  # some data sets of reasoning_gym are ordered by it
    }
    ends = "run" if command == "train" else "itself" if command == "eval" else "never"
    return ProcessSpec(name, line, ends, single, environment)
