"""Settings that are changed at a resume hold from where the run says they do."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from rollstream.consumers.audit.audit import Audit
from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.earlier_rules import earlier_rules
from rollstream.consumers.trainer.data.training_rule import training_rule
from rollstream.producers.prompt_source import PromptOrder, PromptSource
from rollstream.producers.tasks.base import TaskPrompt
from rollstream.run.config.config import fingerprint, store_configuration
from rollstream.run.config.recorded_configuration import accepted_changes, record_configuration
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import read_or_create_identity
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.weights.checkpoints import write_checkpoint
from rollstream.storage.weights.pointer import POINTER_KEY, Pointer
from rollstream.streams.bus import Bus
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.records import Admitted, Prompt
from rollstream.streams.topics import catalogue
from rollstream.streams.values import Address, Sampling, SettingsSince, Version
from rollstream.streams.writer import FencedWriter
from testbed.memory import MemoryBus, MemoryStore
from testbed.stepped.resumed import resumed
from testbed.stepped.run import Shape
from testbed.waiting import wait_for

AHEAD = 4
FIRST, SECOND = "a" * 32, "b" * 32


def prompts(bus: Bus) -> list[Prompt]:
    reader = TopicReader(bus, "prompts", from_begin(bus, "prompts"))
    records = [one.record for one in reader.read_to(bus.end("prompts"))]
    return sorted((one for one in records if isinstance(one, Prompt)), key=lambda one: one.group)


def publish(bus: Bus, term: int, settings: str, temperature: float, until: int) -> None:
    """Runs a source until it has published so many prompts."""
    sampling = Sampling(temperature)
    order = PromptOrder("t", lambda seed, group: TaskPrompt((1, 2), ""), sampling, 2, seed=0)
    source, stop = PromptSource(bus, order, term, AHEAD, settings), threading.Event()
    thread = threading.Thread(target=source.run, args=(stop,))
    thread.start()
    wait_for(lambda: len(prompts(bus)) >= until)
    stop.set()
    thread.join()


def admit(bus: Bus, term: int, records: list[Admitted]) -> None:
    writer = FencedWriter(bus, "admissions", "dispatch", term)
    writer.open()
    writer.append([(str(one.group), one) for one in records])


def admission(group: int, settings: SettingsSince | None = None) -> Admitted:
    names = (f"{group}.0", f"{group}.1")
    return Admitted(group, 0, names, 60.0, Address(0, group), settings=settings)


def test_published_prompts_keep_their_settings_and_later_ones_name_their_first_group():
    bus = MemoryBus()
    bus.create(catalogue(1))
    publish(bus, 1, FIRST, 1.0, AHEAD)
    admit(bus, 1, [admission(group) for group in range(AHEAD)])
    publish(bus, 2, SECOND, 0.5, 2 * AHEAD)
    admit(bus, 2, [admission(group) for group in range(AHEAD, 2 * AHEAD)])
    publish(bus, 3, SECOND, 0.5, 3 * AHEAD)
    first, second = SettingsSince(0, FIRST), SettingsSince(AHEAD, SECOND)
    assert [one.settings for one in prompts(bus)] == [first] * AHEAD + [second] * 2 * AHEAD
    assert [one.sampling.temperature for one in prompts(bus)] == [1.0] * AHEAD + [0.5] * 2 * AHEAD


def test_a_resume_names_the_step_and_the_group_from_which_each_change_holds():
    bus, store = MemoryBus(), MemoryStore()
    bus.create(catalogue(1))
    before = Configuration()
    read_or_create_identity(store, before.run)
    record_configuration(store, before)
    publish(bus, 1, fingerprint(before), 1.0, AHEAD)
    now = Configuration.model_validate({"sampling": {"temperature": 0.5}, "trainer": {"lr": 1e-4}})
    write_checkpoint(store, 10, 1, {}, {})
    pointer = Pointer(before.run, 1, Version(13, 1), "", "", None)
    store.create(POINTER_KEY, encode_json(pointer))
    assert accepted_changes(bus, store, before) == []
    assert accepted_changes(bus, store, now) == [
        "sampling.temperature: 1.0 → 0.5 from group 4 on (published groups keep 1.0)",
        "trainer.lr: 0.0005 → 0.0001 from step 11 on (those up to 13 are trained again)",
    ]


def audited(bus: Bus, store: MemoryStore) -> list[str]:
    (result,) = (r for r in Audit(bus, store, "run", AuditPolicy()).check() if r.number == 1)
    return [offender.what for offender in result.offenders]


def test_the_audit_compares_groups_with_the_settings_that_they_name():
    """Group 5 was admitted under the first settings, and prompts have another temperature than
    their configuration.
    """
    bus, store = MemoryBus(), MemoryStore()
    bus.create(catalogue(1))
    now = Configuration.model_validate({"trainer": {"samples_per_group": 2}})
    store_configuration(store, now)
    publish(bus, 1, FIRST, 1.0, AHEAD)
    since = SettingsSince(AHEAD, fingerprint(now))
    admit(bus, 1, [admission(group) for group in range(AHEAD)])
    publish(bus, 2, fingerprint(now), 0.5, 2 * AHEAD)
    reader = TopicReader(bus, "prompts", from_begin(bus, "prompts"))
    at = {
        received.record.group: received.address
        for received in reader.read_to(bus.end("prompts"))
        if isinstance(received.record, Prompt)
    }
    late = [admission(group, since if group != 5 else None) for group in range(AHEAD, 7)]
    admit(bus, 2, [structs.replace(one, prompt=at[one.group]) for one in late])
    found = audited(bus, store)
    assert "group 5 is of the run's first settings, not of those from 4 on" in found
    assert "group 4 has sampling.temperature 0.5, not 1.0" in found


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
def test_a_run_resumed_with_steps_of_another_size_neither_hangs_nor_floods(
    tmp_path: Path, before: int, after: int
):
    first = Shape(steps=5, groups=before, samples=2, changed=(("sampling.tokens_max", 20),))
    then = replace(first, groups=after, changed=(("sampling.tokens_max", 12),))
    assert resumed(first, then, 3, tmp_path).lines() == []


@pytest.mark.parametrize(
    "changed",
    [{"max_lag": 0}, {"max_lag": 1}, {"changed": (("trainer.filter_equal_rewards", True),)}],
    ids=["lag_0", "lag_1", "filter"],
)
@pytest.mark.parametrize("keep_version", [False, True])
def test_recorded_takes_keep_the_rule_under_which_they_were_taken(
    tmp_path: Path, keep_version: bool, changed: dict[str, Any]
):
    """The finished steps behind the checkpoint are trained again, with samples that the new rule
    would drop. Groups that were admitted further ahead than a smaller `max_lag` allows wait for
    their version, and take the places of those that expire.
    """
    first = Shape(steps=6, groups=4, samples=2, keep_version=keep_version)
    assert resumed(first, replace(first, **changed), 3, tmp_path).lines() == []


def test_a_take_whose_configuration_is_not_kept_is_trained_under_the_present_rule():
    store, rule = MemoryStore(), training_rule(Configuration().trainer, 4, False)
    kept = Configuration.model_validate(
        {"dispatch": {"max_lag": 1}, "trainer": {"survivors_min": 3}}
    )
    store_configuration(store, kept)
    taken = {(1, 0, 0): fingerprint(kept), (1, 0, 1): FIRST, (2, 0, 0): "not a hash"}
    rules = earlier_rules(store, rule, taken)
    assert rules == {(1, 0, 0): replace(rule, max_lag=1, survivors_min=3)}
