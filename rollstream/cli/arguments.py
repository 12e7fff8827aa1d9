"""Parses the command line of one command (`CommandParser`), and defines the arguments that several
commands share (`add_…`).

RUN may stand first or last: `tail RUN TOPIC` and `tail TOPIC RUN` are the same (`parse`). A bare
name is looked for in `runs/`, and without RUN a command takes the newest run (`find_runs`).
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rollstream.analysis.locate import RUNS_FOLDER, may_hold_run, newest_run, run_path
from rollstream.errors import ConfigurationError

EXAMPLE_RUN = "runs/quickstart-0/config.json"
RUN_HELP = "a run's folder, its name in runs/, or its config.json; default: newest run"
RUN_OR_ARCHIVE_HELP = (
    "a run's folder, its name in runs/, its config.json, or an archive (folder or store URL); "
    "default: newest run"
)
RUN_OR_STORE_HELP = (
    "a run's folder, its name in runs/, its config.json, or a store (folder or URL); "
    "default: newest run"
)
INSIDE_RUN = ("store", "archive", "weights")
"""A folder with one of these folders, or with a run's configuration, is a run, an archive or a
store, so it may be meant by RUN.
"""


COUNT_MAX = 1 << 31  # of an option that counts: more than anything has, and less than C's numbers


def whole_number_from(least: int, most: int) -> Callable[[str], int]:
    """Returns the type of an option whose value is a whole number from `least` to `most`."""

    def parsed(text: str) -> int:
        with suppress(ValueError):
            if least <= (number := int(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {least} to {most}, got {text!r}"
        )

    return parsed


_KEY_NAME = r"[A-Za-z0-9._=-]{1,200}"  # a part of an object's key


def _process_name(pattern: str) -> Callable[[str], str]:
    """Returns the type of the name of a process. An empty one would be that of several machines,
    whose processes fence each other out.
    """

    def parsed(text: str) -> str:
        if not text.strip():
            raise argparse.ArgumentTypeError(
                "must not be empty (perhaps an unset variable of the shell)"
            )
        if re.fullmatch(pattern, text, re.DOTALL) is None:
            raise argparse.ArgumentTypeError(
                f"must be at most 200 of the characters A-Z a-z 0-9 . _ = -, got {text!r}"
            )
        return text

    return parsed


class CommandParser(argparse.ArgumentParser):
    """Parses one command, or one action (sub-command) of it. A module of a command adds its
    arguments and examples in `add_arguments(parser)`. Then `parse` parses the words, `find_runs`
    replaces names of runs by folders, and `main` runs the command. The help ends with the examples.
    """

    def __init__(
        self,
        command: str,
        purpose: str,
        action: str,
        main: Callable[[argparse.Namespace], int],
    ) -> None:
        self.title = f"{command} {action}".rstrip()
        self.command, self.purpose, self.action, self.main = command, purpose, action, main
        self.examples: list[str] = []
        self._behind_run: tuple[str, ...] = ()
        self._run_required = True
        self._runs: tuple[str, ...] = ()
        super().__init__(
            prog=f"rollstream {self.title}",
            description=f"{purpose[0].upper()}{purpose[1:]}.".replace("..", "."),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.set_defaults(command=command, action=action)

    def add_examples(self, *examples: str) -> None:
        """Add examples, each without `rollstream` and the command's name."""
        self.examples += examples
        lines = "".join(f"\n  {line}" for line in self.example_lines())
        self.epilog = f"example{'s' if len(self.examples) > 1 else ''}:{lines}"

    def example_lines(self) -> list[str]:
        """Returns the examples as whole command lines."""
        return [f"rollstream {self.title} {example}".rstrip() for example in self.examples]

    def add_run(
        self,
        help: str = RUN_HELP,
        before: tuple[str, ...] = (),
        required: bool = True,
        with_trust: bool = True,
    ) -> None:
        """Add RUN; without it the command takes the newest run. It is an error if there is none,
        unless `required` is False. `before` names the command's other positional arguments, which
        the caller adds after this call: RUN stands before them, but may also stand after them.
        `with_trust` adds `--trust`.
        """
        self.add_argument("run", metavar="RUN", nargs="?", help=help)
        if with_trust:
            self._add_trust()
        self._behind_run, self._run_required = before, required
        self._runs = ("run",)

    def add_runs(self, help: str) -> None:
        """Add any number of runs; without one the command takes the newest run."""
        self.add_argument("runs", metavar="RUN", nargs="*", help=help)
        self._add_trust()
        self._runs = ("runs",)

    def add_named_run(self, name: str, metavar: str, help: str) -> None:
        """Add a run that the command line must name."""
        self.add_argument(name, metavar=metavar, help=help)
        if not self._runs:
            self._add_trust()
        self._runs = (*self._runs, name)

    def _add_trust(self) -> None:
        help = "import the code that RUN names, although you did not begin RUN on this machine"
        self.add_argument("--trust", action="store_true", dest="is_trusted", help=help)

    def add_configuration(self) -> None:
        """Add CONFIG and the options that override its settings."""
        help = "TOML file, a run's config.json, its folder, or its name in runs/"
        self.add_argument("configuration", metavar="CONFIG", help=help)
        self._runs = ("configuration",)
        self.add_overrides("override one setting, e.g. trainer.lr=1e-4; wins over all else")
        self.add_argument("--run", metavar="DIR", help="the run's folder")
        self.add_argument("--seed", metavar="N", help="the run's seed")

    def add_overrides(self, help: str) -> None:
        self.add_argument(
            "--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides", help=help
        )

    def add_conditions(self, help: str) -> None:
        self.add_argument("--where", metavar="FIELD=VALUE", action="append", default=[], help=help)

    def add_json(self) -> None:
        self.add_argument("--json", action="store_true", help="print JSON lines instead of text")

    def add_process_name(self) -> None:
        help = f"name of this process (default {self.command})"
        kind = _process_name(_KEY_NAME if self.command == "rollout" else r".*\S.*")
        self.add_argument("--name", default=self.command, type=kind, help=help)

    def add_log(self) -> None:
        help = "format of the log on stderr: text, or json with one object a line (default text)"
        self.add_argument("--log", choices=("text", "json"), default="text", help=help)

    def add_accept(self) -> None:
        help = "resume with a configuration that differs from the run's; the ledger records it"
        self.add_argument("--accept-config", action="store_true", help=help)

    def add_archive_run(self) -> None:
        help = "run name, if an archive holds several"
        self.add_argument("--name", metavar="NAME", help=help)

    def add_archive(self) -> None:
        """Add the options of commands that read log and archive as one."""
        self.add_archive_run()
        help = "leave out damaged archive files; reads every file completely first"
        self.add_argument("--skip-corrupt", action="store_true", help=help)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse the words after the command's name; options may stand between arguments. RUN is put
        into its place wherever it stood, or is taken from the option `--run RUN` (of `query`).
        Raises `ConfigurationError` for characters that neither a file's name nor a query can have.
        """
        for word in words:
            _check_characters(word)
        # Words behind `--` are no options; only `parse_args` keeps that for each argument.
        parse = self.parse_args if "--" in words else self.parse_intermixed_args
        arguments = parse(words)
        if self._behind_run:
            _order_run(arguments, self._behind_run)
        if named := getattr(arguments, "named", None):
            if arguments.run is not None:
                self.error(f"two runs are given: {arguments.run} and --run {named}")
            arguments.run = named
        return arguments

    def find_runs(self, arguments: argparse.Namespace) -> None:
        """Replace each bare name of a run by its folder in `runs/`, and a missing RUN by the newest
        run. Raises `ConfigurationError` if there is none and RUN is required.
        """
        values = vars(arguments)
        for name in self._runs:
            given = values[name]
            if isinstance(given, str):
                _check_name(given)
                values[name] = run_path(given)
            elif given:
                for named in given:
                    _check_name(named)
                values[name] = [run_path(named) for named in given]
            elif self._run_required or next(RUNS_FOLDER.glob("*/config.json"), None):
                found = str(newest_run(RUNS_FOLDER))
                print(f"rollstream: using the newest run, {found}", file=sys.stderr)
                values[name] = found if given is None else [found]


def _check_characters(word: str) -> None:
    try:
        is_possible = b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise ConfigurationError(f"{word[:80]!r} has characters that no argument can have")


def _check_name(named: str) -> None:
    """Raise `ConfigurationError` for a run whose name is empty or too long for any path."""
    if not named:
        raise ConfigurationError("the run's name is empty, perhaps an unset variable of the shell")
    try:
        os.lstat(named)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigurationError(f"{named[:80]}…: no such run; its name is too long") from None


def _order_run(arguments: argparse.Namespace, behind: Sequence[str]) -> None:
    """Correct the order of the arguments if RUN stood last, because argparse takes the first word
    for RUN. RUN stood first if the first word is a run, or looks like one or unlike the last word,
    which has spaces, and the last word is not a run. Otherwise move the last word to the front and
    the others back by one place.
    """
    values = vars(arguments)
    names = ["run", *behind]
    given = [values[name] for name in names if values[name] is not None]
    if values["run"] is None:
        return
    is_first = _may_be_run(given[0]) or (" " in given[-1] and " " not in given[0])
    if is_first and (len(given) == 1 or not _is_run(given[-1])):
        return
    first, *others = (values[name] for name in names)
    values.update(zip(names, (others[-1], first, *others[:-1]), strict=True))


def _may_be_run(word: str) -> bool:
    """Returns whether the word is a run, or has the form of a path or URL."""
    is_path = not any(c.isspace() for c in word) and bool({"/", ":"} & set(word))
    return is_path or _is_run(word)


def _is_run(word: str) -> bool:
    """Returns whether the word is an existing configuration file, or a folder that holds a run."""
    path = run_path(word)
    if path.endswith((".json", ".toml")):
        return os.path.isfile(path)
    is_store = any(os.path.isdir(os.path.join(path, name)) for name in INSIDE_RUN)
    return is_store or (os.path.isdir(path) and may_hold_run(Path(path)))
