"""`rollstream replay RUN --to BUS` copies the records of a run or an archive to another bus, byte
for byte (`topic_copy`). The same command resumes.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from contextlib import closing

from rollstream.errors import ConfigurationError
from rollstream.keep.replay import topic_copy
from rollstream.keep.replay.conditions import message_filter, needs_steps, parse_conditions
from rollstream.keep.replay.recorded_steps import steps_of_run
from rollstream.keep.source import RunSource, open_run_source
from rollstream.look.query.fields import check_topic
from rollstream.run.signals import progress_bar, warn
from rollstream.streams.bus import Message
from rollstream.streams.connect import open_bus
from rollstream.streams.topics import is_dead_letter_topic


def main(arguments: argparse.Namespace) -> int:
    """Copy the topics, or the records that meet `--where`, to another bus, byte for byte, and print
    count and hash of each topic. Returns the exit code 0.
    """
    topics = arguments.topic or (["trajectories"] if arguments.where else [*topic_copy.HISTORY])
    for topic in topics:
        check_topic(topic)
        if is_dead_letter_topic(topic):
            raise ConfigurationError(f"{topic} holds undecodable bytes; it is not copied")
    source_of = open_run_source(arguments.runs[0], arguments.name, arguments.is_trusted)
    with source_of as source:
        present = _present(source, topics, bool(arguments.topic))
        keep = _keep(source, arguments.where, present)
        with closing(open_bus(arguments.to)) as target:
            topic_copy.prepare_target(source.log, target, present, arguments.to, keep)
            with progress_bar("records", topic_copy.count_records(source.log, present)) as advance:
                done = [
                    topic_copy.copy_topic(source.log, target, topic, arguments.to, keep, advance)
                    for topic in present
                ]
    if arguments.json:
        topic_lines = [dataclasses.asdict(copied) for copied in done]
        print(json.dumps({"to": arguments.to, "topics": topic_lines}))
    else:
        _print_copied(done, arguments.to)
    return 0


def _present(source: RunSource, topics: Sequence[str], is_typed: bool) -> list[str]:
    """Returns the `topics` with records. Raises `ConfigurationError` if none has, or one that the
    user named has none.
    """
    present: list[str] = []
    history = ", ".join(topic_copy.HISTORY)
    for topic in dict.fromkeys(topics):
        if any(source.log.end(topic).values()):
            present.append(topic)
        elif is_typed:
            raise ConfigurationError(
                f"{source.location.name} holds no records in {topic}"
                + ("" if source.location.bus else f"; it is an archive, which keeps {history}")
            )
        else:
            warn(f"{topic} holds no records")
    if not present:
        raise ConfigurationError(f"{source.location.name} holds no records to copy")
    return present


def _keep(
    source: RunSource, where: Sequence[str], topics: Sequence[str]
) -> Callable[[Message], bool] | None:
    if not where:
        return None
    conditions = {topic: parse_conditions(where, topic) for topic in topics}
    with_steps = any(needs_steps(conditions[topic]) for topic in topics if topic == "trajectories")
    return message_filter(conditions, steps_of_run(source).step_of() if with_steps else {})


def _print_copied(done: Sequence[topic_copy.CopiedTopic], to: str) -> None:
    for copied in done:
        more = [
            f"{number} {what}"
            for number, what in (
                (copied.left_out, "left out"),
                (copied.already, "were there before"),
                (copied.forgotten, "truncated in the source"),
            )
            if number
        ]
        beside = f" ({', '.join(more)})" if more else ""
        print(f"{copied.topic}: {copied.records} records, content {copied.content_hash}{beside}")
    print(f"{to} holds the same bytes, partitions and order as the source")
