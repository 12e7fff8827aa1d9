"""Kinds of violation in the trainer's decisions and in the fields of records; `PLANTED` of
`planted.py` includes them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from rollstream.storage.weights.manifest import read_manifest
from rollstream.streams.records import Annotation, Applied, GroupClosed, Opened, Superseded, Take
from rollstream.streams.token_arrays import array_fields, make_piece
from rollstream.streams.values import Address, AnnotationUsed, GroupMembers, Member, ReadTo, Version
from rollstream.streams.writer import publish
from testbed.violations.healthy_run import (
    PROMPT,
    AuditedRun,
    admitted,
    completion,
    done,
    order,
    partial,
    prompt,
)
from testbed.violations.planted import append_raw, first

Found = tuple[int, str]
"""The invariant, and the text that audit must report."""


def both(run: AuditedRun, group: int, *versions: int, **changed: Any) -> list[Member]:
    return [run.complete(completion(group, index, *versions, **changed)) for index in (0, 1)]


def train_steps(run: AuditedRun, steps: Sequence[int]) -> None:
    """Steps that train new groups of the newest version."""
    for step in steps:
        group = 20 + step
        run.prompts.append([(str(g), prompt(g)) for g in (group,)])
        offset = run.bus.end("prompts")[0] - 1
        admission = replace(admitted(group), prompt=Address(0, offset))
        run.admissions.append([(str(group), admission)])
        run.order(*(order(group, index) for index in (0, 1)))
        members = both(run, group, step - 1)
        run.train(step, {group: members})
        run.publish_version(step, None)


def train(run: AuditedRun, members: list[Member], **fields: Any) -> None:
    """Groups 5 and 6, in step 3."""
    run.train(3, {5: [first(run, "5.0"), first(run, "5.1")], 6: members}, **fields)
    run.publish_version(3, None)


# ---- invariant 1: why groups end, and that they do -----------------------------------------------


def closes_what_lived(run: AuditedRun) -> Found:
    """A group whose members all survived is closed as dead."""
    run.record(GroupClosed(5, "dead", "0 of 2 lived: ", 3))
    return 1, "ledger 0:10: group 5 is closed as dead, the rule gives trained"


def filters_what_differs(run: AuditedRun) -> Found:
    """A group of different rewards is closed as filtered."""
    run.record(GroupClosed(5, "filtered", "all rewards are 0", 3))
    return 1, "group 5 is closed as filtered, the rule gives trained"


def expires_what_is_fresh(run: AuditedRun) -> Found:
    """A group within max_lag is closed as expired."""
    run.record(GroupClosed(5, "expired", "all above max_lag at version 2", 3))
    return 1, "group 5 is closed as expired, the rule gives trained"


def closes_for_a_deadline_what_was_complete(run: AuditedRun) -> Found:
    """A group that had been read whole is closed for its deadline."""
    both(run, 6, 2)
    train_steps(run, (3,))
    run.record(GroupClosed(6, "expired", "deadline of 600 s passed, 2 of 2 finished; ", 4))
    return 1, "group 6 is closed as expired, but all its records had been read by then"


def closes_what_is_not_complete(run: AuditedRun) -> Found:
    """A group without completions is closed with a reason that needs completions."""
    run.record(GroupClosed(6, "dead", "0 of 2 lived: ", 3))
    return 1, "group 6 is closed as dead, but 0 of its 2 completions are in the log"


def counts_completions_that_never_came(run: AuditedRun) -> Found:
    """A closing counts more finished trajectories than there are."""
    run.record(GroupClosed(6, "expired", "deadline of 600 s passed, 1 of 2 finished; ", 3))
    return 1, "group 6 is closed as expired, but 0 of its 2 completions are in the log, not 1 of 2"


def closes_by_another_deadline(run: AuditedRun) -> Found:
    """A closing names a deadline that its admission does not have."""
    run.record(GroupClosed(6, "expired", "deadline of 1 s passed, 0 of 2 finished; ", 3))
    return 1, "group 6 is closed as expired, but a passed deadline of 600 s closes it as expired"


def calls_a_deadline_death(run: AuditedRun) -> Found:
    """The reason of a closing contradicts its detail."""
    run.record(GroupClosed(6, "dead", "deadline of 600 s passed, 0 of 2 finished; ", 3))
    return 1, "group 6 is closed as dead, but a passed deadline of 600 s closes it as expired"


def closes_as_poisoned(run: AuditedRun) -> Found:
    """A group is closed as poisoned, and none of its takes was superseded."""
    run.record(GroupClosed(5, "dead", "poisoned: the learner failed 3 times on it: overflow", 3))
    return 1, "group 5 is closed as dead, the rule gives trained"


def gives_a_take_up_at_once(run: AuditedRun) -> Found:
    """A take that had not failed is superseded."""
    named = (first(run, "5.0"), first(run, "5.1"))
    run.record(Take(3, 0, 0, named, (GroupMembers(5, named),), (), run.read(), Version(2, 1)))
    run.record(
        Superseded(3, 0, (0,), (5,), "overflow"), GroupClosed(5, "dead", "poisoned: overflow", 3)
    )
    return 1, "ledger 0:11: take (0,) of step 3 is superseded, but had not failed often enough"


def gives_up_what_is_no_take(run: AuditedRun) -> Found:
    """A superseded take is not in the ledger."""
    run.record(Superseded(3, 0, (4,), (), "overflow"))
    return 1, "take 4 of step 3 is superseded, but is not open"


def skips_a_complete_group(run: AuditedRun) -> Found:
    """A complete group is neither taken nor closed until it is above max_lag."""
    train_steps(run, (3, 4, 5))
    return (
        1,
        "admissions 0:6: group 5 is open: step 5 was trained after the rule made the group expired",
    )


def takes_a_newer_group_first(run: AuditedRun) -> Found:
    """A complete group is passed over for one of a newer version."""
    train_steps(run, (3,))
    return 1, "group 5 is open: step 3 took group 23 of version 2 first"


def ignores_a_deadline(run: AuditedRun) -> Found:
    """An incomplete group stays open while steps take longer than its deadline."""
    run.admissions.append([("90", replace(admitted(90, 15.0), prompt=Address(0, 99)))])
    train_steps(run, (3, 4, 5, 6))
    return 1, "group 90 is open: step 6 was trained after the rule made the group dead"


def trains_equal_rewards(run: AuditedRun) -> Found:
    """A group is trained that the rule filters."""
    train(run, both(run, 6, 2, reward=1.0))
    return 1, "group 6 was trained, and all its rewards are 1"


def trains_without_a_reward(run: AuditedRun) -> Found:
    """A member without a known reward is trained."""
    members = [run.complete(completion(6, index, 2, reward=None)) for index in (0, 1)]
    train(run, members)
    return 1, "6.0 was trained without all of reward"


def trains_a_lone_survivor(run: AuditedRun) -> Found:
    """A group with fewer survivors than the rule requires is trained."""
    dead = run.complete(completion(6, 1, 2, finish="dead", reason="no room"))
    train(run, [run.complete(completion(6, 0, 2)), dead], untrained=("6.1",))
    return 1, "group 6 was trained with 6.0, which the rule leaves out: 1 of 2 lived: no room"


def omits_an_admission(run: AuditedRun) -> Found:
    """The ledger trains a group that was never admitted."""
    run.train(3, {70: both(run, 70, 2)})
    run.publish_version(3, None)
    return 1, "ledger 0:10: group 70: trained, but never admitted"


def omits_a_take(run: AuditedRun) -> Found:
    """A step counts a take that is not in the ledger."""
    run.record(done(3, 2, 0))
    run.publish_version(3, None)
    return 1, "step 3 states 1 takes, the ledger holds 0"


def takes_a_group_twice(run: AuditedRun) -> Found:
    """A second take starts a group again."""
    run.train(3, {0: both(run, 0, 2, attempt=2)})
    return 1, "group 0: trained in step 3, but trained in step 1 already"


def miscounts_groups(run: AuditedRun) -> Found:
    """`StepDone.counts.groups` differs from the ledger."""
    train(run, both(run, 6, 2), counts={"groups": 3})
    return 1, "step 3 states 3 groups, the ledger holds 2"


def miscounts_closings(run: AuditedRun) -> Found:
    """`StepDone.counts.dead` differs from the ledger."""
    train(run, both(run, 6, 2), counts={"dead": 1})
    return 1, "step 3 states 1 dead, the ledger holds 0"


def admits_another_prompt(run: AuditedRun) -> Found:
    """An admission names the address of another prompt."""
    run.prompts.append([("70", prompt(70))])
    run.admissions.append([("70", admitted(70))])
    return 3, "group 70 was admitted with 2 samples of prompts 0:71"


def admits_too_few(run: AuditedRun) -> Found:
    """An admission names fewer trajectories than its prompt requires."""
    run.prompts.append([("70", replace(prompt(70), samples=4))])
    at = Address(0, run.bus.end("prompts")[0] - 1)
    run.admissions.append([("70", replace(admitted(70), prompt=at))])
    return 3, "group 70 was admitted with 2 samples of prompts 0:11; this prompt asks for 4"


# ---- invariant 2: members and annotations --------------------------------------------------------


def leaves_a_member_out(run: AuditedRun) -> Found:
    """A take starts a group without a completion that its trainer had read."""
    one, _ = both(run, 6, 2)
    train(run, [one])
    return 2, "step 3 began group 6 without 6.1, which it had read"


def leaves_a_member_untrained(run: AuditedRun) -> Found:
    """A member that the rule trains is in no take."""
    train(run, both(run, 6, 2), untrained=("6.1",))
    return 2, "group 6 was trained without 6.1, which the rule trains"


def leaves_an_annotation_out(run: AuditedRun) -> Found:
    """A take omits an annotation that counts and had been read."""
    members = both(run, 6, 2)
    run.note(Annotation("6.0", 6, "reward", np.array([0.5], np.float32), "judge"))
    train(run, members)
    return 2, "annotations 0:0: step 3 trained 6.0 without its reward, which it had read"


def names_another_place(run: AuditedRun) -> Found:
    """A take names a completion at the offset of another."""
    one, two = both(run, 6, 2)
    train(run, [one, Member("6.1", one.at, two.hash)])
    return 2, "step 3 trained 6.1 at 0:7; its first completion is this one"


def takes_members_of_another_group(run: AuditedRun) -> Found:
    """A take lists the members of one group under another."""
    members = both(run, 5, 1, 2)
    run.record(Take(3, 0, 0, tuple(members), (GroupMembers(6, tuple(members)),), (), run.read()))
    return 1, "group 6 was not admitted with 5.0"


def changes_the_bytes_of_an_annotation(run: AuditedRun) -> Found:
    """A take names an annotation with a wrong hash."""
    members = both(run, 6, 2)
    used = run.note(Annotation("6.0", 6, "reward", np.array([0.5], np.float32), "judge"))
    train(run, members, notes=(AnnotationUsed(used.trajectory, used.name, used.at, "0" * 16),))
    return 2, "a take used reward of 6.0"


def states_less_than_it_read(run: AuditedRun) -> Found:
    """A take states read positions below a member that it names; audit applies the members'
    positions.
    """
    members = both(run, 6, 2)
    left = run.complete(completion(6, 1, 2, trajectory="6.1"))
    del left
    begun = (GroupMembers(6, tuple(members[1:])),)
    nothing = (ReadTo("trajectories", (0, 0)), ReadTo("annotations", (0, 0)))
    run.record(Take(3, 0, 0, tuple(members[1:]), begun, (), nothing))
    return 2, "step 3 began group 6 without 6.0, which it had read"


# ---- invariant 3: where tokens came from ---------------------------------------------------------


def changed(run: AuditedRun, expected: str, **values: Any) -> Found:
    """Group 6 is trained; 6.0 has these fields."""
    record = completion(6, 0, 2)
    one = run.complete(replace(record, **values))
    train(run, [one, run.complete(completion(6, 1, 2))])
    return 3, f"6.0 {expected}"


def names_a_version_that_was_not_applied(run: AuditedRun) -> Found:
    """A completion of a rollout that never applied a version."""
    run.order(order(6, 0, rollout="rollout-9"))
    expected = "has tokens of v00000002-t0001, which rollout-9 of term 1 never applied"
    return changed(run, expected, rollout="rollout-9")


def names_a_version_that_was_passed_over(run: AuditedRun) -> Found:
    """Tokens of a version that their rollout skipped."""
    hash_ = run.publish_version(3, None).hash
    applied = Applied("rollout-2", 1, Version(3, 2), hash_, "hashes", 1, 0.1, 1.0)
    publish(run.bus, "applied", "rollout-2", applied)
    run.order(order(6, 0, rollout="rollout-2"))
    expected = "has tokens of v00000002-t0001, which rollout-2 of term 1 never applied"
    return changed(run, expected, rollout="rollout-2")


def changes_a_prompt_token(run: AuditedRun) -> Found:
    """A token of the prompt differs."""
    tokens = completion(6, 0, 2).tokens.copy()
    tokens[run.random.randrange(PROMPT)] += 7
    return changed(run, "has another prompt than prompts 0:7", tokens=tokens)


def takes_prompt_tokens_for_the_environment(run: AuditedRun) -> Found:
    """The sources of the prompt differ."""
    sources = completion(6, 0, 2).sources.copy()
    sources[run.random.randrange(PROMPT)] = 2
    return changed(run, "has another prompt than prompts 0:7", sources=sources)


def changes_the_temperature(run: AuditedRun) -> Found:
    """A completion states another temperature than was requested."""
    return changed(run, "is of 't' at temperature 0.5, its prompt of 't' at 1", temperature=0.5)


def changes_the_task(run: AuditedRun) -> Found:
    """A completion states another task than was requested."""
    return changed(run, "is of 'u' at temperature 1, its prompt of 't' at 1", task="u")


def changes_the_index(run: AuditedRun) -> Found:
    """A completion has the index of another sample."""
    return changed(run, "has index 1 and wave 3, but was admitted with others", index=1)


def changes_the_wave(run: AuditedRun) -> Found:
    """A completion names another wave than its admission."""
    return changed(run, "has index 0 and wave 8, but was admitted with others", wave=8)


def claims_another_attempt(run: AuditedRun) -> Found:
    """A completion of an attempt that was never assigned."""
    expected = "is attempt 7 by rollout-0 of term 1, which was never assigned"
    return changed(run, expected, attempt=7)


def claims_another_term(run: AuditedRun) -> Found:
    """A completion of a term of its rollout that had no assignment."""
    expected = "is attempt 1 by rollout-0 of term 4, which was never assigned"
    return changed(run, expected, rollout_term=4)


def resumed_with(run: AuditedRun, **values: Any) -> Found:
    """6.0 is resumed from a chain of two partials and continues another one."""
    record = completion(6, 0, 2, attempt=2, rollout="rollout-1")
    link = run.gain(partial(record, PROMPT, PROMPT + 2, None))
    link = run.gain(partial(record, PROMPT + 2, PROMPT + 3, link))
    run.order(order(6, 0, 2, kind="resume", rollout="rollout-1", partial=link))
    train(run, [run.complete(replace(record, **values)), run.complete(completion(6, 1, 2))])
    return (
        3,
        "6.0 was resumed from attempt 1 by rollout-0, but differs from its partial from token 3 on",
    )


def continues_other_tokens(run: AuditedRun) -> Found:
    """A resumed completion has other tokens than its chain."""
    tokens = completion(6, 0, 2).tokens.copy()
    tokens[PROMPT + run.random.randrange(3)] += 1
    return resumed_with(run, tokens=tokens)


def continues_other_logprobs(run: AuditedRun) -> Found:
    """A resumed completion has other log-probabilities than its chain."""
    logprobs = completion(6, 0, 2).logprobs.copy()
    logprobs[run.random.randrange(3)] = -9.0
    return resumed_with(run, logprobs=logprobs)


def continues_another_version(run: AuditedRun) -> Found:
    """A resumed completion stamps tokens of its chain with another version."""
    return resumed_with(run, spans=completion(6, 0, 1).spans)


def rows_of(values: NDArray[np.int32]) -> dict[str, Any]:
    """The fields of an array with a row for each of the first generated tokens."""
    return array_fields([make_piece("experts", values, PROMPT)])


def continues_other_rows(run: AuditedRun) -> Found:
    """A resumed completion has another row of an array than its chain."""
    record = completion(6, 0, 2, attempt=2, rollout="rollout-1")
    rows = np.arange(3, dtype=np.int32)
    link = run.gain(replace(partial(record, PROMPT, PROMPT + 3, None), **rows_of(rows)))
    run.order(order(6, 0, 2, kind="resume", rollout="rollout-1", partial=link))
    rows[run.random.randrange(3)] = 7
    train(run, [run.complete(replace(record, **rows_of(rows))), run.complete(completion(6, 1, 2))])
    return 3, "6.0 was resumed, but its array 'experts' differs from its partials"


def damages_an_array(run: AuditedRun) -> Found:
    """The rows of a completion's array do not open."""
    fields = rows_of(np.zeros(3, np.int32))
    fields["array_bytes"] = fields["array_bytes"][::-1].copy()
    broken = run.complete(replace(completion(6, 0, 2), **fields))
    train(run, [broken, run.complete(completion(6, 1, 2))])
    return 3, "6.0: array 'experts' does not open"


