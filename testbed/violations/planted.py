"""Kinds of violation: how each is planted, which invariant it breaks, and audit's text."""

import sqlite3
from collections.abc import Callable

import numpy as np

from rollstream.storage.stores.json_objects import encode_json as document
from rollstream.storage.weights.manifest import read_manifest
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import Envelope, encode
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import (
    Annotation,
    Applied,
    GroupClosed,
    Record,
    Take,
    TakesRepeated,
    Trajectory,
)
from rollstream.streams.values import Address, AnnotationUsed, GroupMembers, Member, Span, Version
from rollstream.streams.writer import publish
from testbed.violations.healthy_run import RUN, AuditedRun, admitted, announced, completion, done

Plant = Callable[[AuditedRun], None]


def first(run: AuditedRun, name: str) -> Member:
    """The first completion of this name in the run."""
    found = (at for at in members_of(run) if at.trajectory == name)
    return next(found)


def members_of(run: AuditedRun) -> list[Member]:
    reader = TopicReader(run.bus, "trajectories", from_begin(run.bus, "trajectories"))
    read = reader.read_to(run.bus.end("trajectories"))
    return [
        Member(one.record.trajectory, one.address, one.hash)
        for one in read
        if isinstance(one.record, Trajectory)
    ]


def take(
    step: int,
    *members: Member,
    group: int | None = None,
    annotations: tuple[AnnotationUsed, ...] = (),
) -> Take:
    begun = () if group is None else (GroupMembers(group, members),)
    return Take(step, 0, 0, members, begun, annotations)


# ---- invariant 1 ---------------------------------------------------------------------------------


def closes_a_trained_group(run: AuditedRun) -> None:
    run.record(GroupClosed(0, "dead", "", 3))


def closes_a_group_that_was_never_admitted(run: AuditedRun) -> None:
    run.record(GroupClosed(99, "dead", "", 3))


def admits_twice(run: AuditedRun) -> None:
    run.admit(3)


def states_more_than_it_trained(run: AuditedRun) -> None:
    run.train(3, {5: [first(run, "5.0"), first(run, "5.1")]}, counts={"trained": 3}, tokens=12)
    run.publish_version(3, None)


def lets_dispatch_close_a_group(run: AuditedRun) -> None:
    run.admissions.append([("5", GroupClosed(5, "dead", "", 3))])


def takes_a_stranger_into_a_group(run: AuditedRun) -> None:
    stranger = run.complete(completion(5, 7, 1))
    run.record(take(3, first(run, "5.0"), stranger, group=5))


def begins_a_group_and_trains_nothing_of_it(run: AuditedRun) -> None:
    both = (first(run, "5.0"), first(run, "5.1"))
    run.record(Take(3, 0, 0, (), (GroupMembers(5, both),)))
    run.record(done(3, 2, 0, counts={"groups": 1}))
    run.publish_version(3, None)


# ---- invariant 2 ---------------------------------------------------------------------------------


def trains_twice(run: AuditedRun) -> None:
    run.record(take(3, first(run, "1.0")))


def trains_twice_in_one_take(run: AuditedRun) -> None:
    run.record(take(3, first(run, "5.0"), first(run, "5.0"), group=5))


def trains_the_second_completion(run: AuditedRun) -> None:
    second = [member for member in members_of(run) if member.trajectory == "5.1"][1]
    run.record(take(3, first(run, "5.0"), second, group=5))


def trains_what_is_not_there(run: AuditedRun) -> None:
    run.record(take(3, Member("6.0", Address(0, 77), "00"), group=6))


def trains_other_bytes(run: AuditedRun) -> None:
    member = first(run, "5.0")
    run.record(take(3, Member("5.0", member.at, "0123456789abcdef"), group=5))


def trains_the_dead(run: AuditedRun) -> None:
    run.record(take(3, run.complete(completion(6, 0, 2, finish="dead", reason="no room")), group=6))


def trains_without_beginning(run: AuditedRun) -> None:
    run.record(take(3, first(run, "5.0")))


def uses_a_second_annotation(run: AuditedRun) -> None:
    for value in (float("nan"), 0.0):
        run.note(Annotation("5.0", 5, "reward", np.array([value], np.float32), "judge"))
    later = run.note(Annotation("5.0", 5, "reward", np.array([1.0], np.float32), "judge"))
    run.record(take(3, first(run, "5.0"), group=5, annotations=(later,)))


