"""`rollstream inspect TRAJECTORY [RUN]`: shows everything about one trajectory and its text."""

import argparse
import json

from rich.console import Console

from rollstream.analysis.place import asked_place
from rollstream.analysis.portrait import draw
from rollstream.analysis.session import Session
from rollstream.analysis.story import in_json, names_of, story_of
from rollstream.analysis.text import Text
from rollstream.commands.pipes import ending_quietly
from rollstream.commands.query import warn
from streams.errors import ConfigurationError


@ending_quietly
def main(arguments: argparse.Namespace) -> int:
    """Show one trajectory, or all trajectories of a group."""
    name, run = arguments.trajectory, arguments.run
    ways = [name is not None and run is not None, arguments.group is not None, arguments.last]
    if arguments.last or arguments.group is not None:
        if sum(ways) > 1:
            raise ConfigurationError("give a trajectory's name, --group N or --last: one of them")
        name, run = None, name  # a single positional argument is the run
    place = asked_place(run, arguments.name, warn)
    text = Text(place.tokenizers())
    console = Console(highlight=False)
    with Session(place, warn, arguments.skip_corrupt) as session:
        for number, one in enumerate(names_of(session, name, arguments.group, arguments.last)):
            story = story_of(session, one)
            if arguments.json:
                print(json.dumps(in_json(story, text)))
                continue
            if number:
                console.rule(style="dim")
            console.print(draw(story, text, arguments.logprobs))
    return 0
