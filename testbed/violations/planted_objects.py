"""Kinds of violation in bytes and objects: damaged records, blobs, checkpoints, versions, and
records that only a newer release understands; `PLANTED` of `planted.py` includes them.
"""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
from xxhash import xxh3_64_intdigest

from rollstream.storage.claim_check import ClaimCheck
from rollstream.storage.weights.pointer import POINTER_KEY
from rollstream.streams.bus import AppendEntry
from rollstream.streams.codec import Envelope, encode, record_hash
from rollstream.streams.records import Dead, GroupClosed, Opened
from rollstream.streams.values import Address, Member
from rollstream.streams.writer import publish
from testbed.violations.healthy_run import PROMPT, AuditedRun, completion, order, partial
from testbed.violations.planted_fields import Found, both, train, train_steps


def rewrite(run: AuditedRun, topic: str, at: Address, change: Callable[[bytes], bytes]) -> None:
    """Other bytes of the same length in place of a record's."""
    (message,) = run.bus.read(topic, {at.partition: at.offset}, records_max=1)
    before = message.value or b""
    after = change(before)
    assert len(after) == len(before)
    with sqlite3.connect(run.folder / "bus" / f"{topic}.db") as connection:
        table = f"log_{at.partition}"
        where = f"WHERE first = (SELECT max(first) FROM {table} WHERE first <= ?)"
        (value,) = connection.execute(f"SELECT value FROM {table} {where}", [at.offset]).fetchone()
        assert before in value
        changed = [value.replace(before, after), at.offset]
        connection.execute(f"UPDATE {table} SET value = ? {where}", changed)
    connection.close()


def flip(run: AuditedRun, topic: str, at: Address) -> None:
    """One bit of its content, drawn."""

    def change(value: bytes) -> bytes:
        data = bytearray(value)
        data[run.random.randrange(16, len(data))] ^= 1 << run.random.randrange(8)
        return bytes(data)

    rewrite(run, topic, at, change)


