"""Parsers of the commands that run a whole run, a role, an evaluation, the warm-up, a profile or a
simulation.
"""

import argparse

from rollstream.cli.parts import EXAMPLE_RUN, Subcommands, add_command, add_configuration, add_json, add_name

ROLE_PURPOSES = {
    "prompts": "publish prompts in the task's seeded order",
    "dispatch": "admit groups and assign their trajectories to rollouts",
    "rollout": "generate trajectories, updating weights on the way",
    "train": "train on trajectories and publish versions (trainer.processes: number of ranks)",
    "archive": "write the log as Parquet files into the store, exactly once",
    "relay": "cache versions in this node's memory for its rollouts and for other nodes",
    "score": "write annotations (late rewards) about finished trajectories",
}
"""The commands that run one role, and the role's purpose."""
ROLLOUT_EXAMPLES = (
    "runs/quickstart-0 --name rollout-extra",
    f"{EXAMPLE_RUN} --name spot-1 --preemptible --grace 25",
)


def add_run_commands(commands: Subcommands) -> None:
    """Add `run`, each role, `eval`, `warmup`, `profile` and `simulate`."""
    _add_run(commands)
    for name, purpose in ROLE_PURPOSES.items():
        _add_role(commands, name, purpose)
    _add_evaluation(commands)
    _add_warmup(commands)
    _add_profile(commands)
    _add_simulation(commands)


def _add_run(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "run",
        "run",
        "start all roles of CONFIG and show progress; Ctrl-C stops; the same command resumes",
        "examples/quickstart.toml",
        "examples/quickstart.toml --seed 2 --run runs/two --set trainer.lr=1e-4",
    )
    add_configuration(command)
    _add_accept(command)
    add_json(command)


def _add_role(commands: Subcommands, name: str, purpose: str) -> None:
    more = ROLLOUT_EXAMPLES if name == "rollout" else ()
    command = add_command(commands, name, "role", f"run one role: {purpose}", EXAMPLE_RUN, *more)
    add_name(command, name)
    add_configuration(command)
    if name == "rollout":
        _add_preemptible(command)
    if name == "train":
        _add_accept(command)


def _add_preemptible(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--preemptible",
        action="store_true",
        help="for a machine that may be reclaimed: gets short trajectories, hands all of them "
        "over on SIGTERM, then exits 0",
    )
    command.add_argument(
        "--grace",
        metavar="SECONDS",
        type=float,
        help="with --preemptible: time from SIGTERM to the forced exit (default 20)",
    )


def _add_accept(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--accept-config",
        action="store_true",
        help="resume with a configuration that differs from the run's; the ledger records it",
    )


def _add_evaluation(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "eval",
        "evaluate",
        "evaluate versions on held-out prompts: new ones as they appear, or stored ones",
        EXAMPLE_RUN,
        f"{EXAMPLE_RUN} --versions 0,10,60 --samples 16 --json",
    )
    add_name(command, "eval")
    command.add_argument(
        "--versions", metavar="N,N…", help="evaluate these stored versions, then exit"
    )
    command.add_argument("--samples", metavar="N", type=int, help="samples per prompt")
    add_configuration(command)
    add_json(command)


def _add_warmup(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "warmup",
        "warmup",
        "create the run's initial model by supervised training on the task's documents",
        EXAMPLE_RUN,
    )
    add_configuration(command)


def _add_profile(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "profile",
        "profile",
        "measure and fit the engine's step times on this machine; rollouts derive B_max from them",
        EXAMPLE_RUN,
        "examples/quickstart.toml --out profiles/quickstart.json --json",
    )
    add_configuration(command)
    command.add_argument(
        "--out", metavar="FILE", help="output (default: rollouts.profile, else in the run's folder)"
    )
    add_json(command)


def _add_simulation(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "simulate",
        "simulate",
        "simulate policies on a cluster in virtual time, with the same planners as the service",
        "examples/cluster-1024.toml",
        "examples/cluster-1024.toml --set scale=8 --json",
        "examples/cluster-1024.toml --set 'policies=[\"laminar\"]' --html cluster.html",
    )
    command.add_argument("configuration", metavar="CONFIG", help="TOML file (docs/simulator.md)")
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override one setting, e.g. scale=8 or constants.train_mfu=0.4",
    )
    command.add_argument("--html", metavar="FILE", help="write the timelines to this page")
    add_json(command)
