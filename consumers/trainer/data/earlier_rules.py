"""The rule under which each recorded take was taken: a resumed run may have a smaller `max_lag` or
`filter_equal_rewards`, which would drop samples that the ledger states to be trained.
"""

import logging
from collections.abc import Mapping

from rollstream.consumers.trainer.data.poisoned_takes import TakeNumber
from rollstream.consumers.trainer.data.training_rule import Choices, TrainingRule
from rollstream.errors import StoreError
from rollstream.storage.stored_settings import configuration_key, is_configuration_hash
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.json_objects import decode_json

log = logging.getLogger(__name__)


def earlier_rules(
    store: ObjectStore, rule: TrainingRule, taken_under: Mapping[TakeNumber, str]
) -> dict[TakeNumber, TrainingRule]:
    """The rules of those takes whose configuration chose otherwise than `rule`; a configuration
    that the store lacks counts as `rule`.
    """
    rules = {digest: _rule_of(store, rule, digest) for digest in set(taken_under.values())}
    return {
        number: rules[digest] for number, digest in taken_under.items() if rules[digest] != rule
    }


def _rule_of(store: ObjectStore, rule: TrainingRule, digest: str) -> TrainingRule:
    if not is_configuration_hash(digest):
        return rule
    key = configuration_key(digest)
    try:
        return rule.choosing_as(decode_json(store.get(key), Choices, key))
    except StoreError as error:
        log.warning("takes of the configuration %s are repeated under this one: %s", digest, error)
        return rule
