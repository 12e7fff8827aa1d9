"""Exports all names that user code imports, which keep their meaning from release to release
(docs/reference/python-api.md). Importing it is light: torch, Kafka and DuckDB are imported on first
use.
"""

from typing import TYPE_CHECKING, cast

from rollstream import open_run
from rollstream.errors import ConfigurationError
from rollstream.exports import lazy_exports
from rollstream.producers import sandbox
from rollstream.producers.scoring.functions import Finished
from rollstream.producers.tasks.base import (
    Document,
    Reply,
    Score,
    Task,
    TaskPrompt,
    Turns,
    shuffled,
)
from rollstream.producers.tasks.text import TaskText
from rollstream.producers.tasks.trained_tokenizer import TrainedTokenizer
from rollstream.streams import writer
from rollstream.streams.bus import Bus
from rollstream.streams.connect import open_bus
from rollstream.streams.records import Annotation, Record
from rollstream.streams.values import Address

if TYPE_CHECKING:
    from rollstream.consumers.objectives.losses.base import SurrogateInputs as SurrogateInputs
    from rollstream.consumers.trainer.data.rule_checks import (
        check_advantage as check_advantage,
        check_choice as check_choice,
    )
    from rollstream.consumers.trainer.data.selection import GroupCandidate as GroupCandidate
    from rollstream.consumers.trainer.learn.surrogate_check import (
        check_surrogate as check_surrogate,
    )

__all__ = [
    "Annotation",
    "Document",
    "Finished",
    "GroupCandidate",
    "Reply",
    "Score",
    "SurrogateInputs",
    "Task",
    "TaskPrompt",
    "TaskText",
    "TrainedTokenizer",
    "Turns",
    "check_advantage",
    "check_choice",
    "check_surrogate",
    "open_bus",
    "open_run",
    "publish",
    "sandbox",
    "shuffled",
]

__getattr__ = lazy_exports(__name__)


def publish(
    bus: Bus, topic: str, key: str, record: Record, partition: int | None = None
) -> Address:
    """Returns the record's address once it is durable. Raises `RecordTooLarge` before anything is
    written, `BusError` with the record in doubt, and `ConfigurationError` for an annotation under
    another key than its group, where no trainer would find it.
    """
    if not isinstance(cast(object, key), str):
        raise ConfigurationError(f"publish: a key is text, got {key!r}")
    if isinstance(record, Annotation) and key != str(record.group):
        raise ConfigurationError(
            f"publish: the key of an annotation is its group, {str(record.group)!r}, got {key!r}"
        )
    return writer.publish(bus, topic, key, record, partition)