def uses_an_annotation_that_is_not_there(run: AuditedRun) -> None:
    used = AnnotationUsed("5.0", "reward", Address(0, 3), "00")
    run.record(take(3, first(run, "5.0"), group=5, annotations=(used,)))


def repeats_other_takes(run: AuditedRun) -> None:
    again = TakesRepeated(3, 0, 1, (0, 1))
    run.record(take(3, first(run, "5.0"), first(run, "5.1"), group=5), again)


# ---- invariants 3, 4, 5 --------------------------------------------------------------------------


def leaves_tokens_without_a_span(run: AuditedRun) -> None:
    _train_with(run, (Span(0, 4, Version(1, 1)),))


def stamps_tokens_twice(run: AuditedRun) -> None:
    one, two = Span(0, 4, Version(1, 1)), Span(3, 6, Version(2, 1))
    _train_with(run, (one, two))


def _train_with(run: AuditedRun, spans: tuple[Span, ...]) -> None:
    """Only trained trajectories must satisfy it: any program may append such a record."""
    members = [run.complete(completion(6, 0, spans=spans)), run.complete(completion(6, 1, 2))]
    run.train(3, {6: members})
    run.publish_version(3, None)


def trains_above_the_lag(run: AuditedRun) -> None:
    run.train(3, {6: [run.complete(completion(6, index, 0)) for index in (0, 1)]})
    run.publish_version(3, None)


def trains_unmasked_tokens(run: AuditedRun) -> None:
    run.train(3, {6: [run.complete(completion(6, index, 0, 2)) for index in (0, 1)]})
    run.publish_version(3, None)


def trains_from_the_future(run: AuditedRun) -> None:
    run.train(3, {6: [run.complete(completion(6, index, 3)) for index in (0, 1)]})
    run.publish_version(3, None)


# ---- invariant 6 ---------------------------------------------------------------------------------


