"""The steps of CONTRIBUTING.md for an engine, an object store and a role, followed in a copy of the
repository: three small ones of a user become part of it.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from testbed.repository import ROOT
from testbed.waiting import WAIT_S

pytestmark = pytest.mark.long  # conformance suites and a run in processes of their own
PARTS = (
    "CONTRIBUTING.md", "rollstream", "streams", "storage", "producers", "consumers", "simulator",
    "testbed", "tests", "pyproject.toml",
)  # fmt: skip
ENGINE = '''
from rollstream.producers.engines.torch.engine import TorchEngine


class ToyEngine(TorchEngine):
    """The torch engine under a name of its own."""
'''
TOY_KIND = """
from rollstream.producers.engines.kind import EngineKind


class ToyKind(EngineKind):
    name = "toy"

    def open(self, c, model, tensors, version, options):
        from rollstream.producers.engines.toy.engine import ToyEngine

        return ToyEngine(model.config(), tensors, version, options)
"""
ENGINE_LINE = '    "toy": "rollstream.producers.engines.toy.kind:ToyKind",\n'
CONTRACT_LINES = """

def _toy(slots: int = 4, context_max: int = 96, emit_every: int = 64) -> Engine:
    from rollstream.producers.engines.base import EngineOptions
    from rollstream.producers.engines.factory import open_engine

    model = engine_samples.tiny_model("qwen3")
    options = EngineOptions(slots, context_max, emit_every)
    tensors = dict(model.state_dict())
    return open_engine("toy", model.config, tensors, engine_samples.V1, options)


KINDS["toy"] = Kind(_toy, _torch_weights, KINDS["torch"].tensor)
"""
STORE = '''
from rollstream.storage.stores.file import FileStore


class ToyStore(FileStore):
    """Files under a scheme of their own."""
'''
STORE_BRANCH = """    if scheme == "toy":
        from rollstream.storage.stores.toy import ToyStore

        return ToyStore(rest, sync)
"""
STORE_LINE = '    "toy": lambda folder: f"toy:{folder}/store",\n'
ROLE = '''
from rollstream.roles.context import RoleContext


def run_toy(context: RoleContext) -> bool:
    """Write the role's name into the run's folder, then wait until the role is stopped."""
    (context.folder / "toy.txt").write_text(context.name)
    context.stop.wait()
    return False
'''
ROLE_LINE = """    Role(
        name="toy",
        purpose="write its name",
        runs="toy:run_toy",
        processes=lambda c: ["toy"],
    ),
"""
PACED_RUN = """
run = "paced"
task = { name = "numbered", options = { prompts = 10, prompt_tokens = 16 } }
sampling = { tokens_max = 32 }
rollouts = { engine = "paced", count = 1, slots = 4, context_max = 64 }
evaluation = { enabled = false }
archive = { enabled = false }
[trainer]
learner = "paced"
steps = 3
groups_per_step = 1
samples_per_group = 2
[paced]
time_scale = 1000.0
weights_bytes = 2_000
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The product and its tests, as a contributor has them."""
    ignored = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / part, tmp_path / part)
    return tmp_path


def _new(copy: Path, folder: str, file: str, text: str) -> None:
    """Write a file of a folder that a step names."""
    assert f"`{folder}`" in (copy / "CONTRIBUTING.md").read_text()
    path = copy / folder / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


def _add(copy: Path, file: str, text: str, before: str = "") -> None:
    """Add lines to a file that a step names: in front of the only line that starts like `before`,
    or at its end.
    """
    assert f"`{file}`" in (copy / "CONTRIBUTING.md").read_text()
    whole = (copy / file).read_text()
    at = len(whole)
    if before:
        (at,) = (one.start() for one in re.finditer(f"^{re.escape(before)}", whole, re.MULTILINE))
    (copy / file).write_text(whole[:at] + text + whole[at:])


def _python(copy: Path, *words: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(
        [sys.executable, *words],
        cwd=copy, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def _passed(copy: Path, suite: str) -> int:
    """The number of tests of a conformance suite that passed with the toy; others are left out."""
    out = _python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", suite, "-k", "toy")
    (count,) = re.findall(r"(\d+) passed", out)
    return int(count)


def test_the_steps_for_an_engine(copy: Path) -> None:
    _new(copy, "producers/engines/", "toy/__init__.py", "")
    _new(copy, "producers/engines/", "toy/engine.py", ENGINE)
    _new(copy, "producers/engines/", "toy/kind.py", TOY_KIND)
    _add(copy, "producers/engines/kind.py", ENGINE_LINE, '}\n"""The values of `rollouts.engine`')
    _add(copy, "tests/support/contract_engines.py", CONTRACT_LINES)
    assert _passed(copy, "tests/engines/test_engine_contract.py") > 20
    (copy / "run.toml").write_text('rollouts = { engine = "toy" }\n')
    names = "from rollstream.config.sources import file_layer; from pathlib import Path; "
    code = "from rollstream.config.config import validate_layers; "
    code += names + "print(validate_layers(file_layer(Path('run.toml'))).rollouts.engine)"
    assert _python(copy, "-c", code).strip() == "toy"


def test_the_steps_for_an_object_store(copy: Path) -> None:
    _new(copy, "storage/stores/", "toy.py", STORE)
    _add(copy, "storage/stores/connect.py", STORE_BRANCH, "    known = ")
    _add(copy, "tests/storage/conftest.py", STORE_LINE, '    "s3@moto"')
    assert _passed(copy, "tests/storage/stores/test_store_contract.py") > 20


def test_the_steps_for_a_role(copy: Path) -> None:
    _new(copy, "rollstream/roles/", "toy.py", ROLE)
    _add(copy, "rollstream/roles/catalogue.py", ROLE_LINE, ")\nROLES: ")
    assert "toy" in _python(copy, "-m", "rollstream", "--help")
    (copy / "paced.toml").write_text(PACED_RUN)
    _python(copy, "-m", "rollstream", "run", "paced.toml", "--run", "runs/paced")
    assert (copy / "runs" / "paced" / "toy.txt").read_text() == "toy"