def damage(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.chmod(0o644)
    path.write_bytes(data)


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


# ---- damaged records -----------------------------------------------------------------------------


def damages_a_trained_completion(run: AuditedRun) -> Found:
    """A bit of a completion that a take names flips."""
    member = both(run, 6, 2)
    train(run, member)
    flip(run, "trajectories", member[0].at)
    at = member[0].at
    return (
        0,
        f"{at.partition}:{at.offset}: a record that a trainer had read is unreadable now",
    )


def damages_a_completion_of_an_open_group(run: AuditedRun) -> Found:
    """A bit flips in a completion that a trainer had read and not taken."""
    at = run.complete(completion(6, 0, 2)).at
    train_steps(run, (3,))
    flip(run, "trajectories", at)
    return (
        0,
        f"{at.partition}:{at.offset}: a record that a trainer had read is unreadable now",
    )


def damages_unread_records(run: AuditedRun) -> Found:
    """A bit flips in a completion before any take follows it."""
    at = run.complete(completion(6, 0, 2)).at
    flip(run, "trajectories", at)
    return 0, f"whether there was a record at trajectories {at.partition}:{at.offset}"


def damages_an_annotation(run: AuditedRun) -> Found:
    """A bit of an annotation that a take names flips."""
    flip(run, "annotations", next_address(run, "annotations"))
    return 0, "a record that a trainer had read is unreadable now"


def damages_the_length_of_a_header(run: AuditedRun) -> Found:
    """The header's length, which the checksum does not cover, changes."""
    member = both(run, 6, 2)
    train(run, member)
    rewrite(run, "trajectories", member[1].at, lambda v: v[:4] + b"\xff\xff\xff\xff" + v[8:])
    return 0, "a record that a trainer had read is unreadable now"


def damages_the_magic(run: AuditedRun) -> Found:
    """The first byte of a record changes."""
    member = both(run, 6, 2)
    train(run, member)
    rewrite(run, "trajectories", member[1].at, lambda v: b"X" + v[1:])
    return 0, "a record that a trainer had read is unreadable now"


def damages_a_partial(run: AuditedRun) -> Found:
    """A bit of a partial flips."""
    at = run.gain(partial(completion(6, 0, 2), PROMPT, PROMPT + 2, None))
    flip(run, "partials", at)
    return 0, f"whether there was a record at partials {at.partition}:{at.offset}"


def damages_what_a_rollout_applied(run: AuditedRun) -> Found:
    """A bit of an `Applied` flips."""
    flip(run, "applied", Address(0, 0))
    return 0, "whether there was a record at applied 0:0"


def changes_what_was_dead_lettered(run: AuditedRun) -> Found:
    """Bytes change after a reader had dead-lettered them."""
    (offset,) = run.bus.append("trajectories", [AppendEntry(b"6", b"rubbish", 0)])
    original = np.frombuffer(b"garbage", np.uint8)
    dead = Dead("trajectories", 0, offset, "starts with b'garb'", original)
    publish(run.bus, "dead", "6", dead)
    return 0, "the bytes differ from their dead-lettered copy"


def damages_the_ledger(run: AuditedRun) -> Found:
    """A bit of a take flips."""
    flip(run, "ledger", Address(0, 2))
    return 7, "ledger 0:3: trainer term 1 wrote #3 where #2 comes next; the log lost a record"


def damages_an_admission(run: AuditedRun) -> Found:
    """A bit of an admission flips."""
    flip(run, "admissions", Address(0, 3))
    return 7, "admissions 0:4: dispatch term 1 wrote #4 where #3 comes next; the log lost a record"


def damages_a_prompt(run: AuditedRun) -> Found:
    """A bit of a prompt flips."""
    flip(run, "prompts", Address(0, 3))
    return 7, "prompts 0:4: prompts term 1 wrote #4 where #3 comes next; the log lost a record"


def damages_an_order(run: AuditedRun) -> Found:
    """A bit of an assignment flips."""
    flip(run, "assignments", next_address(run, "assignments"))
    return 7, "the record is not in the envelope of a dispatch"


def removes_a_take(run: AuditedRun) -> Found:
    """A record is missing in the middle of the ledger's partition."""
    with sqlite3.connect(run.folder / "bus" / "ledger.db") as connection:
        connection.execute("DELETE FROM log_0 WHERE first = 1")
    connection.close()
    return 0, "ledger 0:1: offsets 1 to 1 are missing"


def next_address(run: AuditedRun, topic: str) -> Address:
    """The last record of the first partition that has one."""
    partition, end = next((p, end) for p, end in run.bus.end(topic).items() if end)
    return Address(partition, end - 1)


# ---- blobs ---------------------------------------------------------------------------------------


def claimed(run: AuditedRun) -> tuple[Path, Address]:
    """Group 6 is trained and 6.0 is in the object store; returns its blob."""
    record = completion(6, 0, 2)
    bus = ClaimCheck(run.bus, run.store, bytes_max=100)
    at = publish(bus, "trajectories", "6", record)
    one = Member("6.0", at, record_hash(encode(record)))
    train(run, [one, run.complete(completion(6, 1, 2))])
    (blob,) = (run.folder / "store" / "blobs" / "trajectories").rglob(f"*/{'?' * 8}*")
    return blob, at


def loses_a_blob(run: AuditedRun) -> Found:
    """The object of a claim is missing."""
    blob, at = claimed(run)
    blob.unlink()
    return (
        0,
        f"{at.partition}:{at.offset}: a record that a trainer had read is unreadable now",
    )


def damages_a_blob(run: AuditedRun) -> Found:
    """The object of a claim is damaged."""
    blob, at = claimed(run)
    damage(blob, flip_last)
    return (
        0,
        f"{at.partition}:{at.offset}: a record that a trainer had read is unreadable now",
    )


# ---- checkpoints ---------------------------------------------------------------------------------


def checkpoint(run: AuditedRun, name: str) -> Path:
    (path,) = (run.folder / "store" / "checkpoints").glob(f"*/{name}")
    return path


def damages_the_tensors_of_a_checkpoint(run: AuditedRun) -> Found:
    """A bit of the only checkpoint flips."""
    damage(checkpoint(run, "state-*.safetensors"), flip_last)
    return 11, "checkpoints/s00000002-t0001/: state-"


def cuts_the_tensors_of_a_checkpoint(run: AuditedRun) -> Found:
    """A file of the only checkpoint is cut."""
    damage(checkpoint(run, "state-*.safetensors"), lambda data: data.__delitem__(slice(-9, None)))
    return 11, "differs from its manifest's hash"


def loses_the_tensors_of_a_checkpoint(run: AuditedRun) -> Found:
    """A file of the only checkpoint is missing."""
    checkpoint(run, "state-*.safetensors").unlink()
    return 11, "checkpoints/s00000002-t0001/: "


def changes_the_state_of_a_checkpoint(run: AuditedRun) -> Found:
    """The state of the only checkpoint names another step."""
    path = checkpoint(run, "state.json")
    text = path.read_bytes().replace(b'"step": 2', b'"step": 1')
    path.chmod(0o644)
    path.write_bytes(text)
    return 11, "state.json differs from its manifest's hash"


def damages_the_manifest_of_a_checkpoint(run: AuditedRun) -> Found:
    """The manifest of the only checkpoint is damaged."""
    damage(checkpoint(run, "manifest.json"), lambda data: data.__setitem__(20, data[20] ^ 1))
    return 11, "checkpoints/s00000002-t0001/: "


def names_a_checkpoint_otherwise(run: AuditedRun) -> Found:
    """The only checkpoint has another step's name."""
    folder = checkpoint(run, "manifest.json").parent
    folder.rename(folder.parent / "s00000001-t0001")
    return 11, "checkpoints/s00000001-t0001/: its state is of step 2, its manifest of step 2"


def loses_every_checkpoint(run: AuditedRun) -> Found:
    """A run that has passed a checkpoint has none left."""
    train_steps(run, (3,))
    for one in list(run.store.list("checkpoints/")):
        run.store.delete(one.key)
    return 11, "the ledger is at step 3, the newest whole checkpoint at 0; one is due every 2 steps"


# ---- versions, and newer releases ----------------------------------------------------------------


def loses_the_pointer(run: AuditedRun) -> Found:
    """`latest.json` is missing."""
    run.store.delete(POINTER_KEY)
    return 6, "weights/latest.json: versions exist, but no pointer"


def damages_the_pointer(run: AuditedRun) -> Found:
    """`latest.json` is damaged."""
    run.store.put(POINTER_KEY, b'{"version": 3}')
    return 6, "weights/latest.json: "


def adds_a_record_of_a_newer_release(run: AuditedRun) -> Found:
    """The ledger has a decision that only a newer release understands."""
    value = encode(GroupClosed(6, "dead", "", 3), Envelope("trainer", 2, 1))
    newer = value.replace(b"group_closed/1", b"group_closed/7")
    newer = newer[:8] + xxh3_64_intdigest(newer[16:]).to_bytes(8, "little") + newer[16:]
    run.bus.append("ledger", [AppendEntry(b"run", newer, 0)])
    return 1, "ledger 0:10: schema 'group_closed/7' is not known here"


def needs_what_is_not_known(run: AuditedRun) -> Found:
    """A trainer of a newer release opens the ledger."""
    opened = Opened("trainer", 3, "9.9.9", ("branches/1",), ("branches/1",))
    run.bus.append("ledger", [AppendEntry(b"run", encode(opened, Envelope("trainer", 3, 0)), 0)])
    return 1, "release 9.9.9"


def orders_behind_its_own_chain(run: AuditedRun) -> Found:
    """An assignment of a replaced dispatch is written without its `Opened`."""
    value = encode(order(6, 0, 3), Envelope("dispatch", 9, 4))
    run.bus.append("assignments", [AppendEntry(b"6.0", value, 0)])
    return 7, "dispatch term 9 wrote #4 before any `Opened`"


OF_OBJECTS = (
    damages_a_trained_completion, damages_a_completion_of_an_open_group,
    damages_unread_records, damages_an_annotation, damages_the_length_of_a_header,
    damages_the_magic, damages_a_partial, damages_what_a_rollout_applied,
    changes_what_was_dead_lettered, damages_the_ledger, damages_an_admission, damages_a_prompt,
    damages_an_order, removes_a_take, loses_a_blob, damages_a_blob,
    damages_the_tensors_of_a_checkpoint, cuts_the_tensors_of_a_checkpoint,
    loses_the_tensors_of_a_checkpoint, changes_the_state_of_a_checkpoint,
    damages_the_manifest_of_a_checkpoint, names_a_checkpoint_otherwise, loses_every_checkpoint,
    loses_the_pointer, damages_the_pointer, adds_a_record_of_a_newer_release,
    needs_what_is_not_known, orders_behind_its_own_chain,
)  # fmt: skip
