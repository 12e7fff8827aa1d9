"""Takes from a run's store what this host's files do not have: defaults that follow the data, and
the starting adapter. So a role on another host needs the run's TOML file alone.
"""

import logging
from pathlib import Path
from tempfile import TemporaryDirectory

from rollstream.errors import ConfigurationError, StoreError
from rollstream.look.query.locate import url_inside
from rollstream.run.config.config import essential_settings
from rollstream.run.config.fitted_defaults import FOLLOW_DATA
from rollstream.run.config.run_model import run_model
from rollstream.run.config.settings import Configuration
from rollstream.run.config.sources import SettingLayers
from rollstream.storage.identity import read_identity
from rollstream.storage.model_folder.lora_folder import adapter_settings
from rollstream.storage.settings import LoraSettings
from rollstream.storage.starting_model.manifest import ADAPTER
from rollstream.storage.stored_settings import recorded_settings
from rollstream.storage.stores.connect import open_store

log = logging.getLogger(__name__)

# Longest wait for the store: a role waits for it longer, once it has started.
STORE_S = 10.0


def stored_defaults(c: Configuration, folder: Path) -> SettingLayers:
    """Returns the stored defaults of `FOLLOW_DATA`; none while the store cannot be read, which the
    role itself reports.
    """
    recorded = SettingLayers()
    url = url_inside(c.store, folder)
    if url.startswith("file:") and not Path(url.removeprefix("file:")).is_dir():
        # Opening the store would make the folder.
        return recorded
    try:
        store = open_store(url, c.sync, STORE_S)
        identity = read_identity(store)
        if identity is None or identity.run != c.run or not identity.configuration:
            return recorded
        values = essential_settings(Configuration())
        values |= recorded_settings(store, identity.configuration)
    except (ConfigurationError, StoreError) as error:
        log.debug("the run's recorded settings cannot be read: %s", error)
        return recorded
    for key in FOLLOW_DATA:
        if key in values:
            recorded.put(key, values[key], "the run's store")
    return recorded


def stored_adapter(c: Configuration, folder: Path) -> LoraSettings | None:
    """Returns None if the store has no adapter. Raises `StoreError` if the store cannot be read."""
    model = run_model(c, folder)
    if model is None or c.model.lora.path is None or not model.has_adapter:
        return None
    with TemporaryDirectory(prefix="rollstream-adapter-") as cache:
        adapter = adapter_settings(
            str(model.host_folder(ADAPTER, Path(c.model.lora.path), Path(cache)))
        )
    return adapter.model_copy(update={"path": c.model.lora.path})
