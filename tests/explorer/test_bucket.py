"""A run whose store is a real S3 server answers as one whose store is a folder; by the bucket's URL
alone, without the run's configuration and tokenizer, too, with token numbers instead of text.
"""

import json
import shutil

import pytest

from rollstream.storage.stores.connect import open_store
from testbed.explorer_server import serving
from testbed.servers import versity

PATHS = ("steps", "steps/2", "groups/1", "trajectories/1.0", "map/lag", "search?mode=text&q=531",
         "weights", "questions")  # fmt: skip
UNLIKE = {"seconds": 0, "missing": None}
"""What may differ: a command names the folder, and no request asks whether a bucket has weights."""


@pytest.fixture
def stored(asked_folders, tmp_path, monkeypatch):
    """The archived run with its store in a bucket: its folder, and the bucket's URL."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    url = versity.new_url()
    local, remote = open_store(f"file:{asked_folders['archived']}/store"), open_store(url)
    for entry in local.list(""):
        remote.put(entry.key, local.get(entry.key))
    folder = tmp_path / "stored"
    shutil.copytree(asked_folders["archived"], folder, ignore=shutil.ignore_patterns("store"))
    configuration = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(configuration | {"store": url}))
    monkeypatch.setenv("ROLLSTREAM_STORE", url)  # the user names the host that gets credentials
    return folder, url


def test_a_store_in_a_bucket_answers_as_a_folder(asked_folders, stored):
    folder, url = stored
    with serving([str(asked_folders["archived"])]) as near, serving([str(folder), url]) as far:
        for path in PATHS:
            known, found = near.json(f"r/0/{path}"), far.json(f"r/0/{path}")
            assert found | UNLIKE == known | UNLIKE, path
        assert far.json("r/1/steps") == near.json("r/0/steps")
        prompt = far.json("r/1/groups/1")["prompt"]
        assert prompt.split() == [str(int(word)) for word in prompt.split()]
