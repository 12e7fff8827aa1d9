"""The steps of CONTRIBUTING.md for an engine, an object store, a turn driver, an assignment policy,
a loss, a form of versions and a role, followed in a copy of the repository: small
ones of a user become part of it, each in at most four files of the product.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from testbed.repository import ROOT
from testbed.waiting import WAIT_S
from tests.support.sources import FOLDERS

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
    from rollstream.producers.engines.options import EngineOptions
    from rollstream.producers.engine_factory import open_engine

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
STORE_KIND = """
from rollstream.storage.stores.file_kind import FileKind


class ToyKind(FileKind):
    form = "toy:FOLDER"

    def open(self, url, sync, deadline_s):
        from rollstream.storage.stores.toy.store import ToyStore

        return ToyStore(url.removeprefix("toy:"), sync)
"""
KIND_LINE = '    "toy:": "rollstream.storage.stores.toy.kind:ToyKind",\n'
DRIVER = '''
from dataclasses import dataclass

import numpy as np

from rollstream.producers.rollout.single_turn import SingleTurn

NEWLINE = np.array([10], np.uint32)


def open_twice(parts, task, scope):
    return Twice(parts, hold=True)


@dataclass(slots=True)
class Twice(SingleTurn):
    """A trajectory that stops once is asked to go on."""

    hold: bool = True

    def end_turn(self, running, finish):
        name = running.assignment.trajectory
        if finish != "stop" or running.turn_count() > 1:
            self.parts.engine.abort(name)
            SingleTurn.end_turn(self, running, finish)
            return
        running.extend_environment(NEWLINE, "")
        if running.leaving:
            self.parts.publisher.give_up([running])
            return
        self.parts.engine.append(name, NEWLINE)
        self.running[name] = running
'''
DRIVER_LINE = '    "toy": "rollstream.producers.toy.driver:open_twice",\n'
DRIVER_RULE = """    if getattr(task, "name", "") == "numbered":
        return "toy"
"""
POLICY = '''
from rollstream.consumers.dispatch.assignments import (
    assignment_record,
    eligible_rollouts,
    find_unassigned,
    free_room,
    unassigned_trajectories,
)
from rollstream.consumers.dispatch.policy import PlannedAssignment

QUEUE = 0.25


class LastFit:
    """The last rollout, by name, that has room."""

    def __init__(self, scope):
        self.scope = scope

    def plan(self, state, lengths, ahead, now_s):
        free, planned = free_room(state, QUEUE), []
        for samples in find_unassigned(state, lengths, self.scope.keep_version):
            room = free.new if samples.kind == "start" else free.resumes
            able = set(room)
            if samples.kind == "resume":
                able &= eligible_rollouts(state, samples.version)
            for trajectory in samples.trajectories:
                rollouts = [name for name in sorted(able) if room[name] > 0]
                if rollouts:
                    free.take(rollouts[-1])
                    how = samples.how[trajectory]
                    record = assignment_record(
                        state, self.scope.pace, samples.group, trajectory, how, rollouts[-1]
                    )
                    planned.append(PlannedAssignment(record, how.discards_tokens))
        return planned

    def room(self, state):
        waiting = sum(map(len, unassigned_trajectories(state)))
        return sum(free_room(state, QUEUE).new.values()) - waiting

    def move(self, state, lengths, now_s):
        return None
'''
POLICY_LINE = '    "toy": "rollstream.consumers.dispatch.toy:LastFit",\n'
FORM = '''
from rollstream.storage.weights.form import FormPublisher, VersionForm
from rollstream.storage.weights.publish import NewVersion, publish_version


class ToyTensors(dict):
    form = "toy"


class ToyForm(VersionForm):
    """Stores every version completely."""

    def publisher(self, publication):
        return ToyPublisher(publication)


class ToyPublisher(FormPublisher):
    def __init__(self, publication):
        self.p = publication

    def publish(self, version, tensors, parent, is_fork=False):
        p = self.p
        bound = p.settings.shard_bytes
        new = NewVersion(p.run, version, tensors, p.model_files, bound, p.clock(), p.leads)
        return publish_version(p.store, new, parent)
'''
FORM_LINE = '    "toy": "rollstream.storage.weights.toy:ToyForm",\n'
MADE_IMPORT = "from rollstream.storage.weights.toy import ToyTensors\n"
MADE_LINE = '    "toy": lambda number: ToyTensors(state_of(number)),\n'
LOSS_NAMES = {"dppo": "toy", "DppoSettings": "ToySettings", "divergence_max": "toy_max"}
"""What a researcher replaces in the copied file."""
FORMULA = """    "toy": (
        Paper(lambda token, s: masked(token, DppoSettings(divergence_max=s.toy_max))),
    ),
