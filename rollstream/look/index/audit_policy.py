"""The settings of a run that its audit needs, from its recorded configurations and its model."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from rollstream.consumers.audit.spans import AuditPolicy
from rollstream.consumers.trainer.data.training_rule import (
    LATER_SETTINGS,
    TrainingRule,
    training_rule,
)
from rollstream.errors import StoreError
from rollstream.look.query.locate import RunLocation
from rollstream.look.query.looking import model_file, refused_code, trainer_settings
from rollstream.run.signals import warn
from rollstream.storage.model_folder.hf_folder import CONFIG, vocabulary_size
from rollstream.storage.stored_settings import CONFIGURATION_KEY, recorded_settings
from rollstream.streams.admissible import TrainingBounds

if TYPE_CHECKING:
    from rollstream.consumers.settings import TrainerSettings
    from rollstream.storage.stores.base import ObjectStore


def audit_policy(location: RunLocation, store: "ObjectStore | None" = None) -> AuditPolicy:
    """`known` is False if `config.json` lacks them."""
    on_update = location.table("rollouts").get("on_update")
    if on_update is None or "max_lag" not in location.table("dispatch"):
        return AuditPolicy(known=False)
    keep_version = on_update == "keep_version"
    trainer = trainer_settings(location)
    return AuditPolicy(
        location.max_lag,
        keep_version,
        rule=_rule(trainer, location, keep_version),
        refused=refused_code(location),
        choose=trainer.get("choose", ""),
        checkpoint_every=location.table("checkpoints").get("every", 0),
        epochs=trainer.get("epochs", 1),
        max_lags={} if store is None else _max_lags(store),
    )


def _max_lags(store: "ObjectStore") -> dict[str, int | None]:
    bounds: dict[str, int | None] = {}
    for entry in store.list("configurations/"):
        digest = entry.key.removeprefix("configurations/").removesuffix(".json")
        if not CONFIGURATION_KEY.fullmatch(entry.key):
            continue
        try:
            bound = recorded_settings(store, digest).get("dispatch.max_lag", 0)
        except StoreError as error:
            warn(f"{entry.key} cannot be read: {error}")
            continue
        if bound is None or isinstance(bound, int):
            bounds[digest] = bound
    return bounds


def _rule(
    trainer: Mapping[str, Any], location: RunLocation, keep_version: bool
) -> TrainingRule | None:
    """Returns None if a setting is missing that the run's release had (`LATER_SETTINGS`)."""
    settings = SimpleNamespace(**{**LATER_SETTINGS, **trainer})
    unknown = TrainingBounds()
    context_max = location.table("rollouts").get("context_max", unknown.context_max)
    content = model_file(location, CONFIG) if trainer else None
    vocabulary = None if content is None else vocabulary_size(content)
    # Without the model's folder any token id is accepted.
    bounds = TrainingBounds(vocabulary or unknown.vocabulary, context_max, keep_version)
    try:
        return training_rule(
            cast("TrainerSettings", settings), location.max_lag, keep_version, bounds
        )
    except AttributeError:
        return None
