"""What a fork is to begin from: its settings, a kept checkpoint of the parent, and the prompts that
are left. Nothing of the parent is written, and nothing of the fork is made yet.
"""

from dataclasses import dataclass
from pathlib import Path

from rollstream.consumers.trainer.checkpoint import TrainerState
from rollstream.analysis.locate import REPLAY_FILE
from rollstream.config.settings import Configuration
from rollstream.config.config import SettingChange, setting_changes, essential_settings, load
from rollstream.config.run_folder import RunFolder, bus_url, store_url
from rollstream.runs.parentage import PromptsLeft, prompts_left
from rollstream.runs.replay_folder import check_outside_run
from rollstream.storage.checkpoints import Checkpoint, CheckpointId, newest_checkpoint, stored_checkpoints
from rollstream.storage.stores.base import ObjectStore
from rollstream.streams.bus import Bus
from rollstream.errors import ConfigurationError, ObjectMissing
from rollstream.streams.reader import TopicReader, from_begin
from rollstream.streams.values import Address
from rollstream.streams.records import Admitted, GroupClosed, Take

UNCHANGEABLE_SETTINGS = ("model", "trainer.updates_per_step")
"""A checkpoint means nothing without."""
OWN_SETTINGS = ("run", "bus", "store")
"""What a fork has of its own, so that it is no change."""


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """The parent, and the fork's folder and settings."""

    parent: RunFolder
    before: Configuration
    folder: RunFolder
    now: Configuration

    def changes(self) -> list[SettingChange]:
        """What is learnt otherwise than in the parent."""
        found = setting_changes(essential_settings(self.before), essential_settings(self.now))
        return [change for change in found if change.key not in OWN_SETTINGS]


def plan_fork(parent: RunFolder, out: Path, overrides: list[str], step: int) -> ForkPlan:
    """All that is wrong with the settings is a `ConfigurationError`."""
    folder = RunFolder(out.absolute())
    before = load(parent.configuration)
    own = [f"run={before.run[:48]}-at-{step}", f"folder={folder.path}"]
    wanted = ForkPlan(parent, before, folder, load(parent.configuration, [*own, *overrides]))
    _check_settings(wanted, step)
    return wanted


def check_folders(parent: RunFolder, out: Path) -> None:
    """`ConfigurationError` where the one cannot be forked, or the other is not free."""
    folder = RunFolder(out.absolute())
    if (parent.path / REPLAY_FILE).exists():
        raise ConfigurationError(
            f"{parent.path} holds a replay, whose data are another run's: fork that run"
        )
    check_outside_run(folder.path, parent.path)
    if folder.path.exists() and (not folder.path.is_dir() or any(folder.path.iterdir())):
        raise ConfigurationError(
            f"{folder.path} is not empty; give a new folder with --out (without a config.json in "
            "it, it is a fork that was not finished, and may be deleted)"
        )


def _check_settings(wanted: ForkPlan, step: int) -> None:
    before, now = wanted.before, wanted.now
    if now.run == before.run:
        raise ConfigurationError(f"run: a fork has a name of its own, got {now.run} (the parent's)")
    for change in wanted.changes():
        if any(change.key == name or change.key.startswith(f"{name}.") for name in UNCHANGEABLE_SETTINGS):
            raise ConfigurationError(f"{change}; a checkpoint means nothing under another one")
    if now.trainer.steps <= step:
        raise ConfigurationError(
            f"trainer.steps must be > {step}, where the fork begins, got {now.trainer.steps}; "
            "say where it ends with --set trainer.steps=N"
        )
    for name, url_of in (("bus", bus_url), ("store", store_url)):
        url = url_of(now, wanted.folder.path)
        if url == url_of(before, wanted.parent.path):
            raise ConfigurationError(
                f"{name}: {url} is the parent's; give the fork one of its own with --set {name}=URL"
            )


def find_checkpoint(store: ObjectStore, text: str) -> Checkpoint:
    """The newest that reads whole up to this step (or of all: `latest`). `ObjectMissing` says which
    are kept, and why one is passed over.
    """
    if text != "latest" and not text.isdecimal():
        raise ConfigurationError(f"--at {text}: give the number of a step, or latest")
    restored = newest_checkpoint(store, None if text == "latest" else int(text))
    if restored.checkpoint is not None:
        return restored.checkpoint
    kept = [stored.id for stored in stored_checkpoints(store) if stored.whole]
    why = "".join(f"; {one} cannot be read: {reason}" for one, reason in restored.skipped)
    raise ObjectMissing(f"no checkpoint up to step {text} is kept; kept are: {_join_ids(kept)}{why}")


def _join_ids(kept: list[CheckpointId]) -> str:
    return ", ".join(map(str, kept)) or "none"


def prompts_left_at(log: Bus, state: TrainerState, had: PromptsLeft) -> PromptsLeft:
    """The prompts that were not trained and not closed up to the checkpoint's step, as admissions
    and ledger say; `log` reaches back to where the checkpoint needs it.
    """
    admitted = _admitted_groups(log)
    upto = state.intake_positions()["admissions"]
    read = [group for at, group in admitted.items() if at.offset < upto[at.partition].offset]
    unread = [group for at, group in admitted.items() if at.offset >= upto[at.partition].offset]
    following = max(read) + 1 if read else min(unread, default=had.first())
    opened = {admitted[group.admitted] for group in state.groups}
    return prompts_left(had, following, opened, state.ended, _ended_later(log, state))


def _admitted_groups(log: Bus) -> dict[Address, int]:
    reader = TopicReader(log, "admissions", from_begin(log, "admissions"))
    return {
        received.address: received.record.group
        for received in reader.read_to(log.end("admissions"))
        if isinstance(received.record, Admitted)
    }


def _ended_later(log: Bus, state: TrainerState) -> set[int]:
    """Groups that the ledger ends in a step after the checkpoint's: such takes may be older than
    it (`TrainerState.ahead`).
    """
    found: set[int] = set()
    for received in TopicReader(log, "ledger", {0: state.ledger}).read_to(log.end("ledger")):
        match received.record:
            case Take() as take if take.step > state.step:
                found |= {group.group for group in take.groups}
            case GroupClosed() as closed if closed.step > state.step:
                found.add(closed.group)
            case _:
                pass
    return found
