"""Commands that look at runs: report, top, diff."""

from rollstream.grammar.parts import Commands, add, add_json


def add_looking(commands: Commands) -> None:
    """`report` and its neighbours."""
    _add_report(commands)


def _add_report(commands: Commands) -> None:
    command = add(
        commands,
        "report",
        "report",
        "write RUN/report.html and print a summary, of a finished or a living run",
        "runs/quickstart-0",
        "runs/quickstart-0 --json",
    )
    command.add_argument("run", metavar="RUN", help="the run's folder")
    command.add_argument(
        "--output", metavar="FILE", help="where to write (default RUN/report.html)"
    )
    add_json(command)