def orders_other_tokens(run: AuditedRun) -> Found:
    """An assignment has other tokens than the prompt."""
    run.order(order(6, 0, 2, tokens=np.arange(1, PROMPT + 1, dtype=np.uint32)))
    return 3, "6.0 was assigned with other tokens than its prompt has"


def loses_a_logprob(run: AuditedRun) -> Found:
    """A completion has fewer log-probabilities than generated tokens."""
    record = completion(6, 0, 2)
    broken = run.complete(replace(record, logprobs=record.logprobs[:-1]))
    train(run, [broken, run.complete(completion(6, 1, 2))])
    return 3, "6.0: 6 generated tokens but 5 log-probabilities"


def loses_a_source(run: AuditedRun) -> Found:
    """A completion has fewer sources than tokens."""
    record = completion(6, 0, 2)
    broken = run.complete(replace(record, sources=record.sources[:-1]))
    train(run, [broken, run.complete(completion(6, 1, 2))])
    return 3, "6.0: 9 tokens but 8 sources"


def reorders_spans(run: AuditedRun) -> Found:
    """The spans of a completion are out of order."""
    record = completion(6, 0, 1, 2)
    broken = run.complete(replace(record, spans=record.spans[::-1]))
    train(run, [broken, run.complete(completion(6, 1, 2))])
    return 3, "trajectories 0:7: 6.0: span [3, 6) instead of one that starts at 0"


