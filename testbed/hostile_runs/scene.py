"""The machine of a user who received a run from a stranger (`Scene`), in one folder: a home with
keys, a project with old files, a run of the user's own, an installed module, and the received run.

`snapshot` describes files so that two descriptions show what a command changed, created or deleted.
Rollstream's own state and cache (`own/`) and what the user asked for (`out/`) are apart.
"""

import hashlib
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from testbed.hostile_runs.base_run import (
    make_archive,
    make_backup,
    make_base_run,
    read_json,
    write_json,
)
from testbed.repository import ROOT
from testbed.servers.guard import mark_variable

OLD_S = 1_500_000_000.0
"""Modification time of the user's files: long past every age at which a program cleans up."""
SECRETS = {
    "KAFKA_USER": "planted-kafka-user-1f3a",
    "KAFKA_PASSWORD": "planted-kafka-password-77c0",
    "AWS_ACCESS_KEY_ID": "PLANTEDACCESSKEY0042",
    "AWS_SECRET_ACCESS_KEY": "planted-aws-secret-key-5e1d",
    "AWS_SESSION_TOKEN": "planted-aws-session-token-90bb",
    "HF_TOKEN": "hf_plantedtoken2718",
    "OPENAI_API_KEY": "sk-planted-3141",
}
"""Variables of the user's environment, each with a text that occurs nowhere else."""
OWN_ID = "0123456789abcdef"
"""The id of the user's own run."""
OAUTH_TOKEN, SSH_KEY = "planted-oauth-token-8d21", "planted-ssh-key-c4f6"
AWS_FILE = "[default]\naws_access_key_id = PLANTEDPROFILEKEY0043\naws_secret_access_key = x\n"
PLANTED = (*SECRETS.values(), OAUTH_TOKEN, SSH_KEY, "PLANTEDPROFILEKEY0043")
"""The texts that no foreign host and no output may get."""
MARKING = "open({mark!r}, 'a').write({name!r} + chr(10))\n"
HOSTILE_CODE = """
def __getattr__(name):
    if name.startswith('__'):
        raise AttributeError(name)
    {marking}
    return lambda *given, **named: 'planted'
"""

