"""`rollstream inspect TRAJECTORY [RUN]`: shows everything about one trajectory and its text."""

import argparse
import json

from rich.console import Console

from rollstream.analysis.locate import locate_asked_run
from rollstream.analysis.render import render_trajectory
from rollstream.analysis.session import QuerySession
from rollstream.analysis.text import TokenText
from rollstream.analysis.trajectory import details_json, trajectory_details, trajectory_names
from rollstream.cli.signals import quiet_on_closed_pipe, warn
from rollstream.errors import ConfigurationError


@quiet_on_closed_pipe
def main(arguments: argparse.Namespace) -> int:
    """Show one trajectory, or all trajectories of a group."""
    name, run = arguments.trajectory, arguments.run
    ways = [name is not None and run is not None, arguments.group is not None, arguments.last]
    if arguments.last or arguments.group is not None:
        if sum(ways) > 1:
            raise ConfigurationError("give a trajectory's name, --group N or --last: one of them")
        name, run = None, name  # a single positional argument is the run
    location = locate_asked_run(run, arguments.name, warn)
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