# ---- invariants 5, 6, 7 --------------------------------------------------------------------------


def miscounts_masked_tokens(run: AuditedRun) -> Found:
    """A step reports masked tokens that it trained."""
    train(run, both(run, 6, 2), counts={"masked_tokens": 3})
    return 5, "step 3 states 21 tokens trained, not 24"


def states_a_lag_above_the_bound(run: AuditedRun) -> Found:
    """A step's own metrics report a lag above max_lag."""
    train(run, both(run, 6, 2), metrics={"lag_consumed_max": 9.0})
    return 5, "step 3 states lag 9 > 1"


def trains_a_version_that_was_replaced(run: AuditedRun) -> Found:
    """Tokens of a version that the ledger replaced are trained."""
    spans = tuple(replace(span, version=Version(2, 9)) for span in completion(6, 0, 2).spans)
    train(run, both(run, 6, 2, spans=spans))
    return 5, "step 3 trained 6.0 at lag 0"


def numbers_a_version_otherwise(run: AuditedRun) -> Found:
    """A step reports a version of another number."""
    run.record(done(3, 2, 0, version=Version(4, 2)))
    return 6, "step 3 as v00000004-t0002: the numbers differ"


def makes_a_version_of_a_later_term(run: AuditedRun) -> Found:
    """A step reports a version of a term that is not opened."""
    run.record(done(3, 2, 0, version=Version(3, 7)))
    return 6, "step 3 as v00000003-t0007: its trainer's term is 2, which is lower"


