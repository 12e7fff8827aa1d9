"""The command that looks at what is kept: weights."""

import argparse

from rollstream.grammar.parts import Commands, add, add_json

RUN = "a run's folder, its config.json, or a store (folder or URL); default: the newest run"
VERSION = "a number, a whole name as v00000012-t0001, or latest"


def add_keeping(commands: Commands) -> None:
    """`weights` and its actions."""
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
    for action in (*actions.choices.values(),):
        action.add_argument("run", metavar="RUN", nargs="?", help=RUN)
        add_json(action)


def _add(actions: Commands, name: str, purpose: str) -> argparse.ArgumentParser:
    return actions.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
