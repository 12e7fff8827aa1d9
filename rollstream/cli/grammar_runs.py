"""Parsers of the commands on stored state: weights, checkpoints, fork, replay."""

import argparse

from rollstream.cli.parts import Subcommands, add_command, add_json

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
        "fork",
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
        "replay",
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
        "checkpoints",
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
        "weights",
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
    verify.add_argument("version", metavar="VERSION", nargs="?", help=f"{VERSION_HELP}; default: all")
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


def _add_action(actions: Subcommands, name: str, purpose: str, example: str) -> argparse.ArgumentParser:
    """Add the action `name`, written with its command, e.g. `weights list`."""
    return actions.add_parser(
        name.partition(" ")[2],
        help=purpose,
        description=f"{purpose[0].upper()}{purpose[1:]}.",
        epilog=f"example:\n  rollstream {name} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
