"""A run keeps the day on which it began, which its chat template writes as the present one."""

import logging
from pathlib import Path

import pytest

from rollstream.errors import ConfigurationError
from rollstream.producers.settings import TaskSettings
from rollstream.producers.tasks.registry import load_task
from rollstream.run.config.run_folder import store_url
from rollstream.run.config.run_model import task_settings
from rollstream.run.config.settings import Configuration
from rollstream.storage.identity import RunIdentity, read_identity, read_or_create_identity
from rollstream.storage.stores.base import ObjectStore
from rollstream.storage.stores.connect import open_store
from rollstream.storage.stores.json_objects import encode_json
from rollstream.storage.stores.run_keys import IDENTITY_KEY

RUN = Configuration()


def begun(folder: Path, day: str) -> ObjectStore:
    store = open_store(store_url(RUN, folder), RUN.sync)
    store.create(IDENTITY_KEY, encode_json(RunIdentity("1" * 16, RUN.run, day=day)))
    return store


def test_prompts_have_the_day_on_which_the_run_began(tmp_path: Path):
    assert task_settings(RUN, tmp_path).template_date is None
    begun(tmp_path, "2026-02-03")
    assert task_settings(RUN, tmp_path).template_date == "2026-02-03"
    task = RUN.task.model_copy(update={"template_date": "2025-01-02"})
    set_day = RUN.model_copy(update={"task": task})
    assert task_settings(set_day, tmp_path).template_date == "2025-01-02"


def test_a_run_of_an_older_release_gets_its_day_once_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    store = begun(tmp_path, "")
    with caplog.at_level(logging.WARNING):
        first = read_or_create_identity(store, RUN.run)
        assert read_or_create_identity(store, RUN.run) == first == read_identity(store)
    assert first.day
    (message,) = [record.getMessage() for record in caplog.records]
    assert "began with an older release: from now on" in message
    assert first.day in message


def test_values_of_a_template_need_a_template():
    settings = TaskSettings(name="dataset", template="plain", template_values={"a": 1})
    with pytest.raises(ConfigurationError, match=r'set task.template = "chat"'):
        load_task(settings)
