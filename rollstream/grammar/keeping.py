"""Commands that look at what is kept: weights, checkpoints, a run's steps."""

import argparse

from rollstream.grammar.parts import Commands, add, add_json

RUN = "a run's folder, its config.json, or a store (folder or URL); default: the newest run"
CHECKPOINT = "a step, a whole name as s00000010-t0001, or latest"
VERSION = "a number, a whole name as v00000012-t0001, or latest"


def add_keeping(commands: Commands) -> None:
    """`weights` and `checkpoints` and their actions."""
    _add_weights(commands)
    _add_checkpoints(commands)
    _add_fork(commands)
    _add_replay(commands)


def _add_fork(commands: Commands) -> None:
    command = add(
        commands,
        "fork",
        "fork",
        "begin a new run where another one was at a kept checkpoint; `run DIR` goes on",
        "runs/quickstart-0 --at 30 --out runs/forked",
        "runs/quickstart-0 --at latest --out runs/longer --set trainer.steps=120 --json",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder; it is not changed")
    command.add_argument(
        "--at", metavar="STEP", required=True,
        help="the newest checkpoint kept up to this step; or latest",
    )  # fmt: skip
    command.add_argument("--out", metavar="DIR", required=True, help="a new or empty folder")
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="a setting of the fork that is not the parent's, e.g. run=NAME or trainer.lr=1e-4",
    )
    add_json(command)


def _add_replay(commands: Commands) -> None:
    command = add(
        commands,
        "replay",
        "replay",
        "train a run's steps again, publish its records again, or train on trajectories alone",
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
        help="a run's folder, which is not changed; with --to also an archive (folder or store "
        "URL); with --offline several of them, and .jsonl files",
    )
    _add_forms(command)
    command.add_argument(
        "--out", metavar="DIR", help="a new folder, or that of the same replay, which goes on"
    )
    command.add_argument("--name", metavar="NAME", help="the run, where an archive holds several")
    add_json(command)


def _add_forms(command: argparse.ArgumentParser) -> None:
    """What says which of the three is meant, and what each can be told."""
    command.add_argument("--from-step", metavar="N", type=int, help="train again, on from here")
    command.add_argument("--to-step", metavar="M", type=int, help="default: the last recorded")
    command.add_argument("--to", metavar="BUS", help="publish again: sqlite:FOLDER or kafka://…")
    command.add_argument(
        "--topic", metavar="TOPIC", action="append", help="of --to; default: all that is archived"
    )
    command.add_argument(
        "--offline", metavar="CONFIG", help="train on trajectories alone, under these settings"
    )
    command.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        dest="overrides",
        help="an experiment: another loss, learning rate, lag limit … after step N",
    )
    command.add_argument(
        "--where",
        metavar="FIELD=VALUE",
        action="append",
        default=[],
        help="only trajectories whose field (task, reward, tokens, step, lag, time, …) is so",
    )


def _add_checkpoints(commands: Commands) -> None:
    command = add(
        commands,
        "checkpoints",
        "checkpoints",
        "list and show the trainer's checkpoints that are kept",
        "list runs/quickstart-0",
        "show latest runs/quickstart-0",
        "show 60 runs/quickstart-0 --json",
    )
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add(actions, "list", "the checkpoints, oldest first; unfinished and damaged ones too")
    show = _add(actions, "show", "one checkpoint: tensors, positions, open groups, counts")
    show.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    _add_run(actions)


def _add_weights(commands: Commands) -> None:
    command = add(
        commands,
        "weights",
        "weights",
        "list, show, verify, compare and export the weight versions that are kept",
        "list runs/quickstart-0",
        "show latest runs/quickstart-0",
        "verify runs/quickstart-0",
        "diff 50 60 runs/quickstart-0 --json",
        "export latest exported runs/quickstart-0",
    )
    actions = command.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add(actions, "list", "the versions, oldest first: kind, parent, size")
    show = _add(actions, "show", "one version: every tensor, how it is coded, what changed")
    show.add_argument("version", metavar="VERSION", help=VERSION)
    verify = _add(actions, "verify", "compute every hash again; exit code 1 names what differs")
    verify.add_argument("version", metavar="VERSION", nargs="?", help=f"{VERSION}; default: all")
    diff = _add(actions, "diff", "tensors that differ between two versions, and by how much")
    diff.add_argument("first", metavar="A", help=VERSION)
    diff.add_argument("second", metavar="B", help=VERSION)
    export = _add(actions, "export", "write a folder that transformers and vLLM load")
    export.add_argument("version", metavar="VERSION", help=VERSION)
    export.add_argument("folder", metavar="DIR", help="a new or empty folder")
    _add_run(actions)


def _add_run(actions: Commands) -> None:
    for action in (*actions.choices.values(),):
        action.add_argument("run", metavar="RUN", nargs="?", help=RUN)
        add_json(action)


def _add(actions: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
