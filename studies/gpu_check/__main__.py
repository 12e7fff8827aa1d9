"""`make gpu-check [MODEL=path]` measures this project on one GPU, without network, in pieces of at
most eight minutes: `python -m studies.gpu_check`.

Each piece is a process of its own and leaves FOLDER/PIECE.json. A piece that has one is not
measured again, so an interrupted check continues. FOLDER/table.md holds the lines of all pieces,
with the date and the device's name.

Without a GPU it prints one sentence and exits with 2; `--cpu-dry-run` does all pieces with a tiny
model, to test the check itself. See docs/gpu.md.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch

from rollstream.producers.engines.vllm.local.environment import INSTALL, installed_release
from studies.gpu_check import training, updates, whole_run
from studies.gpu_check.setup import DRY, ON_A_GPU
from testbed.repository import ROOT

NO_GPU = (
    "There is no GPU here (torch sees no CUDA device), so nothing was measured; "
    "docs/gpu.md says what this does."
)
PIECE_S = 480.0
TABLE = "table.md"


@dataclass(frozen=True, slots=True)
class Piece:
    """One measurement: its lines, and the package that it needs beside the project's own."""

    measure: Callable[[argparse.Namespace], list[str]]
    package: str = ""


def _trained(name: str) -> Piece:
    return Piece(lambda asked: training.measure(name, is_tiny=asked.cpu_dry_run))


def _run(asked: argparse.Namespace) -> list[str]:
    size = DRY if asked.cpu_dry_run else ON_A_GPU
    return whole_run.measure(size, asked.model, asked.memory_share)


PIECES: Mapping[str, Piece] = {
    "train-0.5b": _trained("0.5b"),
    "train-1.5b-lora": _trained("1.5b-lora"),
    "train-7b": _trained("7b"),
    "repeat": Piece(lambda asked: training.repeat(is_tiny=asked.cpu_dry_run)),
    "updates": Piece(lambda asked: updates.measure("torch", is_tiny=asked.cpu_dry_run)),
    "updates-vllm": Piece(lambda asked: updates.measure("vllm", is_tiny=asked.cpu_dry_run), "vllm"),
    "run": Piece(_run, "vllm"),
}


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 1 if a piece failed; the others are measured nevertheless."""
    asked = _parser().parse_args(words)
    if not asked.cpu_dry_run and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    if asked.model is not None and not (asked.model / "config.json").is_file():
        print(f"{asked.model} is no folder with a checkpoint (config.json)", file=sys.stderr)
        return 2
    if asked.only:
        print(json.dumps(PIECES[asked.only].measure(asked)))
        return 0
    folder: Path = asked.out
    folder.mkdir(parents=True, exist_ok=True)
    failed = [name for name in PIECES if not _measured(name, asked, folder)]
    text = table(folder)
    (folder / TABLE).write_text(text, encoding="utf-8")
    print(text, end="")
    for name in failed:
        print(f"{name} failed: {folder / f'{name}.log'}; a later check repeats it", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m studies.gpu_check",
        description="What this project does on the GPU of this machine, in pieces of 8 minutes.",
        epilog="example: python -m studies.gpu_check --model models/qwen2.5-0.5b-instruct",
    )
    parser.add_argument(
        "--model", type=Path, help="folder of a checkpoint for the piece `run`; default: random"
    )
    parser.add_argument("--memory-share", type=float, default=0.4, help="of the card, for vLLM")
    parser.add_argument("--cpu-dry-run", action="store_true", help="tiny models, no GPU needed")
    help = "results; a piece that has one here is not measured again"
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help=help)
    parser.add_argument("--only", choices=PIECES, help="one piece, here and now, printed as JSON")
    return parser


def _measured(name: str, asked: argparse.Namespace, folder: Path) -> bool:
    """Measure a piece in a process of its own, unless its result is there; whether it is there."""
    result, piece = folder / f"{name}.json", PIECES[name]
    if result.exists():
        return True
    if piece.package and not _has(piece.package):
        print(f"{name}: passed over, {piece.package} is not installed; get {INSTALL}")
        return True
    print(f"{name} …", flush=True)
    line = [sys.executable, "-m", "studies.gpu_check", "--only", name]
    line += ["--memory-share", str(asked.memory_share)]
    line += ["--cpu-dry-run"] if asked.cpu_dry_run else []
    line += [] if asked.model is None else ["--model", str(asked.model.resolve())]
    log = folder / f"{name}.log"
    with log.open("w", encoding="utf-8") as errors:
        try:
            done = subprocess.run(
                line, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True,
                timeout=PIECE_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            errors.write(f"{name} took longer than {PIECE_S:g} s\n")
            return False
    if done.returncode:
        return False
    lines = json.loads(done.stdout.splitlines()[-1])
    found = {"date": time.strftime("%Y-%m-%d"), "device": device_name(), "lines": lines}
    result.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return True


def _has(package: str) -> bool:
    return installed_release() is not None if package == "vllm" else find_spec(package) is not None


def device_name() -> str:
    """The card, as the driver names it."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU (dry run)"


def table(folder: Path) -> str:
    """All results of this folder, each with its date and device."""
    blocks: list[str] = []
    for name in PIECES:
        result = folder / f"{name}.json"
        if result.exists():
            found = json.loads(result.read_text(encoding="utf-8"))
            head = f"{name} · {found['date']} · {found['device']} · torch {torch.__version__}"
            blocks.append("\n".join([head, *(f"  {line}" for line in found["lines"])]))
    return "\n".join(blocks) + "\n"


if __name__ == "__main__":
    sys.exit(main())
