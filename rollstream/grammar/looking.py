"""Commands that look at runs: report, top, diff."""

from rollstream.grammar.parts import Commands, add, add_json


def add_looking(commands: Commands) -> None:
    """`report` and its neighbours."""
    _add_report(commands)
    _add_diff(commands)


def _add_report(commands: Commands) -> None:
    command = add(
        commands,
        "report",
        "report",
        "write RUN/report.html and print a summary; several runs are laid over each other",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
        "runs/quickstart-0 runs/quickstart-1 --output both.html",
    )
    command.add_argument(
        "runs", metavar="RUN", nargs="+", help="a run's folder, finished or living"
    )
    command.add_argument(
        "--output",
        metavar="FILE",
        help="where to write (default RUN/report.html; ./report.html for several runs)",
    )
    add_json(command)


def _add_diff(commands: Commands) -> None:
    command = add(
        commands,
        "diff",
        "diff",
        "show how two runs differ: settings, outcomes, curves, states",
        "runs/quickstart-0 runs/quickstart-1",
        "runs/quickstart-0 runs/quickstart-1 --json",
    )
    command.add_argument("first", metavar="A", help="a run's folder")
    command.add_argument("second", metavar="B", help="another run's folder")
    add_json(command)
