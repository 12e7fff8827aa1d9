"""A plain run imports no option that its configuration does not name: who does not use an option
neither imports nor reads it. An option is a folder below a top one that is not listed as core.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.repository import ROOT

CORE = {
    "streams", "storage", "storage/stores", "storage/weights", "storage/starting_model",
    "producers", "producers/rollout", "producers/engines", "producers/tasks", "producers/rewards",
    "consumers", "consumers/dispatch", "consumers/trainer", "consumers/trainer/data",
    "consumers/trainer/learn",
}  # fmt: skip
TOPS = ("streams", "storage", "producers", "consumers", "simulator")
NAMED = {"streams/sqlite", "producers/engines/torch"}
"""What a plain run's configuration names: its log and its engine."""
SETTINGS = {"producers/engines/paced", "producers/dialogue", "storage/weights/delta"}
"""Imported by the settings of every role, and by manifests."""
LEFT = {
    "dispatch": SETTINGS,
    "rollout": SETTINGS | {"producers/drafts", "producers/sandbox", "producers/scoring"},
    "train": SETTINGS | {"consumers/trainer/sharded"},
}
"""By role the options that are still imported though the configuration names none of them."""
LISTING = """
import importlib, json, sys
from rollstream.config.config import load
from rollstream.roles.catalogue import ROLES
c = load(sys.argv[2], [])
ROLES[sys.argv[1]].load()
if sys.argv[1] == "dispatch":
    import rollstream.consumers.dispatch.service
    from rollstream.consumers.dispatch.policy import ASSIGNMENT_POLICIES
    importlib.import_module(ASSIGNMENT_POLICIES[c.dispatch.placement].partition(":")[0])
if sys.argv[1] == "rollout":
    importlib.import_module("rollstream.producers.rollout.single_turn")
files = [str(getattr(module, "__file__", "") or "") for module in sys.modules.values()]
print(json.dumps(files))
"""


@pytest.mark.parametrize("role", LEFT)
def test_a_role_of_a_plain_run_imports_no_option_but_those_that_are_left(role: str) -> None:
    plain = ROOT / "examples" / "quickstart.toml"
    done = subprocess.run(
        [sys.executable, "-c", LISTING, role, str(plain)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    imported = {_folder(Path(file)) for file in json.loads(done.stdout.splitlines()[-1]) if file}
    options = {one for one in imported if one and one not in CORE | NAMED}
    assert options == LEFT[role]


def _folder(file: Path) -> str:
    """Returns the folder of a file in one of the top folders; "" for others. The package's links
    into them are followed.
    """
    try:
        parts = file.resolve().relative_to(ROOT.resolve()).parts
    except ValueError:
        return ""
    return "/".join(parts[:-1]) if parts[0] in TOPS else ""
