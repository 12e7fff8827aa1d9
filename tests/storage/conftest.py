"""Every store, two real S3 servers and a weight stream's part among them, and a tiny model, for the
tests of this folder.
"""

import pytest

from rollstream.storage.starting_model.models import build_model
from rollstream.storage.stores.connect import open_store
from rollstream.storage.weights.named_streams import WeightStream
from testbed.memory import MemoryStore
from testbed.servers import moto_s3, versity
from tests.storage.storage_samples import TINY

STORES = {
    "file": lambda folder: f"file:{folder}/store",
    "s3@versitygw": lambda folder: versity.new_url(),
    "s3@moto": lambda folder: moto_s3.new_url(),
}


def of_the_second_server(name):
    """VersityGW is asked the same in less time, so moto is a part of `make test-slow`."""
    return pytest.param(name, marks=pytest.mark.slow if name == "s3@moto" else ())


@pytest.fixture(params=map(of_the_second_server, ["memory", "stream", *STORES]))
def store(request, tmp_path):
    if request.param == "memory":
        return MemoryStore()
    if request.param == "stream":
        return WeightStream("draft").part(open_store(STORES["file"](tmp_path)))
    return open_store(STORES[request.param](tmp_path))


@pytest.fixture(params=map(of_the_second_server, ["s3@versitygw", "s3@moto"]))
def s3_url(request, tmp_path):
    """An empty prefix on each S3 server."""
    return STORES[request.param](tmp_path)


@pytest.fixture(scope="session")
def tiny_model():
    return build_model("Qwen3ForCausalLM", TINY, seed=3)
