"""The Kafka bus.

`bus` implements the contract, `address` parses its URL, `tokens` signs in at MSK. Only `client`
imports kafka-python; `log_filter` limits its log. `producer` appends, `cursors` reads at explicit
positions, `prefetch` serves polling loops, `group` is a member of a consumer group. `admin` retries
cluster requests, `refusals` explains errors, and `topic_settings` maps topics to the broker's
settings.
"""

from typing import TYPE_CHECKING

from rollstream.exports import lazy_exports

if TYPE_CHECKING:
    from rollstream.streams.kafka.address import (
        KafkaAddress as KafkaAddress,
        parse_kafka_url as parse_kafka_url,
    )
    from rollstream.streams.kafka.bus import KafkaBus as KafkaBus

__getattr__ = lazy_exports(__name__)
