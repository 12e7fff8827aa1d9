"""A store that ignores the conditions of writes is refused by name, and no role of a run starts on
it.
"""

import threading
import uuid

import pytest

from rollstream.errors import ConfigurationError
from rollstream.run.config.settings import Configuration
from rollstream.run.roles.context import RoleLaunch
from rollstream.run.roles.roles import run_role
from rollstream.storage.stores.connect import check_conditional_writes, open_store
from testbed.servers import forgetful_s3
from tests.storage.storage_samples import in_threads


def check(store) -> None:
    check_conditional_writes(store, "s3://bucket/run", uuid.uuid4().hex)


def test_stores_that_keep_conditions_are_accepted_and_nothing_stays(store):
    in_threads(4, lambda number: check(store))
    assert list(store.list()) == []


@pytest.mark.parametrize("header", ["If-None-Match", "If-Match"])
def test_a_server_that_ignores_a_condition_is_refused_by_name(header):
    with forgetful_s3.serving(header) as (url, objects):
        with pytest.raises(ConfigurationError, match=f"s3://bucket/run ignores {header}: it") as no:
            check(open_store(url))
        assert objects == {}
    assert "Use a server that supports them" in str(no.value)


def test_no_role_starts_on_a_store_that_ignores_conditions(tmp_path):
    stop = threading.Event()
    stop.set()
    with forgetful_s3.serving("If-None-Match", "If-Match") as (url, _):
        configuration = Configuration(store=url, bus=f"sqlite:{tmp_path}/bus")
        with pytest.raises(ConfigurationError, match="ignores If-None-Match"):
            run_role(
                RoleLaunch(
                    role="archive",
                    configuration=configuration,
                    folder=tmp_path,
                    name="archive",
                    stop=stop,
                    nonce="nonce",
                )
            )
