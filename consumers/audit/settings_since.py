"""Checks that settings which travel in prompts hold from the group on that the run names: each
later group is of that configuration, no earlier one is, and the ledger's takes state it. Part of
invariant 1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollstream.consumers.audit import folds
from rollstream.consumers.audit.groups import GroupAudit
from rollstream.errors import StoreError
from rollstream.storage.stored_settings import is_configuration_hash, recorded_settings
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.records import Prompt, Take
from rollstream.streams.values import Address, SettingsSince

PROMPTED: tuple[tuple[str, Callable[[Prompt], object]], ...] = (
    ("trainer.samples_per_group", lambda prompt: prompt.needed or prompt.samples),
    ("sampling.temperature", lambda prompt: prompt.sampling.temperature),
    ("sampling.tokens_max", lambda prompt: prompt.sampling.tokens_max),
    ("seed", lambda prompt: prompt.seed),
)
"""Settings that a prompt holds, and where."""


@dataclass(slots=True)
class SettingsAudit:
    """Needs the whole of `admissions` before the ledger, and the ledger before `prompts`."""

    groups: GroupAudit
    store: ObjectStore | None
    result: folds.InvariantResult
    _differing: list[tuple[str, Address]] = field(default_factory=list[tuple[str, Address]])
    """Prompts with another value than their configuration, which admissions may not name."""
    _read: dict[str, Mapping[str, Any]] = field(
        default_factory=dict[str, Mapping[str, Any]], metadata={folds.DERIVED: True}
    )

    def apply(self, message: folds.AuditMessage) -> None:
        if message.void:
            return
        match message.record:
            case Take() as take if message.topic == "ledger":
                self._take(take, message.address)
            case Prompt() as prompt if message.topic == "prompts" and prompt.settings:
                self._prompt(prompt, prompt.settings, message.address)
            case _:
                pass

    def finish(self, coverage: folds.Coverage) -> None:
        changes = {a.settings for a in self.groups.admitted.values() if a.settings is not None}
        if changes:
            self.result.counts["changes of settings"] = len(changes)
        for group, admission in self.groups.admitted.items() if changes else ():
            due = max((change for change in changes if change.group <= group), default=None)
            if admission.settings != due:
                what = f"group {group} is of {_text(admission.settings)}, not of {_text(due)}"
                self.result.add_violation(what, "admissions")
        for what, at in self._differing:
            self.result.add_violation(what, "prompts", at)

    def _take(self, take: Take, at: Address) -> None:
        admitted = [self.groups.admitted.get(group.group) for group in take.groups]
        due = {a.settings for a in admitted if a is not None and a.settings is not None}
        if None not in admitted and due != set(take.settings):
            what = f"a take of step {take.step} states other settings than its groups' admissions"
            self.result.add_violation(what, "ledger", at)

    def _prompt(self, prompt: Prompt, settings: SettingsSince, at: Address) -> None:
        admission = self.groups.admitted.get(prompt.group)
        if admission is None or admission.prompt != at or prompt.group < settings.group:
            return
        values = self._values(settings.configuration_hash)
        for key, of_prompt in PROMPTED:
            if key in values and values[key] != of_prompt(prompt):
                what = f"group {prompt.group} has {key} {of_prompt(prompt)}, not {values[key]}"
                self._differing.append((what, at))

    def _values(self, configuration_hash: str) -> Mapping[str, Any]:
        if self.store is None or not is_configuration_hash(configuration_hash):
            return {}
        if configuration_hash not in self._read:
            try:
                self._read[configuration_hash] = recorded_settings(self.store, configuration_hash)
            except StoreError:
                self._read[configuration_hash] = {}
        return self._read[configuration_hash]


def _text(settings: SettingsSince | None) -> str:
    return "the run's first settings" if settings is None else f"those from {settings.group} on"
