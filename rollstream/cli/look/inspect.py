"""`rollstream inspect TRAJECTORY [RUN]`: shows everything about one trajectory and its text."""

import argparse
import json

from rich.console import Console

from rollstream.analysis.locate import locate_asked_run
from rollstream.analysis.render import render_trajectory
from rollstream.analysis.session import QuerySession, TokenText
from rollstream.analysis.trajectory import details_json, trajectory_details, trajectory_names
from rollstream.cli.arguments import RUN_OR_ARCHIVE_HELP, CommandParser
from rollstream.cli.signals import quiet_on_closed_pipe, warn
from rollstream.errors import ConfigurationError


def add_arguments(command: CommandParser) -> None:
    command.add_examples("runs/quickstart-0 12.3", "--last --logprobs", "--group 12 --json")
    command.add_run(RUN_OR_ARCHIVE_HELP, before=("trajectory",))
    command.add_argument(
        "trajectory",
        metavar="TRAJECTORY",
        nargs="?",
        help="its name, or the first characters of it",
    )
    command.add_argument("--group", metavar="N", type=int, help="all trajectories of a group")
    command.add_argument("--last", action="store_true", help="the trajectory that finished last")
    command.add_argument("--logprobs", action="store_true", help="also print a table of all tokens")
    command.add_archive()
    command.add_json()


@quiet_on_closed_pipe
def main(arguments: argparse.Namespace) -> int:
    """Show one trajectory, or all trajectories of a group."""
    name: str | None = arguments.trajectory
    if sum((name is not None, arguments.group is not None, arguments.last)) > 1:
        raise ConfigurationError("give a trajectory's name, --group N or --last: one of them")
    location = locate_asked_run(arguments.run, arguments.name, warn)
    text = TokenText(location.tokenizers())
    console = Console(highlight=False)
    with QuerySession(location, warn, arguments.skip_corrupt) as session:
        for number, one in enumerate(
            trajectory_names(session, name, arguments.group, arguments.last)
        ):
            details = trajectory_details(session, one)
            if arguments.json:
                print(json.dumps(details_json(details, text)))
                continue
            if number:
                console.rule(style="dim")
            console.print(render_trajectory(details, text, arguments.logprobs))
    return 0