def opens_another_term(run: AuditedRun) -> Found:
    """An `Opened` names another term than its envelope."""
    append_raw(run, "ledger", Opened("trainer", 8), "trainer", 3, 0)
    return 7, "ledger 0:10: `Opened` of term 8 is record 0 of term 3"


def reorders_the_ledger(run: AuditedRun) -> Found:
    """Two records of the ledger are in the wrong order."""
    for number in (2, 1):
        append_raw(run, "ledger", GroupClosed(6, "dead", "", 3), "trainer", 2, number)
    return 7, "ledger 0:10: trainer term 2 wrote #2 where #1 comes next"


OF_FIELDS = (
    closes_what_lived, filters_what_differs, expires_what_is_fresh,
    closes_for_a_deadline_what_was_complete, closes_what_is_not_complete,
    counts_completions_that_never_came, closes_by_another_deadline, calls_a_deadline_death,
    closes_as_poisoned, gives_a_take_up_at_once, gives_up_what_is_no_take,
    skips_a_complete_group, takes_a_newer_group_first, ignores_a_deadline, trains_equal_rewards,
    trains_without_a_reward, trains_a_lone_survivor, omits_an_admission, omits_a_take,
    takes_a_group_twice, miscounts_groups, miscounts_closings, admits_another_prompt,
    admits_too_few, leaves_a_member_out, leaves_a_member_untrained, leaves_an_annotation_out,
    names_another_place, takes_members_of_another_group, changes_the_bytes_of_an_annotation,
    states_less_than_it_read, names_a_version_that_was_not_applied,
    names_a_version_that_was_passed_over, changes_a_prompt_token,
    takes_prompt_tokens_for_the_environment, changes_the_temperature, changes_the_task,
    changes_the_index, changes_the_wave, claims_another_attempt, claims_another_term,
    continues_other_tokens, continues_other_logprobs, continues_another_version,
    continues_other_rows, damages_an_array,
    orders_other_tokens, loses_a_logprob, loses_a_source, reorders_spans, miscounts_masked_tokens,
    states_a_lag_above_the_bound, trains_a_version_that_was_replaced, numbers_a_version_otherwise,
    makes_a_version_of_a_later_term, opens_another_term, reorders_the_ledger,
)  # fmt: skip


