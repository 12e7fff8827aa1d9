"""Finds and removes what a run has in a Kafka cluster: the topics of its prefix, and its groups."""

import os
import time

from rollstream.deadline import Deadline
from rollstream.errors import BusError, LeaseHeld
from rollstream.streams.kafka.address import parse_kafka_url, read_secrets
from rollstream.streams.kafka.admin import ANSWER_S, RetryingAdmin
from rollstream.streams.kafka.client import Admin, base_settings
from rollstream.streams.kind import LogContents
from rollstream.streams.removal import own_groups, own_topics

GONE_S = 60.0
"""Longest wait for deleted topics to leave the listing; brokers take seconds."""


def cluster_contents(url: str) -> LogContents:
    """Returns what belongs to the run with this URL. Raises `LeaseHeld` if a group has members."""
    prefix = parse_kafka_url(url).prefix
    admin = _admin(url)
    try:
        present = admin.call("list topics", lambda a: a.topic_names())
        group_names = admin.call("list consumer groups", lambda a: a.group_names())
        topics, groups = own_topics(prefix, present), own_groups(prefix, present, group_names)
        members = admin.call("look up members", lambda a: a.members(groups))
        if busy := [name for name, count in members.items() if count]:
            raise LeaseHeld(
                f"consumer groups of the run have members ({', '.join(busy)}); stop those programs"
            )
        sizes = admin.call("look up sizes", lambda a: a.log_bytes(topics)) if topics else {}
    finally:
        admin.close()
    return LogContents(str(parse_kafka_url(url)), topics, groups, sum(sizes.values()))


def remove_from_cluster(url: str, contents: LogContents) -> None:
    """Remove these topics and groups. Raises `BusError` if the brokers keep some."""
    admin = _admin(url)
    try:
        groups, topics = contents.groups, contents.topics
        refused = admin.call("delete consumer groups", lambda a: a.delete_groups(groups))
        if refused:
            raise BusError(f"cannot delete consumer groups at {contents.where}: {refused}")
        admin.call("delete topics", lambda a: a.delete_topics(topics))
        deadline = Deadline(GONE_S)
        while set(topics) & set(admin.call("list topics", lambda a: a.topic_names())):
            if deadline.passed():
                raise BusError(
                    f"{contents.where}: topics are still listed {GONE_S:.0f} s after their "
                    "deletion; is delete.topic.enable set on the brokers?"
                )
            time.sleep(0.1)
    finally:
        admin.close()


def _admin(url: str) -> RetryingAdmin:
    address = parse_kafka_url(url)
    settings = base_settings(address, read_secrets(address, os.environ))
    return RetryingAdmin(str(address), lambda: Admin(settings), ANSWER_S)
