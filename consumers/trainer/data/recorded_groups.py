"""The records that a take names, as the ledger recorded them."""

from collections.abc import Iterable

from rollstream.consumers.trainer.data.groups import ReceivedCompletion
from rollstream.streams.bus import Bus
from rollstream.streams.reader import read_all_at
from rollstream.streams.records import Annotation, Trajectory
from rollstream.streams.values import AnnotationUsed, Member


def fetch_group(bus: Bus, members: Iterable[Member]) -> list[ReceivedCompletion]:
    """Returns the recorded completions of a group that a take names; raises `ValueError` if an
    address has other bytes than recorded.
    """
    arrived: list[ReceivedCompletion] = []
    take_members = list(members)
    log_records = read_all_at(bus, "trajectories", [member.at for member in take_members])
    for member, received in zip(take_members, log_records, strict=True):
        record = received.record
        if not isinstance(record, Trajectory) or received.hash != member.hash:
            raise ValueError(
                f"trajectories {member.at} is not {member.trajectory} as the ledger recorded it"
            )
        arrived.append(ReceivedCompletion(member, record))
    return arrived


def fetch_annotations(
    bus: Bus, used: Iterable[AnnotationUsed]
) -> dict[tuple[str, str], Annotation]:
    """Returns the recorded annotations that a take names, by (trajectory, name); raises
    `ValueError` if an address has other bytes than recorded.
    """
    annotations: dict[tuple[str, str], Annotation] = {}
    notes = list(used)
    log_records = read_all_at(bus, "annotations", [note.at for note in notes])
    for note, received in zip(notes, log_records, strict=True):
        record = received.record
        if not isinstance(record, Annotation) or received.hash != note.hash:
            raise ValueError(f"annotations {note.at} is not the record that the ledger names")
        annotations[(note.trajectory, note.name)] = record
    return annotations
