"""The table of all commands, by group, and the text of `rollstream --help`. A command is a module
below `rollstream.run.cli` with `add_arguments` and `main`; one of several actions has `ACTIONS`,
purposes by name, the default first. Only the chosen one is imported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from rollstream.errors import ConfigurationError
from rollstream.run.cli.arguments import CommandParser
from rollstream.run.role_catalogue import ROLES


@dataclass(frozen=True, slots=True)
class Command:
    """A command; its module is below `rollstream.run.cli` (`role` for each role)."""

    name: str
    module: str
    purpose: str


def _commands(folder: str, **purposes: str) -> tuple[Command, ...]:
    return tuple(Command(name, f"{folder}{name}", purpose) for name, purpose in purposes.items())


# In the order of the help.
GROUPS: Mapping[str, tuple[Command, ...]] = {
    "start": (
        *_commands(
            "",
            run="start all roles of CONFIG with a live view; the same command resumes",
            check="check settings, model, data, verifier and machine of CONFIG; starts nothing",
            warmup="create the run's initial model by training on the task's documents",
        ),
        Command(
            "put-model", "put_model", "upload the model at PATH into the store of the run CONFIG"
        ),
        *_commands(
            "",
            plan="compute what a run of MODEL needs on given GPUs, and a configuration that fits",
            profile="measure the engine's step times here; rollouts derive B_max from them",
            tune="propose the settings of CONFIG that train fastest on N GPUs, by simulation",
            simulate="simulate policies on a cluster, with the planners of the service",
        ),
    ),
    "roles": tuple(Command(role.name, "role", role.purpose) for role in ROLES.values()),
    "look": _commands(
        "look.",
        ls="list the runs of a folder: state, step, size, newest record",
        top="watch a run: rates, lag, queues, versions, warnings; q quits",
        report="write RUN/report.html and print a summary; several runs share one page",
        query="query a run's log and archive in SQL; --tables lists the views",
        explore="open runs in the browser: steps, groups, tokens, time, weights, search",
        trace="write a trace of a run, which ui.perfetto.dev opens",
        tail="print a topic's records, one readable line each",
        inspect="show a trajectory: text by version, reward, the steps that trained it",
        config="explain settings: value, where it is set, type, default, meaning",
        diff="compare two runs: settings, outcomes, curves, pairs of prompts, state hashes",
        weights="list, show, verify, diff and export the kept weight versions",
        checkpoints="list and show the trainer's kept checkpoints",
    ),
    "change": _commands(
        "change.",
        fork="create a run from a checkpoint of another one; `run DIR` starts it",
        replay="repeat training steps, copy records, or train offline on trajectories",
    ),
    "maintain": _commands(
        "maintain.",
        audit="check a run's invariants; exit code 1: violated, 2: not all checked",
        backup="copy a run, living or not, so that it can be restored; repeat to complete it",
        restore="make a run from a backup, check it, and print its recovery point",
        rm="delete a run: its topics, objects and folder, and nothing of another run",
        forward="send a run's metrics to TensorBoard or Weights & Biases; resumes",
        trust="let a run of another user import code, follow links, or reach a host",
        health="check a process on this machine; exit code 1: stalled or silent",
    ),
}

GROUP_TITLES = {
    "start": "start a run",
    "roles": "run one role of it",
    "look": "look at a run",
    "change": "make another run from it",
    "maintain": "check, back up, feed to other tools, delete",
}
COMMANDS = {command.name: command for group in GROUPS.values() for command in group}
# Names that users may try, and the command that an error proposes for each.
MEANT = {
    "sizes": "plan", "estimate": "plan",
    "logs": "tail", "status": "top", "watch": "top", "start": "run", "resume": "run",
    "sql": "query", "sft": "warmup", "evaluate": "eval", "compare": "diff", "verify": "audit",
    "rollouts": "rollout", "trainer": "train", "versions": "weights", "show": "inspect",
    "list": "ls", "settings": "config", "doctor": "audit", "delete": "rm", "remove": "rm",
    "snapshot": "backup", "optimise": "tune", "optimize": "tune", "upload": "put-model",
    "push": "put-model", "validate": "check", "lint": "check", "preflight": "check",
}  # fmt: skip
# Commands whose work or exit code is more than their output: they do not end if it is lost.
WORKING = frozenset(COMMANDS) - {"plan", "simulate", *(command.name for command in GROUPS["look"])}
HELP_WORDS = ("-h", "--help")


def choose_parser(words: Sequence[str]) -> tuple[CommandParser, list[str]]:
    """The parser of the command and action that `words` begin with, and the words after their
    names; for `COMMAND --help` of a command with actions the parser lists these. Raises
    `ConfigurationError`, which names the nearest command, if there is no such command.
    """
    name, *rest = words
    if name not in COMMANDS:
        raise ConfigurationError(f"unknown command {name!r}; {_nearest(name)}")
    parsers = command_parsers(name)
    action = parsers[0].action
    if not action:
        return parsers[0], rest
    if rest and rest[0] in HELP_WORDS:
        return _actions_parser(COMMANDS[name], parsers), rest
    by_action = {parser.action: parser for parser in parsers}
    if len(rest) > 1 and rest[0].isalpha() and rest[0] not in by_action and rest[1][:1] != "-":
        raise ConfigurationError(
            f"{name} has no action {rest[0]!r}; it has {', '.join(by_action)} "
            f"(rollstream {name} --help explains them)"
        )
    return by_action[rest.pop(0) if rest and rest[0] in by_action else action], rest


def command_parsers(name: str) -> list[CommandParser]:
    """One for each action, the default first."""
    command = COMMANDS[name]
    module = import_module(f"rollstream.run.cli.{command.module}")
    purposes: Mapping[str, str] = getattr(module, "ACTIONS", {"": command.purpose})
    parsers: list[CommandParser] = []
    for action, purpose in purposes.items():
        parser = CommandParser(name, purpose, action, module.main)
        module.add_arguments(parser)
        parsers.append(parser)
    return parsers


def help_lines() -> Iterator[str]:
    yield "usage: rollstream COMMAND …"
    yield "\nRL post-training of language models as a streaming dataflow."
    for group, commands in GROUPS.items():
        yield f"\n{group}: {GROUP_TITLES[group]}"
        yield from (f"  {command.name:<12} {command.purpose}" for command in commands)
    yield "\n`rollstream COMMAND --help` explains a command; --version prints the release."
    yield "RUN is a run's folder, or its name in runs/; without it most take the newest run."
    yield "\nexample:\n  rollstream run examples/quickstart.toml"


def _nearest(name: str) -> str:
    # Imported only after an error.
    from difflib import get_close_matches

    close = [MEANT[name]] if name in MEANT else get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    nearest = f"nearest: {close[0]}" if close else f"known: {', '.join(COMMANDS)}"
    return f"{nearest} (rollstream --help explains all)"


def _actions_parser(command: Command, parsers: Sequence[CommandParser]) -> CommandParser:
    first = parsers[0]
    actions = "\n".join(
        f"  {action_parser.action:<8} {action_parser.purpose}" for action_parser in parsers
    )
    about = f"{command.purpose}.\n\nactions, {first.action} by default:\n{actions}"
    parser = CommandParser(command.name, about, "", first.main)
    parser.usage = f"rollstream {command.name} [ACTION] …"
    parser.add_examples(
        *(
            f"{action_parser.action} {line}"
            for action_parser in parsers
            for line in action_parser.examples
        )
    )
    return parser
