"""Describes each kind of record in one line of text, for `rollstream tail`. A rollout is shown as
`name/term`, a version as `v3`, or with its term as `v00000003-t0001`.
"""

from collections.abc import Sequence

from rollstream.streams import records
from rollstream.streams.values import Span, accepted_tokens


def describe(record: records.Record) -> str:
    match record:
        case records.Trajectory():
            return _trajectory(record)
        case records.Partial():
            end = record.start + len(record.tokens)
            return (
                f"{record.trajectory} on {record.rollout}/{record.rollout_term}, attempt "
                f"{record.attempt}: tokens {record.start} to {end}, {spans_in_words(record.spans)}"
            )
        case records.Assignment():
            return _assignment(record)
        case (
            records.RolloutStatus()
            | records.RelayStatus()
            | records.WeightsAnnounced()
            | records.Applied()
        ):
            return _serving(record)
        case records.Configured() | records.Take() | records.StepDone() | records.GroupClosed():
            return _ledger(record)
        case records.TakesRepeated():
            numbers = _listed(record.micro_batches)
            where = f"step {record.step}, update {record.update}"
            return f"take {numbers} of {where} is trained again, in epoch {record.epoch}"
        case records.TakeRetried() | records.TakeFailed() | records.Superseded():
            return _failure(record)
        case _:
            return _other(record)


def spans_in_words(spans: Sequence[Span]) -> str:
    """`v3 20, v4 5` for 20 tokens under version 3 and 5 under 4."""
    return ", ".join(f"v{span.version.number} {span.end - span.start}" for span in spans) or "none"


def _trajectory(record: records.Trajectory) -> str:
    reward = "no reward yet" if record.reward is None else f"reward {record.reward:g}"
    outcome = f"dead: {record.reason}" if record.finish == "dead" else f"{record.finish}, {reward}"
    seconds = record.finished_s - record.started_s
    moves = f", {record.moves} moves" if record.moves else ""
    drafts = record.drafts
    accepted = (
        ""
        if drafts is None
        else f", {accepted_tokens(drafts)} of {drafts.guessed} draft tokens accepted"
    )
    return (
        f"{record.trajectory} of {record.task}: {outcome}, {len(record.logprobs)} tokens "
        f"({spans_in_words(record.spans)}) by {record.rollout}/{record.rollout_term} "
        f"in {seconds:.2f} s{moves}{accepted}"
    )


def _assignment(record: records.Assignment) -> str:
    where = f"{record.trajectory} on {record.rollout}/{record.rollout_term}"
    attempt = f"attempt {record.attempt}"
    if record.kind == "release":
        return f"release {where}, {attempt}"
    at = record.partial
    after = "from its prompt" if at is None else f"from partial {at.partition}:{at.offset}"
    return f"{record.kind} {where}, {attempt}, under v{record.version.number}, {after}"


def _serving(
    record: records.RolloutStatus
    | records.RelayStatus
    | records.WeightsAnnounced
    | records.Applied,
) -> str:
    match record:
        case records.RolloutStatus():
            return (
                f"{record.rollout}/{record.term} {record.health} v{record.version.number}: "
                f"{record.running} of {record.slots} slots, {record.waiting} waiting, "
                f"KV {record.kv_used} of {record.kv_capacity}, {record.tokens_per_s:.0f} tokens/s"
            )
        case records.RelayStatus():
            newest = max((v.number for v in record.versions), default=None)
            newest_text = "no version yet" if newest is None else f"newest v{newest}"
            return (
                f"{record.relay}/{record.term} on {record.node}: {newest_text}, from "
                f"{record.upstream or 'the store'}"
            )
        case records.WeightsAnnounced():
            return f"{record.version}, {record.kind} of {record.bytes:,} bytes"
        case records.Applied():
            return (
                f"{record.rollout}/{record.rollout_term} serves {record.version}, "
                f"{record.tensors} tensors checked by {record.checked}, {record.seconds:.3f} s"
            )


def _ledger(
    record: records.Configured | records.Take | records.StepDone | records.GroupClosed,
) -> str:
    match record:
        case records.Configured():
            return (
                f"trainer with configuration {record.configuration_hash[:8]}, code "
                f"{record.code_revision[:8]}, from step {record.resumed_from}"
                + (f", forked from {record.forked_from}" if record.forked_from else "")
            )
        case records.Take():
            return (
                f"take {record.micro_batch} of step {record.step}, update {record.update}: "
                f"{len(record.members)} trajectories, {len(record.groups)} groups started"
            )
        case records.StepDone():
            shown = ("reward_mean", "loss", "length_median", "seconds")
            figures = [f"{n} {record.metrics[n]:.4g}" for n in shown if n in record.metrics]
            return ", ".join([f"step {record.step} done in {record.takes} takes", *figures])
        case records.GroupClosed():
            detail = f": {record.detail}" if record.detail else ""
            return f"group {record.group} {record.reason} at step {record.step}{detail}"


def _failure(record: records.TakeRetried | records.TakeFailed | records.Superseded) -> str:
    where = f"step {record.step}, update {record.update}"
    match record:
        case records.TakeRetried(micro_batch=None):
            return f"all remaining takes of {where} are computed"
        case records.TakeRetried():
            return f"take {record.micro_batch} of {where} is computed again"
        case records.TakeFailed():
            return f"take {_listed(record.micro_batches)} of {where} failed: {record.error}"
        case records.Superseded():
            return (
                f"take {_listed(record.micro_batches)} of {where} is superseded, group "
                f"{_listed(record.poisoned)} poisoned: {record.detail}"
            )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _other(record: records.Record) -> str:
    match record:
        case records.Opened():
            release = f" with release {record.release}" if record.release else ""
            return f"{record.role} opens term {record.term}{release}"
        case records.Prompt():
            return (
                f"prompt of group {record.group}: {record.task}, {len(record.tokens)} tokens, "
                f"{record.samples} samples of at most {record.sampling.tokens_max} tokens"
            )
        case records.Admitted():
            return (
                f"group {record.group} admitted in wave {record.wave}: "
                f"{len(record.trajectories)} trajectories, deadline {record.deadline_s:g} s"
            )
        case records.Annotation():
            value = f"{record.values[0]:g}" if len(record.values) else f"none ({record.reason})"
            more = f" and {len(record.values) - 1} more" if len(record.values) > 1 else ""
            return f"{record.name} of {record.trajectory}: {value}{more}, by {record.scorer}"
        case records.Dead():
            return (
                f"{record.source} {record.partition}:{record.offset}, {len(record.original)} "
                f"bytes: {record.reason}"
            )
        case records.Claim():
            return f"{record.bytes:,} bytes in the object {record.blob}"
        case _:
            return record.schema()
