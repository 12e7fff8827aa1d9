"""Argument parsers of the commands that run something, and of those on stored state.

Nothing here imports the commands' own modules, so `--help` answers at once.
"""

import argparse

from rollstream.cli.grammar import (
    EXAMPLE_RUN,
    Subcommands,
    add_command,
    add_configuration,
    add_json,
    add_name,
)

RUN_OR_STORE_HELP = "run folder, its config.json, or a store (folder or URL); default: newest run"
CHECKPOINT_HELP = "a step, a full name like s00000010-t0001, or latest"
VERSION_HELP = "a number, a full name like v00000012-t0001, or latest"


def add_storage_commands(commands: Subcommands) -> None:
    """Add `weights`, `checkpoints`, `fork` and `replay`."""
    _add_weights(commands)
    _add_checkpoints(commands)
    _add_fork(commands)
    _add_replay(commands)


def _add_fork(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "fork",
        "replay.fork",
        "create a new run from a kept checkpoint of another one; `rollstream run DIR` starts it",
        "runs/quickstart-0 --at 30 --out runs/forked",
        "runs/quickstart-0 --at latest --out runs/longer --set trainer.steps=120 --json",
    )
    command.add_argument("run", metavar="RUN", help="folder of the parent run, which is only read")
    command.add_argument(
        "--at", metavar="STEP", required=True,
        help="use the newest checkpoint up to this step, or latest",
    )  # fmt: skip
    command.add_argument("--out", metavar="DIR", required=True, help="a new or empty folder")
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="override a setting of the parent, e.g. run=NAME or trainer.lr=1e-4",
    )
    add_json(command)


def _add_replay(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "replay",
        "replay.replay",
        "repeat recorded training steps, copy a run's records, or train offline on trajectories",
        "runs/quickstart-0 --from-step 58 --out runs/again",
        "runs/quickstart-0 --from-step 30 --to-step 50 --set trainer.lr=1e-4 --out runs/slower",
        "runs/quickstart-0 --from-step 30 --where 'tokens<100' --out runs/short --json",
        "runs/quickstart-0 --to sqlite:runs/copy",
        "runs/quickstart-0 --to sqlite:runs/good --where 'reward>=1' --where 'step>30'",
        "runs/quickstart-0 --offline runs/quickstart-0/config.json --set trainer.steps=3"
        " --out runs/offline",
    )
    command.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="run folder, which is only read; with --to also an archive (folder or store URL); "
        "with --offline one or more of both, and .jsonl files",
    )
    _add_replay_forms(command)
    command.add_argument(
        "--out", metavar="DIR", help="a new folder, or that of the same replay, to resume it"
    )
    command.add_argument("--name", metavar="NAME", help="run name, if an archive holds several")
    add_json(command)


def _add_replay_forms(command: argparse.ArgumentParser) -> None:
    """Add the options that select one of the three kinds of replay, and their own options."""
    command.add_argument("--from-step", metavar="N", type=int, help="repeat the steps after step N")
    command.add_argument(
        "--to-step", metavar="M", type=int, help="last step to repeat (default: last recorded)"
    )
    command.add_argument(
        "--to", metavar="BUS", help="copy records to another bus: sqlite:FOLDER or kafka://…"
    )
    command.add_argument(
        "--topic",
        metavar="TOPIC",
        action="append",
        help="topic to copy with --to (default: all archived ones)",
    )
    command.add_argument(
        "--offline", metavar="CONFIG", help="train on the trajectories under these settings"
    )
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="experiment: another loss, learning rate, lag limit … after step N",
    )
    command.add_argument(
        "--where",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="only trajectories whose field (task, reward, tokens, step, lag, time, …) matches",
    )


def _add_checkpoints(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "checkpoints",
        "history.checkpoints",
        "list and show the trainer's kept checkpoints",
        "list runs/quickstart-0",
        "show latest runs/quickstart-0",
        "show 60 runs/quickstart-0 --json",
    )
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(
        actions,
        "checkpoints list",
        "list the checkpoints, oldest first; also unfinished and damaged ones",
        "runs/quickstart-0",
    )
    show = _add_action(
        actions,
        "checkpoints show",
        "show one checkpoint: tensors, positions, open groups, counts",
        "latest runs/quickstart-0",
    )
    show.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT_HELP)
    _add_run_argument(actions)


def _add_weights(commands: Subcommands) -> None:
    command = add_command(
        commands,
        "weights",
        "history.weights",
        "list, show, verify, compare and export the kept weight versions",
        "list runs/quickstart-0",
        "show latest runs/quickstart-0",
        "verify runs/quickstart-0",
        "diff 50 60 runs/quickstart-0 --json",
        "export latest exported runs/quickstart-0",
    )
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_action(
        actions,
        "weights list",
        "list the versions, oldest first: kind, parent, size",
        "runs/quickstart-0",
    )
    show = _add_action(
        actions,
        "weights show",
        "show one version: each tensor, its encoding, its changed elements",
        "latest runs/quickstart-0",
    )
    show.add_argument("version", metavar="VERSION", help=VERSION_HELP)
    verify = _add_action(
        actions,
        "weights verify",
        "verify the hash of every tensor; exit code 1 if any differs",
        "runs/quickstart-0",
    )
    verify.add_argument(
        "version", metavar="VERSION", nargs="?", help=f"{VERSION_HELP}; default: all"
    )
    diff = _add_action(
        actions,
        "weights diff",
        "list the tensors that differ between two versions, and by how much",
        "50 60 runs/quickstart-0",
    )
    diff.add_argument("first", metavar="A", help=VERSION_HELP)
    diff.add_argument("second", metavar="B", help=VERSION_HELP)
    export = _add_action(
        actions,
        "weights export",
        "write a version as a folder that transformers and vLLM load",
        "latest exported runs/quickstart-0",
    )
    export.add_argument("version", metavar="VERSION", help=VERSION_HELP)
    export.add_argument("folder", metavar="DIR", help="a new or empty folder")
    _add_run_argument(actions)


def _add_run_argument(actions: Subcommands) -> None:
    for action in (*actions.choices.values(),):
        action.add_argument("run", metavar="RUN", nargs="?", help=RUN_OR_STORE_HELP)
        add_json(action)


def _add_action(
    actions: Subcommands, name: str, purpose: str, example: str
) -> argparse.ArgumentParser:
    """Add the action `name`, written with its command, e.g. `weights list`."""
    return actions.add_parser(
        name.partition(" ")[2],
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:\n  rollstream {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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
    command.add_argument(
        "configuration", metavar="CONFIG", help="TOML file (docs/explanation/simulator.md)"
    )
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