# ---- what a log cannot show ----------------------------------------------------------------------


def changes_what_was_sampled(run: AuditedRun) -> str:
    """A rollout publishes tokens, log-probabilities or rewards that differ from its own."""
    train(run, [run.complete(replace(completion(6, i, 2), reward=4.0 + i)) for i in (0, 1)])
    return "only the rollout knew what it had sampled; the record is the first that anybody sees"


def changes_a_metric(run: AuditedRun) -> str:
    """A step reports a wrong loss or a wrong time."""
    train(run, both(run, 6, 2), metrics={"loss": 9.0})
    return (
        "losses, seconds and texts are what their writer measured; a replay computes losses again"
    )


def takes_a_version_and_dies(run: AuditedRun) -> str:
    """A rollout names a newest version that it never applied."""
    for name in ("6.0", "6.1"):
        run.order(order(6, int(name[-1]), 2, rollout="rollout-3"))
    applied = Applied("rollout-3", 1, Version(1, 1), "x", "hashes", 1, 0.1, 1.0)
    hash_ = read_manifest(run.store, Version(1, 1)).hash
    publish(run.bus, "applied", "rollout-3", replace(applied, hash=hash_))
    train(run, both(run, 6, 2, rollout="rollout-3", attempt=2))
    return (
        "tokens come before the comparison that `applied` states; the rollout may have died between"
    )


UNSEEN = (changes_what_was_sampled, changes_a_metric, takes_a_version_and_dies)
