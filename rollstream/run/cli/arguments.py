"""Parses one command's command line, with the arguments that several commands share (`add_…`)."""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import fill

from rollstream.errors import ConfigurationError
from rollstream.look.query.locate import RUNS_FOLDER, may_hold_run, newest_run, run_path

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
# A folder with one of these folders, or with a run's configuration, may be meant by RUN.
INSIDE_RUN = ("store", "archive", "weights")


# Of an option that counts: more than anything has, and less than C's numbers.
COUNT_MAX = 1 << 31
HELP_COLUMNS = 80


def whole_number_from(minimum: int, maximum: int) -> Callable[[str], int]:
    def parsed(text: str) -> int:
        with suppress(ValueError):
            if minimum <= (number := int(text)) <= maximum:
                return number
        raise argparse.ArgumentTypeError(
            f"must be a whole number from {minimum} to {maximum}, got {text!r}"
        )

    return parsed


# A part of an object's key.
_KEY_NAME = r"[A-Za-z0-9._=-]{1,200}"


def _process_name(pattern: str) -> Callable[[str], str]:
    def parsed(text: str) -> str:
        # Machines that share an empty name would fence each other's processes out.
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
    """The command parser of a command, or one action (sub-command): a module adds arguments and
    examples in `add_arguments(parser)`, `parse` parses the words, `find_runs` replaces names of
    runs by folders, and `main` runs the command.
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
        """Each without `rollstream` and the command's name."""
        self.examples += examples
        lines = "".join(f"\n  {line}" for line in self.example_lines())
        self.epilog = f"example{'s' if len(self.examples) > 1 else ''}:{lines}"

    def add_figures(self, *names: str) -> None:
        """Adds the definitions of the figures that the command prints."""
        from rollstream.look.figures.definitions import figure_of

        figures = [figure_of(name) for name in names]
        lines = (f"  {figure.label}: {figure.definition}" for figure in figures)
        text = "\n".join(fill(line, HELP_COLUMNS, subsequent_indent="    ") for line in lines)
        self.epilog = f"{self.epilog or ''}\n\nfigures:\n{text}"

    def example_lines(self) -> list[str]:
        return [f"rollstream {self.title} {example}".rstrip() for example in self.examples]

    def add_run(
        self,
        help: str = RUN_HELP,
        before: tuple[str, ...] = (),
        required: bool = True,
        with_trust: bool = True,
    ) -> None:
        """Adds the run by default the newest run: an error if there is none and it is `required`.
        `before` names the other positional arguments, which the caller adds afterwards.
        """
        self.add_argument("run", metavar="RUN", nargs="?", help=help)
        if with_trust:
            self._add_trust()
        self._behind_run, self._run_required = before, required
        self._runs = ("run",)

    def add_runs(self, help: str) -> None:
        """Takes any number; without one the command takes the newest."""
        self.add_argument("runs", metavar="RUN", nargs="*", help=help)
        self._add_trust()
        self._runs = ("runs",)

    def add_named_run(self, name: str, metavar: str, help: str) -> None:
        self.add_argument(name, metavar=metavar, help=help)
        if not self._runs:
            self._add_trust()
        self._runs = (*self._runs, name)

    def _add_trust(self) -> None:
        help = "import the code that RUN names, although you did not begin RUN on this machine"
        self.add_argument("--trust", action="store_true", dest="is_trusted", help=help)

    def add_configuration(self) -> None:
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
        """Adds the archive of commands that read log and archive as one."""
        self.add_archive_run()
        help = "leave out damaged archive files; reads every file completely first"
        self.add_argument("--skip-corrupt", action="store_true", help=help)

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Options may stand between arguments, RUN first or last or in `--run RUN` (of `query`).
        Raises `ConfigurationError` for characters that neither a file's name nor a query can have.
        """
        for word in words:
            _check_characters(word)
        # Words behind `--` are no options; only `parse_args` keeps that for each argument.
        parse = self.parse_args if "--" in words else self.parse_intermixed_args
        arguments = parse(words)
        if self._behind_run:
            _order_run(arguments, self._behind_run)
        if run_option := getattr(arguments, "named", None):
            if arguments.run is not None:
                self.error(f"two runs are given: {arguments.run} and --run {run_option}")
            arguments.run = run_option
        return arguments

    def find_runs(self, arguments: argparse.Namespace) -> None:
        """Replaces each bare name of a run by its folder in `runs/`, and a missing RUN by the
        newest. Raises `ConfigurationError` if there is none and RUN is required.
        """
        values = vars(arguments)
        for name in self._runs:
            argument = values[name]
            if isinstance(argument, str):
                _check_name(argument)
                values[name] = run_path(argument)
            elif argument:
                for run_name in argument:
                    _check_name(run_name)
                values[name] = [run_path(run_name) for run_name in argument]
            elif self._run_required or next(RUNS_FOLDER.glob("*/config.json"), None):
                newest = str(newest_run(RUNS_FOLDER))
                print(f"rollstream: using the newest run, {newest}", file=sys.stderr)
                values[name] = newest if argument is None else [newest]


def _check_characters(word: str) -> None:
    try:
        is_possible = b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        is_possible = False
    if not is_possible:
        raise ConfigurationError(f"{word[:80]!r} has characters that no argument can have")


def _check_name(run_name: str) -> None:
    if not run_name:
        raise ConfigurationError("the run's name is empty, perhaps an unset variable of the shell")
    try:
        os.lstat(run_name)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigurationError(
                f"{run_name[:80]}…: no such run; its name is too long"
            ) from None


def _order_run(arguments: argparse.Namespace, positionals: Sequence[str]) -> None:
    values = vars(arguments)
    names = ["run", *positionals]
    words = [values[name] for name in names if values[name] is not None]
    if values["run"] is None:
        return
    # argparse takes the first word for RUN. It is RUN if it may be a run, or only the last word has
    # spaces, and the last word is no run; else the last word moves to the front.
    is_first = _may_be_run(words[0]) or (" " in words[-1] and " " not in words[0])
    if is_first and (len(words) == 1 or not _is_run(words[-1])):
        return
    first, *others = (values[name] for name in names)
    values.update(zip(names, (others[-1], first, *others[:-1]), strict=True))


def _may_be_run(word: str) -> bool:
    is_path = not any(c.isspace() for c in word) and bool({"/", ":"} & set(word))
    return is_path or _is_run(word)


def _is_run(word: str) -> bool:
    path = run_path(word)
    if path.endswith((".json", ".toml")):
        return os.path.isfile(path)
    is_store = any(os.path.isdir(os.path.join(path, name)) for name in INSIDE_RUN)
    return is_store or (os.path.isdir(path) and may_hold_run(Path(path)))