"""
STORE_LINE = '    "toy": lambda folder: f"toy:{folder}/store",\n'
ROLE = '''
from rollstream.run.roles.context import RoleContext


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


PRODUCT_FILES_MAX = 4


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """The product and its tests, as a contributor has them; what was added to the product is
    counted afterwards.
    """
    ignored = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=ignored)
        else:
            shutil.copy(ROOT / part, tmp_path / part)
    yield tmp_path
    sources = [path for top in FOLDERS for path in (tmp_path / top).rglob("*.py")]
    sources = [path for path in sources if not any(up.is_symlink() for up in path.parents)]
    changed = [path for path in sources if not _is_as_before(path, tmp_path)]
    assert 0 < len(changed) <= PRODUCT_FILES_MAX, changed


def _is_as_before(path: Path, copy: Path) -> bool:
    original = ROOT / path.relative_to(copy)
    return original.exists() and original.read_bytes() == path.read_bytes()


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
    names = "from rollstream.run.config.sources import file_layer; from pathlib import Path; "
    code = "from rollstream.run.config.config import validate_layers; "
    code += names + "print(validate_layers(file_layer(Path('run.toml'))).rollouts.engine)"
    assert _python(copy, "-c", code).strip() == "toy"


def test_the_steps_for_an_object_store(copy: Path) -> None:
    _new(copy, "storage/stores/", "toy/__init__.py", "")
    _new(copy, "storage/stores/", "toy/store.py", STORE)
    _new(copy, "storage/stores/", "toy/kind.py", STORE_KIND)
    _add(copy, "storage/stores/kind.py", KIND_LINE, '}\n"""By the begin of its URLs')
    _add(copy, "tests/storage/conftest.py", STORE_LINE, '    "s3@moto"')
    assert _passed(copy, "tests/storage/stores/test_store_contract.py") > 20


def test_the_steps_for_a_turn_driver(copy: Path) -> None:
    _new(copy, "producers/", "toy/__init__.py", "")
    _new(copy, "producers/", "toy/driver.py", DRIVER)
    _add(copy, "producers/rollout/turn_driver.py", DRIVER_LINE, '}\n"""By name, `module')
    _add(copy, "producers/rollout/turn_driver.py", DRIVER_RULE, "    if scope.agent.is_active:")
    kind = "from rollstream.producers.toy.driver import Twice\n\nKINDS = "
    suite = copy / "tests/rollout/test_turn_drivers.py"
    suite.write_text(
        suite.read_text().replace("KINDS = {", kind + '{"toy": Twice, ', 1), encoding="utf-8"
    )
    assert _passed(copy, "tests/rollout/test_turn_drivers.py") > 10
    (copy / "run.toml").write_text(PACED_RUN.replace("paced", "toyed", 1))
    _python(copy, "-m", "rollstream", "run", "run.toml", "--run", "runs/toyed")
    turns = "SELECT count(*) FROM trajectories WHERE list_contains(sources, 2)"
    assert _python(copy, "-m", "rollstream", "query", "runs/toyed", turns, "--json")


def test_the_steps_for_an_assignment_policy(copy: Path) -> None:
    _new(copy, "consumers/dispatch/", "toy.py", POLICY)
    _add(copy, "consumers/dispatch/policy.py", POLICY_LINE, '}\n"""By the value of')
    settings = copy / "consumers/settings.py"
    settings.write_text(
        settings.read_text().replace('"lengths", "room"]', '"lengths", "room", "toy"]')
    )
    assert _passed(copy, "tests/dispatch/test_policies.py") > 5
    (copy / "run.toml").write_text(PACED_RUN + '[dispatch]\nplacement = "toy"\n')
    _python(copy, "-m", "rollstream", "run", "run.toml", "--run", "runs/toyed")
    _python(copy, "-m", "rollstream", "audit", "runs/toyed")


def test_the_steps_for_a_loss(copy: Path) -> None:
    """One file of the product is new, and none is changed."""
    text = (copy / "consumers/objectives/losses/dppo.py").read_text()
    for name, new in LOSS_NAMES.items():
        text = re.sub(rf"\b{name}\b", new, text)
    assert len(text.splitlines()) < 60
    _new(copy, "consumers/objectives/losses/", "toy.py", text)
    _add(copy, "tests/objectives/test_losses.py", FORMULA, '    "plain": (Paper(')
    import_line = "from rollstream.consumers.objectives.losses.dppo import DppoSettings\n"
    _add(copy, "tests/objectives/test_losses.py", import_line, "from rollstream.consumers.trainer")
    assert _passed(copy, "tests/objectives/test_losses.py") > 4
    (copy / "run.toml").write_text('[trainer.loss]\nkind = "toy"\ntoy_max = 0.1\n')
    out = _python(copy, "-m", "rollstream", "config", "run.toml", "trainer.toy_max")
    assert out.startswith("trainer.toy_max = 0.1  (set in run.toml [trainer.loss])")
    floors = ("tests/test_floors.py", "-k", "says_what_is_inside or cycle")
    _python(copy, "-m", "pytest", "-q", "-p", "no:cacheprovider", *floors)


def test_the_steps_for_a_form_of_versions(copy: Path) -> None:
    _new(copy, "storage/weights/", "toy.py", FORM)
    _add(copy, "storage/weights/form.py", FORM_LINE, '}\n"""The forms by name')
    suite = "tests/storage/weights/test_forms.py"
    _add(copy, suite, MADE_IMPORT, "from rollstream.streams.values")
    _add(copy, suite, MADE_LINE, '    "anchors": lambda')
    assert _passed(copy, suite) >= 5


def test_the_steps_for_a_role(copy: Path) -> None:
    _new(copy, "rollstream/run/roles/", "toy.py", ROLE)
    _add(copy, "rollstream/run/role_catalogue.py", ROLE_LINE, ")\nROLES: ")
    assert "toy" in _python(copy, "-m", "rollstream", "--help")
    (copy / "paced.toml").write_text(PACED_RUN)
    _python(copy, "-m", "rollstream", "run", "paced.toml", "--run", "runs/paced")
    assert (copy / "runs" / "paced" / "toy.txt").read_text() == "toy"
