"""`rollstream replay RUN --to BUS`: copies a run's records to another bus."""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing

from rollstream.analysis.fields import check_topic
from rollstream.cli.change.progress import progress_bar
from rollstream.cli.signals import warn
from rollstream.consumers.replay.topic_copy import (
    HISTORY,
    CopiedTopic,
    CopyRequest,
    copy_topic,
    count_records,
    prepare_target,
)
from rollstream.errors import ConfigurationError
from rollstream.runs.replay import message_filter, needs_steps, parse_conditions
from rollstream.runs.replay_output import ReplaySource, open_replay_source
from rollstream.streams.bus import Message
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import is_dead_letter_topic


def main(arguments: argparse.Namespace) -> int:
    """Copy the topics, verify them, and print what was copied."""
    topics = arguments.topic or (["trajectories"] if arguments.where else [*HISTORY])
    for topic in topics:
        check_topic(topic)
        if is_dead_letter_topic(topic):
            raise ConfigurationError(f"{topic} holds undecodable bytes; it is not copied")
    if arguments.to.startswith("memory:"):
        raise ConfigurationError("--to memory: would end with this process; give sqlite:FOLDER")
    with open_replay_source(arguments.runs[0], arguments.name) as source:
        here = _present(source, topics, bool(arguments.topic))
        wanted = CopyRequest(here, arguments.to, _keep(source, arguments.where, here))
        with closing(open_bus(arguments.to)) as target:
            prepare_target(source.log, target, wanted)
            with progress_bar("records", count_records(source.log, here)) as advance:
                done = [copy_topic(source.log, target, t, wanted, advance) for t in here]
    if arguments.json:
        found = [dataclasses.asdict(one) for one in done]
        print(json.dumps({"to": arguments.to, "topics": found}))
    else:
        _print_copied(done, arguments.to)
    return 0


def _present(source: ReplaySource, topics: Sequence[str], named: bool) -> list[str]:
    """Returns the topics with records in the source; raises if a named topic has none."""
    here: list[str] = []
    for topic in dict.fromkeys(topics):
        if any(source.log.end(topic).values()):
            here.append(topic)
        elif named:
            raise ConfigurationError(
                f"{source.location.name} holds no records in {topic}"
                + ("" if source.location.bus else f"; it is an archive, which keeps {_history()}")
            )
        else:
            warn(f"{topic} holds no records")
    if not here:
        raise ConfigurationError(f"{source.location.name} holds no records to copy")
    return here


def _keep(
    source: ReplaySource, where: Sequence[str], topics: Sequence[str]
) -> Callable[[Message], bool] | None:
    if not where:
        return None
    conditions = {topic: parse_conditions(where, topic) for topic in topics}
    asked = any(needs_steps(conditions[topic]) for topic in topics if topic == "trajectories")
    return message_filter(conditions, source.recorded().step_of() if asked else {})


def _print_copied(done: Sequence[CopiedTopic], to: str) -> None:
    for one in done:
        more = [
            f"{number} {what}"
            for number, what in (
                (one.left_out, "left out"),
                (one.already, "were there before"),
                (one.forgotten, "truncated in the source"),
            )
            if number
        ]
        beside = f" ({', '.join(more)})" if more else ""
        print(f"{one.topic}: {one.records} records, content {one.content_hash}{beside}")
    print(f"{to} holds the same bytes, partitions and order as the source")


def _history() -> str:
    return ", ".join(HISTORY)