Snapshot = dict[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class Scene:
    """Names the folders of one scene below `root`."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / "user" / "home"

    @property
    def project(self) -> Path:
        """A project of the user's, with old files."""
        return self.root / "user" / "project"

    @property
    def own_run(self) -> Path:
        """A healthy run of the user's."""
        return self.root / "user" / "runs" / "own"

    @property
    def received(self) -> Path:
        """The folder that the stranger sent, packed and unpacked: a run, an archive or a backup."""
        return self.root / "user" / "received" / "run"

    @property
    def out(self) -> Path:
        """Where the user lets commands write."""
        return self.root / "out"

    @property
    def own(self) -> Path:
        """Rollstream's own state, cache and sockets."""
        return self.root / "own"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def marks(self) -> Path:
        """The file in which each hostile module leaves a line when it is imported or called."""
        return self.root / "marks.txt"

    @property
    def site(self) -> Path:
        """A folder on Python's path, with a module that the user installed."""
        return self.root / "user" / "site"

    def environment(self) -> dict[str, str]:
        """Returns the environment of the user's commands, secrets included."""
        own = {f"XDG_{name}_HOME": str(self.own / name.lower()) for name in ("STATE", "CACHE")}
        return {
            "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(self.site))),
            "HOME": str(self.home),
            "TMPDIR": str(self.temporary),
            "XDG_RUNTIME_DIR": str(self.own / "runtime"),
            "XDG_CONFIG_HOME": str(self.home / ".config"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "100",
            "LANG": "C.UTF-8",
            "BROWSER": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_MAX_ATTEMPTS": "1",
            "HF_HUB_OFFLINE": "1",
            "KAFKA_TOKEN_FILE": str(self.home / "token.txt"),
            **own,
            **mark_variable(),
            **SECRETS,
        }

    def clear_out(self) -> None:
        """Empties the folders that commands write to; what the user trusted is forgotten, too."""
        for folder in (self.out, self.own):
            shutil.rmtree(folder)
        self.out.mkdir()
        (self.own / "runtime").mkdir(parents=True)

    def marked(self) -> list[str]:
        """Returns the names that hostile modules left, and forgets them."""
        if not self.marks.exists():
            return []
        lines = self.marks.read_text(encoding="utf-8").split()
        self.marks.unlink()
        return lines

    def module(self, name: str) -> str:
        """Returns the source of a module that leaves `name` when it is imported or called."""
        marking = MARKING.format(mark=str(self.marks), name=name)
        return marking + HOSTILE_CODE.format(marking=marking.strip())


@dataclass(frozen=True, slots=True)
class Templates:
    """Holds the healthy run, archive and backup that scenes copy."""

    root: Path

    def copy(self, kind: str, target: Path) -> None:
        """Copies `run`, `archive` or `backup` to `target`, which does not exist yet."""
        shutil.copytree(self.root / kind, target, symlinks=True)


def make_templates(root: Path) -> Templates:
    """Makes one of each kind."""
    run = make_base_run(root / "run")
    make_archive(run, root / "archive")
    make_backup(run, root / "backup")
    return Templates(root)


def make_scene(
    root: Path, templates: Templates, kind: str, mutate: Callable[[Scene], None]
) -> Scene:
    """Builds a scene whose received folder is a healthy one of this kind, changed by `mutate`."""
    scene = Scene(root)
    shutil.rmtree(root, ignore_errors=True)
    for folder in (scene.out, scene.own / "runtime", scene.temporary, scene.home / ".config"):
        folder.mkdir(parents=True)
    _fill_home(scene)
    templates.copy("run", scene.own_run)
    identity = scene.own_run / "store" / "run.json"
    if identity.exists():  # the stranger's run has an id of its own
        write_json(identity, read_json(identity) | {"id": OWN_ID})
    templates.copy(kind, scene.received)
    _make_old(scene.root / "user")
    mutate(scene)
    return scene


def _fill_home(scene: Scene) -> None:
    """Writes the user's files."""
    files = {
        scene.home / ".ssh" / "authorized_keys": "ssh-ed25519 AAAA user@home\n",
        scene.home / ".ssh" / "id_ed25519": f"{SSH_KEY}\n",
        scene.home / ".aws" / "credentials": AWS_FILE,
        scene.home / ".bashrc": "alias ll='ls -l'\n",
        scene.home / "token.txt": f"{OAUTH_TOKEN}\n",
        scene.project / "thesis.txt": f"years of work {SSH_KEY}\n",
        scene.project / "config.json": '{"mine": true}\n',
        scene.project / "data" / "results.csv": "1,2,3\n",
        scene.site / "installed_module.py": scene.module("installed_module"),
    }
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (scene.home / ".ssh").chmod(0o700)
    database = sqlite3.connect(scene.project / "user.db")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("CREATE TABLE mine (text)")
    database.execute("INSERT INTO mine VALUES (?)", (SSH_KEY,))
    database.commit()
    database.close()


def _make_old(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        os.utime(path, (OLD_S, OLD_S), follow_symlinks=False)


def snapshot(folder: Path, without: Path | None = None) -> Snapshot:
    """Returns by relative path what each entry below `folder` is: its kind, mode, times, content or
    target. Follows no link, and leaves `without` out.
    """
    entries: Snapshot = {}
    for path, folders, files in os.walk(folder):
        here = Path(path)
        if here == without:
            folders.clear()
            continue
        for name in (*folders, *files):
            entry = here / name
            if entry != without:
                with suppress(FileNotFoundError):  # of a process that has just been killed
                    entries[entry.relative_to(folder).as_posix()] = _state(entry)
    return entries


def _state(path: Path) -> tuple[object, ...]:
    status = path.lstat()
    state = (stat.S_IFMT(status.st_mode), stat.S_IMODE(status.st_mode), status.st_uid)
    if stat.S_ISLNK(status.st_mode):
        return (*state, os.readlink(path))
    if stat.S_ISREG(status.st_mode):
        digest = hashlib.sha1(path.read_bytes()).hexdigest() if status.st_size < 1 << 24 else ""
        return (*state, status.st_size, status.st_mtime_ns, digest)
    return state


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> list[str]:
    """Returns one line for each entry that was created, deleted or changed."""
    lines = [f"created {name}" for name in sorted(after.keys() - before.keys())]
    lines += [f"deleted {name}" for name in sorted(before.keys() - after.keys())]
    both = sorted(before.keys() & after.keys())
    return lines + [f"changed {name}" for name in both if before[name] != after[name]]
