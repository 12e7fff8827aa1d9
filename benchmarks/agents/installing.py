"""Installs the programs of `agents_unchanged`, each with its libraries in an ignored folder of its
own (`FOLDER`), and names the command that runs one (`programs`). A program whose tools or libraries
cannot be had is counted as missing, with the reason.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from testbed.repository import ROOT
from testbed.servers import CACHE, installing

FOLDER = CACHE / "agents"
SOURCES = ROOT / "benchmarks" / "agents" / "programs"
EXAMPLES = ROOT / "examples" / "agents"
OPENAI_AGENTS, VERIFIERS = "openai-agents==0.24.0", "verifiers==0.4.0"
INSTALL_S = 900.0


class ProgramMissing(Exception):
    """Raised for a program that cannot be installed; the message states why."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command line that takes a prompt as its last argument; or, with `is_service`, one that
    takes the endpoint's URL and the folder of a tokenizer, and opens episodes itself.
    """

    command: Sequence[str]
    is_service: bool = False


def programs() -> Mapping[str, Callable[[], Program]]:
    """Returns by name what installs a program and returns it."""
    return {
        "openai (Python)": lambda: Program([sys.executable, str(SOURCES / "openai_sync.py")]),
        "openai (Python, async)": lambda: Program(
            [sys.executable, str(SOURCES / "openai_async.py")]
        ),
        "openai (Python, streaming)": lambda: Program(
            [sys.executable, str(SOURCES / "openai_stream.py")]
        ),
        "openai (Node)": node_program,
        "openai (Go)": go_program,
        "curl (shell)": shell_program,
        "openai-agents": openai_agents_program,
        "verifiers": verifiers_program,
    }


def node_program() -> Program:
    """Installs the library openai for Node beside a copy of the example."""
    folder = FOLDER / "node"
    with installing():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "sorting.mjs"):
            shutil.copy(EXAMPLES / name, folder / name)
        if not (folder / "node_modules" / "openai").exists():
            _run(["npm", "install", "--no-audit", "--no-fund"], folder)
    return Program([_tool("node"), str(folder / "sorting.mjs")])


def go_program() -> Program:
    """Builds the program in Go, a minute or two the first time."""
    program = FOLDER / "go" / "agent"
    with installing():
        program.parent.mkdir(parents=True, exist_ok=True)
        sources = [SOURCES / "go" / name for name in ("main.go", "go.mod", "go.sum")]
        if not program.exists() or program.stat().st_mtime < max(
            each.stat().st_mtime for each in sources
        ):
            _run(["go", "build", "-o", str(program), "."], SOURCES / "go")
    return Program([str(program)])


def shell_program() -> Program:
    for name in ("curl", "jq"):
        _tool(name)
    return Program([_tool("sh"), str(SOURCES / "ask.sh")])


def openai_agents_program() -> Program:
    return Program([str(python_with(OPENAI_AGENTS)), str(EXAMPLES / "openai_sorter.py")])


def verifiers_program() -> Program:
    service = str(SOURCES / "verifiers_service.py")
    return Program([str(python_with(VERIFIERS)), service], is_service=True)


def python_with(requirement: str) -> Path:
    """Returns the Python of a virtual environment that has this requirement and nothing of ours."""
    folder = FOLDER / requirement
    python = folder / "bin" / "python"
    with installing():
        if not (folder / "installed").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.parent.mkdir(parents=True, exist_ok=True)
            _run([sys.executable, "-m", "venv", str(folder)], ROOT)
            _run([str(python), "-m", "pip", "install", "-q", requirement], ROOT)
            (folder / "installed").touch()
    return python


def _tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise ProgramMissing(f"{name} is not installed")
    return found


def _run(command: Sequence[str], folder: Path) -> None:
    _tool(command[0])
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=INSTALL_S, check=False
    )
    if done.returncode:
        raise ProgramMissing(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
