"""The revision comes from the build; git is asked in our own checkout alone."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import rollstream
from rollstream import revision
from rollstream.revision import UNKNOWN, code_revision
from rollstream.run.cli.main import main
from rollstream.streams.release import RELEASE
from testbed.waiting import WAIT_S

SOURCES = Path(rollstream.__file__).parent.parent
COMPILED = shutil.ignore_patterns("__pycache__")
"""Left out of copies: another process may write there meanwhile."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine, git answers in time."""
    monkeypatch.setattr(revision, "_GIT_TIMEOUT_S", WAIT_S)


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    line = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder: Path) -> None:
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "theirs", "--allow-empty")


def test_a_users_repository_around_the_package_is_not_asked(tmp_path: Path) -> None:
    """Like a virtual environment inside it, whether or not its files are tracked there."""
    package = tmp_path / ".venv" / "lib" / "rollstream"
    package.mkdir(parents=True)
    shutil.copy(SOURCES / "rollstream" / "revision.py", package)
    repository(tmp_path)
    assert code_revision(package) == UNKNOWN


def test_a_checkout_of_ours_has_its_commit_and_whether_it_changed(tmp_path: Path) -> None:
    package = tmp_path / "rollstream"
    package.mkdir()
    shutil.copy(SOURCES / "rollstream" / "revision.py", package)
    repository(tmp_path)
    commit = git(tmp_path, "rev-parse", "HEAD")
    assert code_revision(package) == commit
    (package / "revision.py").write_text("")
    assert code_revision(package) == f"{commit}+changes"


def test_an_untracked_copy_at_the_top_of_a_users_repository_is_not_ours(tmp_path: Path) -> None:
    repository(tmp_path)
    shutil.copytree(SOURCES / "rollstream", tmp_path / "rollstream", ignore=COMPILED)
    assert code_revision(tmp_path / "rollstream") == UNKNOWN


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"rollstream {RELEASE} ({code_revision()})\n"
    assert rollstream.__version__ == RELEASE


def installed(wheel: Path, folder: Path) -> Path:
    """The `rollstream` command of an environment that has the wheel, no checkout, and of this
    environment's packages all but Rollstream.
    """
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    line = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    subprocess.run([*line, "--no-deps", "--no-index", str(wheel)], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "rollstream" not in path.name:
            (dependencies / path.name).symlink_to(path)
    (packages / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin" / "rollstream"


def output(command: Path, argument: str, cwd: Path) -> str:
    line, environment = [str(command), argument], {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        line, check=True, env=environment, cwd=cwd, capture_output=True, text=True
    )
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stated", ["", "abc123"])
def test_a_wheel_carries_its_revision(tmp_path: Path, stated: str) -> None:
    """Without a checkout git cannot be asked, so an image states it. The command of the wheel runs
    in a folder whose modules have the names of Rollstream's packages.
    """
    source = tmp_path / "source"
    for name in ("streams", "storage", "producers", "consumers", "simulator", "rollstream"):
        shutil.copytree(SOURCES / name, source / name, symlinks=True, ignore=COMPILED)
    for name in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(SOURCES / name, source)
    repository(source)
    wheels = ["pip", "wheel", "--no-deps", "--no-build-isolation", "-q", "-w", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "ROLLSTREAM_REVISION": stated}
    line = [sys.executable, "-m", *wheels, str(source)]
    subprocess.run(line, check=True, env=environment)
    (wheel,) = tmp_path.glob("*.whl")
    assert f"-{RELEASE}-" in wheel.name
    with zipfile.ZipFile(wheel) as built:
        text = built.read("rollstream/_revision.py").decode()
        folders = {name.partition("/")[0] for name in built.namelist()}
        assert {"rollstream/streams/records.py", "rollstream/simulator/world.py"} <= {
            *built.namelist()
        }
    assert folders == {"rollstream", f"rollstream-{RELEASE}.dist-info"}
    revision = stated or git(source, "rev-parse", "HEAD")
    assert text == f'REVISION = "{revision}"\n'
    assert not (source / "rollstream" / "_revision.py").exists()
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    for name in ("storage.py", "streams.py"):
        (theirs / name).write_text("raise ImportError('of the user')\n")
    command = installed(wheel, tmp_path / "environment")
    assert "usage: rollstream" in output(command, "--help", theirs)
    assert output(command, "--version", theirs) == f"rollstream {RELEASE} ({revision})\n"