def flips_a_bit(run: AuditedRun) -> None:
    (path,) = (run.folder / "store/weights/v00000001-t0001").glob("model-*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def loses_a_file(run: AuditedRun) -> None:
    run.store.delete("weights/v00000002-t0001/config.json")


def rewrites_a_manifest(run: AuditedRun) -> None:
    path = run.folder / "store/weights/v00000001-t0001/manifest.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes().replace(b'"created_s": 1.0', b'"created_s": 2.0'))


def loses_the_believed_manifest(run: AuditedRun) -> None:
    run.store.delete("weights/v00000002-t0001/manifest.json")


def moves_the_pointer_back(run: AuditedRun) -> None:
    manifest = read_manifest(run.store, Version(1, 1))
    back = Pointer(RUN, 2, Version(1, 1), "x", manifest.hash, manifest.parent)
    run.store.put(POINTER_KEY, document(back))


def ignores_the_fence_of_the_store(run: AuditedRun) -> None:
    manifest = read_manifest(run.store, Version(2, 1))
    old = Pointer(RUN, 1, Version(2, 1), "x", manifest.hash, manifest.parent)
    run.store.put(POINTER_KEY, document(old))


def believes_a_lower_term(run: AuditedRun) -> None:
    run.record(done(3, 2, 0), done(4, 2, 0, version=Version(4, 1)))


def skips_a_step(run: AuditedRun) -> None:
    run.record(done(5, 2, 0))


def serves_another_manifest(run: AuditedRun) -> None:
    applied = Applied("rollout-1", 1, Version(1, 1), "beef", "hashes", 1, 0.1, 1.0)
    publish(run.bus, "applied", "rollout-1", applied)


def announces_another_manifest(run: AuditedRun) -> None:
    manifest = read_manifest(run.store, Version(2, 1))
    run.weights.append([(RUN, announced(manifest, "beef"))])


# ---- invariant 7, and what was read --------------------------------------------------------------


def append_raw(
    run: AuditedRun, topic: str, record: Record, role: str, term: int, number: int
) -> None:
    value = encode(record, Envelope(role, term, number))
    run.bus.append(topic, [AppendEntry(b"raw", value, 0)])


def loses_a_record(run: AuditedRun) -> None:
    append_raw(run, "ledger", GroupClosed(6, "dead", "", 3), "trainer", 2, 2)


def acts_without_opening(run: AuditedRun) -> None:
    append_raw(run, "admissions", admitted(7), "dispatch", 3, 1)


def lets_another_role_write(run: AuditedRun) -> None:
    append_raw(run, "ledger", GroupClosed(6, "dead", "", 3), "dispatch", 2, 1)


def leaves_a_record_unsigned(run: AuditedRun) -> None:
    publish(run.bus, "ledger", "run", GroupClosed(6, "dead", "", 3))


def removes_a_row(run: AuditedRun) -> None:
    with sqlite3.connect(run.folder / "bus" / "trajectories.db") as connection:
        connection.execute("DELETE FROM log_0 WHERE first = 1")
    connection.close()


PLANTED: list[tuple[Plant, int, str]] = [
    (closes_a_trained_group, 1, "ledger 0:10: group 0: dead in step 3, but trained in step 1"),
    (closes_a_group_that_was_never_admitted, 1, "ledger 0:10: group 99: dead, but never admitted"),
    (admits_twice, 1, "admissions 0:11: group 3 is admitted a second time"),
    (states_more_than_it_trained, 1, "ledger 0:11: step 3 states 3 trained, the ledger holds 2"),
    (lets_dispatch_close_a_group, 1, "admissions 0:11: only the ledger may end a group"),
    (takes_a_stranger_into_a_group, 1, "ledger 0:10: group 5 was not admitted with 5.7"),
    (
        begins_a_group_and_trains_nothing_of_it,
        1,
        "group 5 was begun in step 3, but none of it was trained",
    ),
    (trains_twice, 2, "ledger 0:10: 1.0 is trained in steps 1 and 3"),
    (trains_twice_in_one_take, 2, "ledger 0:10: 5.0 appears twice in one take"),
    (trains_the_second_completion, 2, "trained 5.1 at"),
    (trains_what_is_not_there, 2, "trajectories 0:77: step 3 trained 6.0 at 0:77"),
    (trains_other_bytes, 2, "with hash 0123456789abcdef"),
    (trains_the_dead, 2, "6.0 is dead (no room), but was trained in step 3"),
    (trains_without_beginning, 2, "ledger 0:10: 5.0 was trained, but no take began its group"),
    (uses_a_second_annotation, 2, "a take used reward of 5.0 at 0:2, not this first one"),
    (uses_an_annotation_that_is_not_there, 2, "annotations 0:3: reward of 5.0 is missing"),
    (repeats_other_takes, 2, "ledger 0:11: step 3, update 0: epoch 1 repeats takes 0, 1, not 0"),
    (leaves_tokens_without_a_span, 3, "6.0: its spans end at 4 of 6 generated tokens"),
    (stamps_tokens_twice, 3, "trajectories 0:7: 6.0: span [3, 6) instead of one that starts at 4"),
    (trains_above_the_lag, 5, "step 3 trained 6.0 at lag 2, max_lag is 1"),
    (trains_unmasked_tokens, 5, "ledger 0:11: step 3 states 12 tokens trained, not 6"),
    (trains_from_the_future, 5, "step 3 trained 6.0 of v00000003-t0001, made later"),
    (flips_a_bit, 6, "weights/v00000001-t0001/model-00001"),
    (loses_a_file, 6, "weights/v00000002-t0001/config.json: it is missing"),
    (rewrites_a_manifest, 6, "weights/v00000001-t0001/manifest.json: the log names manifest"),
    (loses_the_believed_manifest, 6, "weights/v00000002-t0001/manifest.json: the believed"),
    (
        moves_the_pointer_back,
        6,
        "weights/latest.json: it names version v00000001-t0001, the ledger v00000002-t0001",
    ),
    (ignores_the_fence_of_the_store, 6, "weights/latest.json: its term is 1, the ledger's is 2"),
    (believes_a_lower_term, 6, "ledger 0:11: step 4 as v00000004-t0001: term 2 had fenced"),
    (skips_a_step, 6, "ledger 0:10: step 5 as v00000005-t0002: it follows step 2"),
    (serves_another_manifest, 6, "v00000001-t0001 has manifest beef here"),
    (announces_another_manifest, 6, "v00000002-t0001 has manifest"),
    (loses_a_record, 7, "ledger 0:10: trainer term 2 wrote #2 where #1 comes next"),
    (acts_without_opening, 7, "admissions 0:11: dispatch term 3 wrote #1 before any `Opened`"),
    (
        lets_another_role_write,
        7,
        "ledger 0:10: written by dispatch; only trainer may write this topic",
    ),
    (
        leaves_a_record_unsigned,
        7,
        "ledger 0:10: the record is not in the envelope of a trainer: a record without an envelope",
    ),
    (removes_a_row, 0, "trajectories 0:1: offsets 1 to 1 are missing"),
]
